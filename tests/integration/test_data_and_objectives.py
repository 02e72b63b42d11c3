"""Every kind of data and every objective, through whole runs: the fold equals one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megatron_pulse.cli.main import main
from megatron_pulse.data.images.digits import load_digits
from tests.data.captioned import captioned_digits
from tests.integration.runs import (
    STEPS,
    TEXT,
    alone,
    assert_equal_to_rounding,
    assert_same,
    pipeline,
    run,
)


def image_folder(root: Path) -> str:
    """Real digits as PNG files in one folder per class."""
    images, labels = load_digits("digits8")
    for i in range(60):
        folder = root / "images" / str(labels[i])
        folder.mkdir(parents=True, exist_ok=True)
        pixels = ((images[i].squeeze() + 1) * 127.5).astype("uint8")
        Image.fromarray(pixels).save(folder / f"{i}.png")
    return f"folder:{root / 'images'}"


def latent_folder(root: Path) -> str:
    """The same digits as a memory-mapped folder."""
    folder = root / "latents"
    assert main(["data", "write-latents", "--from", "digits8", "-o", str(folder)]) == 0
    return f"latents:{folder}"


@pytest.mark.parametrize(
    ("make_data", "objective"),
    [(image_folder, "epsilon"), (latent_folder, "v")],
    ids=["folder-epsilon", "latents-v"],
)
def test_fold_equals_one_process(make_data, objective: str, tmp_path: Path) -> None:
    flags = [*STEPS, "--pulse-data", make_data(tmp_path), "--pulse-objective", objective]
    expected = run(1, *flags)
    assert len(expected.losses) == 2 and 0 < expected.losses[0] < 10
    assert expected.losses != alone(*STEPS).losses, "the flags count"
    assert_same(run(2, *flags, *pipeline(2)), expected)


def test_captions_on_a_fold(tmp_path: Path) -> None:
    data = captioned_digits(tmp_path)
    flags = [*STEPS, *TEXT, "--pulse-data", data, "--pulse-class-dropout", "0.4"]
    expected = run(1, *flags, backbone="unet")
    assert_same(run(2, *flags, *pipeline(2), backbone="unet"), expected)
    kept = run(1, *flags, "--pulse-class-dropout", "0", backbone="unet")
    assert kept.losses != expected.losses, "dropped texts count"


def test_learned_sigma_is_trained_by_its_flag_only() -> None:
    """DiT's last layer begins at zero; else only the rows that predict the mean change."""
    options = {"sample_size": 8, "in_channels": 1, "out_channels": 2}
    flags = [
        flag for key, value in options.items() for flag in ("--pulse-option", f"{key}={value}")
    ]
    flags += [*STEPS, "--pulse-backbone", "dit-tiny", "--pulse-objective", "epsilon"]
    result = run(1, *flags, backbone="none")
    mean, sigma = (result.weights["head.proj_out_2.weight"][i::2] for i in (0, 1))
    assert mean.abs().max() > 0 and sigma.abs().max() == 0
    learned = run(2, *flags, *pipeline(2), "--pulse-learned-sigma", backbone="none")
    assert learned.losses[0] > result.losses[0]
    assert learned.weights["head.proj_out_2.weight"][1::2].abs().max() > 0


def test_weighted_losses_on_a_fold() -> None:
    """Weights and offsets are a sample's own; validation stays the plain error."""
    flags = [
        *STEPS, "--pulse-loss", "huber", "--pulse-loss-weighting", "min-snr",
        "--pulse-noise-offset", "0.1", "--pulse-timestep-density", "mode", "--pulse-min-time",
        "0.25", "--eval-interval", "2",
    ]  # fmt: skip
    expected = run(1, *flags)
    assert expected.losses != alone(*STEPS).losses, "the flags count"
    assert_same(run(2, *flags, *pipeline(2)), expected)


def test_masks_count_alike_in_every_microbatch(tmp_path: Path) -> None:
    data = image_folder(tmp_path)
    for number, path in enumerate(sorted((tmp_path / "images").glob("*/*.png"))):
        mask = np.zeros((8, 8), np.uint8)
        mask[number % 8 :] = 255
        at = tmp_path / "masks" / path.relative_to(tmp_path / "images")
        at.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(mask).save(at)
    flags = [*STEPS, "--pulse-data", data]
    masked = [*flags, "--pulse-masks", str(tmp_path / "masks")]
    expected, single = run(1, *masked), run(2, *masked, *pipeline(2), "--micro-batch-size", "1")
    assert expected.losses != run(1, *flags).losses, "the flag counts"
    assert_equal_to_rounding(single, expected)
