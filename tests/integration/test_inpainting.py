"""Runs that inpaint: masks and masked pictures beside the sample, in every layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megatron_pulse.cli.main import main
from megatron_pulse.data.images.digits import load_digits
from tests.integration.runs import BASE, STEPS, TINY, alone, assert_same, pipeline, run
from tests.integration.test_bad_input import refuse

TAKES = ["--pulse-option", "in_channels=3"]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_fold_trains_as_one_process(num_ranks: int) -> None:
    """Losses, gradient norms, validation and weights to the bit; the masks are random."""
    expected = alone(*STEPS, *TAKES, backbone="unet")
    assert_same(run(num_ranks, *STEPS, *TAKES, *pipeline(num_ranks), backbone="unet"), expected)


def test_masks_of_files_go_on_in_the_middle_and_are_sampled(tmp_path: Path) -> None:
    images, _ = load_digits("digits8")
    for i in range(40):
        for name in ("photos", "masks"):
            (tmp_path / name).mkdir(exist_ok=True)
        pixels = ((images[i].squeeze() + 1) * 127.5).astype("uint8")
        Image.fromarray(pixels).save(tmp_path / f"photos/{i}.png")
        mask = np.zeros((8, 8), np.uint8)
        mask[:, : 1 + i % 7] = 255
        Image.fromarray(mask).save(tmp_path / f"masks/{i}.png")
    data = ["--pulse-data", f"folder:{tmp_path / 'photos'}"]
    masks = ["--pulse-inpaint-masks", str(tmp_path / "masks")]
    save = ["--save", str(tmp_path / "kept"), "--save-interval", "1"]
    given = [*STEPS, *TAKES, *data, "--pulse-ema-decay", "0.9"]
    expected = alone(*given, *masks, backbone="unet")
    assert expected.losses != alone(*given, backbone="unet").losses
    whole = [*given, *masks, *pipeline(2), *save]
    first = run(2, *whole, "--exit-interval", "1", backbone="unet")
    again = run(2, *whole, backbone="unet")
    joined = replace(
        again, losses=first.losses + again.losses, grad_norms=first.grad_norms + again.grad_norms
    )
    assert_same(joined, expected)
    draw = ["sample", "--load", str(tmp_path / "kept"), "--steps", "2", "--per-class", "1"]
    assert main([*draw, "--from-data", "2", "-o", str(tmp_path / "held-out.png")]) == 0
    picture, mask = (str(tmp_path / name / "3.png") for name in ("photos", "masks"))
    given = ["--classes", "0", "--image", picture, "--mask", mask]
    assert main([*draw, *given, "-o", str(tmp_path / "one.png")]) == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--pulse-inpaint-masks", "masks"], "is for one folder of pictures, not digits8"),
        ([*TAKES, "--pulse-option", "patchwise=1/2:0.3"], "inpainting models take whole pictures"),
    ],
)
def test_what_cannot_be(flags: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = refuse(monkeypatch, 1, flags, [*TINY["unet"], *BASE, *STEPS])
    assert any(said in fault for fault in faults)


def test_masks_of_a_model_that_reads_none_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "photos").mkdir()
    for i in range(20):
        Image.new("L", (8, 8), i).save(tmp_path / f"photos/{i}.png")
    flags = ["--pulse-data", f"folder:{tmp_path / 'photos'}", "--pulse-inpaint-masks", "masks"]
    (fault,) = refuse(monkeypatch, 1, flags, [*TINY["unet"], *BASE, *STEPS])
    assert "--pulse-inpaint-masks masks: it reads no masks" in fault
