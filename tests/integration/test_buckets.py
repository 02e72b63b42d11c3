"""Training on stores of several shapes, in a whole run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.integration.runs import BASE, STEPS, assert_same, pipeline, run
from tests.integration.test_bad_input import refuse

MODULE = [
    "--pulse-module", "diffusers:UNet2DModel",
    "--pulse-option", "in_channels=2", "--pulse-option", "out_channels=2",
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


def test_stores_of_several_shapes_train_alike_where_a_run_goes_on_in_another_layout(
    tmp_path: Path,
) -> None:
    wide, high = store(tmp_path / "wide", 2, 4, 8), store(tmp_path / "high", 2, 8, 4)
    both = [
        *MODULE,
        "--pulse-option",
        "buckets=4x8,8x4",
        "--pulse-data",
        f"{wide},{high}",
        "--global-batch-size",
        "8",
    ]
    both += ["--train-iters", "3"]
    save = ["--save", str(tmp_path / "run"), "--save-interval", "1"]
    expected = run(1, *both, *save, backbone="none")
    again = ["--load", save[1], "--ckpt-step", "1"]
    rest = run(2, *both, *pipeline(2), *again, backbone="none")
    assert rest.executed.placement == "fold"
    end = replace(expected, losses=expected.losses[1:], grad_norms=expected.grad_norms[1:])
    assert_same(rest, end)


def test_stores_of_other_shapes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide, odd = store(tmp_path / "wide", 2, 4, 8), store(tmp_path / "odd", 2, 6, 6)
    flags = [*MODULE, "--pulse-option", "buckets=4x8,8x8,8x4", *STEPS]
    flags += ["--pulse-data", f"{wide},{odd},digits8"]
    said = refuse(monkeypatch, 1, flags, BASE)
    assert len(said) == 2
    assert "its images are 2x6x6, the backbone takes 2x4x8 or 2x8x8 or 2x8x4" in said[0]
    assert "dataset digits8: the backbone takes 3 shapes, and images have none" in said[1]
