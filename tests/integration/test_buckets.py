"""Training on stores of several shapes, in a whole run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from megatron_pulse.cli.main import main
from tests.cli.test_data import make_vae
from tests.integration.runs import (
    BASE,
    STEPS,
    Run,
    assert_same,
    pipeline,
    run,
)
from tests.integration.test_bad_input import refuse

MODULE = [
    "--pulse-module", "diffusers:UNet2DModel",
    "--pulse-option", "in_channels=1", "--pulse-option", "out_channels=1",
    "--pulse-option", "block_out_channels=[4,8]", "--pulse-option", "layers_per_block=1",
    "--pulse-option", 'down_block_types=["DownBlock2D","DownBlock2D"]',
    "--pulse-option", 'up_block_types=["UpBlock2D","UpBlock2D"]',
    "--pulse-option", "norm_num_groups=2", "--pulse-option", "add_attention=false",
    "--pulse-class-dropout", "0",
]  # fmt: skip


def store(folder: Path, *shape: int) -> str:
    from megatron_pulse.data.latents.layout import LatentLayout, LatentType
    from megatron_pulse.data.latents.writer import LatentWriter

    generator = torch.Generator().manual_seed(sum(shape))
    with LatentWriter(folder, LatentLayout(shape, 1, LatentType.FLOAT32, {})) as writer:
        for _ in range(12):
            writer.add(torch.randn(shape, generator=generator), 0, {})
        writer.close()
    return f"latents:{folder}"


@dataclass
class Buckets:
    """A run of one process on two stores, its flags, and where its checkpoints are."""

    flags: list[str]
    checkpoints: Path
    run: Run


@pytest.fixture(scope="module")
def buckets(tmp_path_factory: pytest.TempPathFactory) -> Buckets:
    """Two steps, each saved."""
    folder = tmp_path_factory.mktemp("buckets")
    stores = store(folder / "wide", 1, 4, 8), store(folder / "high", 1, 8, 4)
    flags = [*MODULE, "--pulse-option", "buckets=4x8,8x4", "--pulse-data", ",".join(stores)]
    flags += ["--global-batch-size", "8", "--train-iters", "2"]
    save = ["--save", str(folder / "run"), "--save-interval", "1"]
    return Buckets(flags, folder / "run", run(1, *flags, *save, backbone="none"))


def test_stores_of_several_shapes_train_alike_where_a_run_goes_on_in_another_layout(
    buckets: Buckets,
) -> None:
    again = ["--load", str(buckets.checkpoints), "--ckpt-step", "1"]
    rest = run(2, *buckets.flags, *pipeline(2), *again, backbone="none")
    assert rest.executed.placement == "fold"
    all_ = buckets.run
    end = replace(all_, losses=all_.losses[1:], grad_norms=all_.grad_norms[1:])
    assert_same(rest, end)


def test_another_order_of_shapes_in_mid_epoch_is_refused(
    buckets: Buckets, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = [*BASE, *buckets.flags, "--load", str(buckets.checkpoints)]
    other = ["--global-batch-size", "16", "--micro-batch-size", "2"]
    (said,) = refuse(monkeypatch, 1, other, again)
    assert "sample order has 8 consecutive samples of one shape, this run 16" in said
    assert said.endswith("Give --pulse-bucket-batch 8")
    said = refuse(monkeypatch, 1, ["--pulse-bucket-batch", "3"], again)
    assert "--pulse-bucket-batch 3 is not a multiple of --micro-batch-size 2" in said
    assert "--pulse-bucket-batch 3 does not divide --global-batch-size 8" in said


def test_samples_are_of_the_first_shape_or_of_that_asked_for(
    buckets: Buckets, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command reports it; an option may put another shape first."""
    command = ["sample", "--load", str(buckets.checkpoints), "-o", str(tmp_path / "a.png")]
    command += ["--module", MODULE[1], "--option", "buckets=8x4,4x8"]
    assert main([*command, "--steps", "1", "--per-class", "1"]) == 0
    assert "samples are 1x8x4, the first of its 2 shapes;" in capsys.readouterr().err
    picture = Image.open(tmp_path / "a.png")
    assert picture.height > picture.width
    command = [*command[:-2], "--steps", "1", "--per-class", "1", "--height"]
    assert main([*command, "32", "--width", "128"]) == 2
    assert "latents need an autoencoder for these: give --vae or" in capsys.readouterr().err
    make_vae(
        tmp_path / "vae", latent_channels=1, block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    command += ["32", "--vae", str(tmp_path / "vae"), "--width"]
    assert main([*command, "129"]) == 2
    assert "--width is 129: must be a multiple of 2, the autoencoder" in capsys.readouterr().err
    assert main([*command, "128"]) == 0
    picture = Image.open(tmp_path / "a.png")
    assert (picture.width, picture.height > picture.width) == (128 + 4, False)


def test_stores_of_other_shapes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide, odd = store(tmp_path / "wide", 1, 4, 8), store(tmp_path / "odd", 1, 6, 6)
    flags = [*MODULE, "--pulse-option", "buckets=4x8,8x8,8x4", *STEPS]
    flags += ["--pulse-data", f"{wide},{odd},digits8"]
    said = refuse(monkeypatch, 1, flags, BASE)
    assert len(said) == 2
    assert "its images are 1x6x6, the backbone takes 1x4x8 or 1x8x8 or 1x8x4" in said[0]
    assert "dataset digits8: the backbone takes 3 shapes, but digits have one" in said[1]
