"""Training on folders of pictures of several shapes, in whole runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megatron_pulse.cli.main import main
from tests.cli.test_data import make_vae
from tests.encoders.pipelines import make_pipeline
from tests.integration.runs import BASE, STEPS, Run, assert_same, pipeline, run
from tests.integration.test_bad_input import refuse
from tests.integration.test_buckets import MODULE

RGB = [text.replace("channels=1", "channels=3") for text in MODULE]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 pictures that are wide, 14 that are high."""
    folder = tmp_path_factory.mktemp("photos")
    numbers = np.random.default_rng(0)
    for i in range(44):
        width, height = numbers.integers(18, 30), numbers.integers(9, 14)
        size = (height, width, 3) if i < 30 else (width, height, 3)
        Image.fromarray(numbers.integers(0, 255, size, dtype=np.uint8)).save(folder / f"{i}.png")
    return folder


def flags(photos: Path, *more: str) -> list[str]:
    return [
        *RGB, "--pulse-data", f"folder:{photos}",
        "--pulse-buckets", "24x12,12x24,16x16", "--pulse-flip", "0.5", "--pulse-crop", "random",
        "--global-batch-size", "8", "--train-iters", "3", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def alone(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    save = tmp_path_factory.mktemp("alone")
    kept = ["--save", str(save), "--save-interval", "1"]
    return run(1, *flags(photos, *kept), backbone="none"), save


def test_a_fold_has_the_bits_of_one_process(photos: Path, alone: tuple[Run, Path]) -> None:
    both = run(2, *flags(photos), *pipeline(2), backbone="none")
    assert both.executed.placement == "fold"
    assert_same(both, alone[0])


CAPTIONED: dict[str, list[str]] = {
    "UNet2DConditionModel": [
        "sample_size=16", "block_out_channels=[8,16]", "layers_per_block=1",
        'down_block_types=["CrossAttnDownBlock2D","DownBlock2D"]',
        'up_block_types=["UpBlock2D","CrossAttnUpBlock2D"]',
        "norm_num_groups=4", "cross_attention_dim=16", "attention_head_dim=4",
    ],
    "PixArtTransformer2DModel": [
        "sample_size=16", "num_attention_heads=2", "attention_head_dim=8", "num_layers=4",
        "patch_size=4", "norm_num_groups=1", "cross_attention_dim=16", "caption_channels=16",
    ],
}  # fmt: skip
"""Derived modules that read texts, with their options."""


@pytest.mark.parametrize("kind", CAPTIONED)
def test_captioned_folds_have_the_bits_of_one_process(
    photos: Path, tmp_path: Path, kind: str
) -> None:
    """Conditioning is sent: replicas of its embedder would sum gradients in another order."""
    for each in photos.glob("*.png"):
        (tmp_path / each.name).symlink_to(each)
        (tmp_path / each.name).with_suffix(".txt").write_text(f"a red bird, number {each.stem}")
    options = ["in_channels=3", "out_channels=3", *CAPTIONED[kind]]
    given = ["--pulse-module", f"diffusers:{kind}"]
    given += [word for option in options for word in ("--pulse-option", option)]
    own = [*given, *flags(photos)[len(RGB) :], "--pulse-data", f"captions:{tmp_path}"]
    own += ["--pulse-conditioning", "send"]
    assert_same(run(2, *own, *pipeline(2), backbone="none"), run(1, *own, backbone="none"))


def test_other_shapes_and_augmentation_are_refused_at_a_resume(
    photos: Path, alone: tuple[Run, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    again = [*BASE, *flags(photos), "--load", str(alone[1])]
    other = [
        "--pulse-flip",
        "0.25",
        "--pulse-buckets",
        "12x24,24x12",
        "--pulse-caption-prefix",
        "a",
    ]
    said = refuse(monkeypatch, 1, [*other, "--micro-batch-size", "2"], again)
    assert len(said) == 3
    assert "of the shapes 12x24,24x12 (height x width), those of this run 24x12,12x24" in said[0]
    assert "made with --pulse-flip 0.5, those of this run with 0.25" in said[1]
    assert "--pulse-caption-prefix" in said[2]


def test_what_contradicts_shapes_is_refused(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = refuse(monkeypatch, 1, [*flags(photos), *STEPS, "--pulse-option", "buckets=4x8"], BASE)
    assert any("--pulse-option buckets sets the model's shapes" in one for one in said)
    said = refuse(monkeypatch, 1, [*flags(photos), *STEPS, "--pulse-buckets", "4by8"], BASE)
    assert any("shapes are WIDTHxHEIGHT in pixels" in one for one in said)


@pytest.fixture(scope="module")
def pipeline_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an autoencoder that halves sides."""
    root = make_pipeline(tmp_path_factory.mktemp("sd"), ("clip", 16, 16))
    make_vae(
        root / "vae", in_channels=3, out_channels=3, block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        scaling_factor=0.5,
    )  # fmt: skip
    return root


def test_latents_of_several_shapes_are_what_is_encoded_in_the_loop(
    photos: Path, pipeline_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stores are written by one command, train alike, and give the model its shapes."""
    latent = [text.replace("channels=1", "channels=2") for text in MODULE]
    common = [*latent, *STEPS, "--pulse-flip", "0.5"]
    shapes = ["--resolution", "16", "--buckets", "auto", "--bucket-step", "4"]
    in_loop = [f"--pulse-{word[2:]}" if word.startswith("--") else word for word in shapes]
    encoders = ["--pulse-encoders", str(pipeline_folder)]
    data = ["--pulse-data", f"folder:{photos}", *in_loop, *encoders]
    expected = run(1, *common, *data, backbone="none")
    argv = ["data", "write-latents", "--from", f"folder:{photos}", *shapes, "--dtype", "fp32"]
    argv += ["--vae", str(pipeline_folder / "vae"), "--flip", "--shard-size", "7"]
    for _ in range(2):  # again: complete
        assert main([*argv, "-o", str(tmp_path / "latents")]) == 0
    told = capsys.readouterr().out
    assert "bucket 20x12: " in told and "is already complete" in told
    stores = sorted(path.name for path in (tmp_path / "latents").iterdir() if path.is_dir())
    assert len(stores) > 1
    latents = ["--pulse-data", f"latents:{tmp_path / 'latents'}"]
    assert_same(run(1, *common, *latents, backbone="none"), expected)
    assert_same(run(2, *common, *data, *pipeline(2), backbone="none"), expected)
    (tmp_path / "latents" / "order.npy").unlink()
    assert main(["data", "info", latents[1]]) == 2
    assert "buckets.json of latents" in capsys.readouterr().err
