"""Pictures drawn while a run trains: training's bits stay, pictures equal those of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from megatron_pulse.cli.main import main
from tests.data.captioned import captioned_digits
from tests.integration.runs import BASE, STEPS, TEXT, TINY, Run, assert_same, pipeline, run, train
from tests.integration.test_bad_input import refuse
from tests.ranks import RanksFailed, run_ranks

EVERY = ["--pulse-sample-every", "2", "--pulse-sample-steps", "3", "--pulse-sample-classes", "3,5,9"]
STEP_4 = ["--global-batch-size", "8", "--train-iters", "4"]


def train_recording(argv: list[str]) -> dict[str, Any]:
    """``train``, with the samples that were written, by step."""
    from megatron_pulse.integration.loop.sample_pictures import SamplePictures

    seen: dict[int, torch.Tensor] = {}
    write = SamplePictures._write

    def record(self: SamplePictures, samples: torch.Tensor, folder: Path, iteration: int) -> None:
        seen[iteration] = samples
        write(self, samples, folder, iteration)

    SamplePictures._write = record  # type: ignore[method-assign]
    return {**train(argv), "samples": seen}


def drawn(num_ranks: int, *argv: str, backbone: str = "uvit") -> dict[int, torch.Tensor]:
    """Samples of a run by step; the last rank writes them."""
    flags = [*TINY[backbone], *BASE, *argv]
    return run_ranks(num_ranks, train_recording, flags, timeout_s=240)[-1]["samples"]


def samples_of(load: Path, step: int, to: Path, *more: str) -> torch.Tensor:
    """Samples of ``pulse sample`` on one process."""
    flags = ["--steps", "3", "--per-class", "1", "--iteration", str(step), "-o", str(to)]
    assert main(["sample", "--load", str(load), *flags, *more]) == 0
    return load_file(to)["samples"]


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def test_fold_trains_the_same_bits_and_draws_those_of_the_checkpoint(tmp_path: Path):
    save = ["--save", str(tmp_path / "run"), "--save-interval", "2"]
    flags = [*STEP_4, *pipeline(2), "--pulse-ema-decay", "0.5"]
    without = run(2, *flags)
    ranks = run_ranks(2, train_recording, [*TINY["uvit"], *BASE, *flags, *save, *EVERY])
    for name in ("losses", "norms"):
        assert ranks[-1][name] == getattr(without, {"norms": "grad_norms"}.get(name, name))
    for rank in ranks:
        for kind in ("weights", "averages"):
            for name, _, _, values in rank[kind]:
                assert torch.equal(values, getattr(without, kind)[name]), name
    samples = ranks[-1]["samples"]
    assert list(samples) == [0, 2, 4]
    for step in (2, 4):
        theirs = samples_of(
            tmp_path / "run", step, tmp_path / f"{step}.safetensors", "--classes", "3,5,9"
        )
        assert relative(samples[step], theirs) <= 2e-7
    assert not torch.equal(samples[2], samples[4])
    folder = tmp_path / "run" / "samples" / "step_4"
    names = ["0000.png", "0001.png", "0002.png", "sheet.png"]
    assert sorted(path.name for path in folder.iterdir()) == names
    pixels = np.asarray(Image.open(folder / "0001.png").convert("L"))
    expected = ((samples[4][1, 0].clamp(-1, 1) + 1) * 127.5).round().byte().numpy()
    assert np.array_equal(pixels, expected)
