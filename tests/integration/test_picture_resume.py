"""Order of samples of a folder of pictures over kills, resumes and numbers of replicas."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.integration.runs import Kill, Run, run
from tests.integration.test_picture_buckets import RGB
from tests.ranks import RanksFailed

BATCH, STEPS = 12, 42
"""Samples of a step, and the steps of nearly a whole epoch of 500 pictures without validation."""


def write_pictures(folder: Path, seed: int) -> None:
    """500 pictures of 40 shapes; the shapes are as frequent as chance has it."""
    draw, pixels = random.Random(seed), np.random.default_rng(seed)
    shapes = [(draw.randint(17, 60), draw.randint(17, 60)) for _ in range(40)]
    for i in range(500):
        height, width = draw.choice(shapes)
        content = pixels.integers(0, 255, (height, width, 3), dtype=np.uint8)
        Image.fromarray(content).save(folder / f"{i:03}.{draw.choice(['png', 'jpg', 'webp'])}")


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_runs_go_on_in_the_order_of_one_that_was_not(tmp_path: Path, seed: int) -> None:
    """Four replicas, then three, then one process; each killed in mid-epoch, between two saves."""
    photos = tmp_path / "photos"
    photos.mkdir()
    write_pictures(photos, seed)

    def part(ranks: int, micro_batch_size: int, *more: str, kill: Kill | None = None) -> Run:
        return run(
            ranks, *RGB, "--pulse-data", f"folder:{photos}", "--pulse-resolution", "16",
            "--pulse-buckets", "auto", "--pulse-flip", "0.5", "--pulse-crop", "random",
            "--global-batch-size", str(BATCH), "--train-iters", str(STEPS),
            "--micro-batch-size", str(micro_batch_size), *more,
            backbone="none", kill=kill,
        )  # fmt: skip

    whole = part(1, 2)
    kept = ["--save", str(tmp_path / "saved"), "--save-interval", "5"]
    for ranks, size, step in ((4, 1, 13), (3, 2, 12)):
        with pytest.raises(RanksFailed) as killed:
            part(ranks, size, *kept, kill=Kill(ranks - 1, step))
        assert killed.value.exit_codes[ranks - 1] == -signal.SIGKILL
    rest = part(1, 4, *kept)
    assert [each["samples"] for each in rest.steps] == [
        each["samples"] for each in whole.steps[-len(rest.steps) :]
    ]
    assert len(rest.steps) == STEPS - 20
    assert rest.losses == pytest.approx(whole.losses[-len(rest.losses) :], rel=1e-5)
    assert rest.validation == pytest.approx(whole.validation, rel=1e-5)
