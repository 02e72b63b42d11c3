"""Corrupt images in a run: named with the command that finds all, or passed over and counted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.data.captioned import captioned_digits
from tests.integration.runs import BASE, TEXT, TINY, pipeline
from tests.integration.test_throughput import timed_run
from tests.ranks import RanksFailed, run_ranks

COUNT = 12
CORRUPT = (1, 4, 6, 9)


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """A text-conditional run on captioned digits, a third of them corrupt, of one epoch or more."""
    data = captioned_digits(tmp_path, COUNT)
    for i in CORRUPT:
        file = tmp_path / "captions" / f"{i}.png"
        file.write_bytes(file.read_bytes()[:40])
    model = [*TINY["unet"], *TEXT, "--pulse-conditioning", "send"]
    steps = ["--global-batch-size", "4", "--train-iters", "4", "--eval-iters", "0"]
    return [*model, *BASE, *steps, "--pulse-data", data]


def test_every_layout_passes_over_the_same(flags: list[str]) -> None:
    """Losses are equal in every digit of the log, and what was passed over is counted once."""
    skip = [*flags, "--pulse-skip-corrupt"]
    alone = run_ranks(1, timed_run, skip)[0][0]
    first, last = (said for said, _ in run_ranks(2, timed_run, [*skip, *pipeline(2)]))
    losses = [re.findall(r" loss ([\d.e+-]+) \|", said) for said in (alone, last)]
    assert len(losses[0]) == 4 and losses[0] == losses[1]
    named = [re.findall(r"corrupt, skipped: .*/(\d+)\.png", said) for said in (alone, first)]
    assert named[0] == named[1] and named[0]
    assert {int(i) for i in named[0]} <= set(CORRUPT) and len(set(named[0])) == len(named[0])
    counts = [re.findall(r"corrupt files skipped: (\d+)", said) for said in (alone, last)]
    assert counts[0] == counts[1] and int(counts[0][-1]) == len(named[0])
    assert "12 pictures, 0 cropped" in alone and "4 cannot be read (all decoded)" in alone
    assert "; 11 training samples, 1 validation samples" in alone


def test_the_error_names_the_file_and_the_command_that_finds_all(flags: list[str]) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(1, timed_run, flags)
    said = failed.value.outputs[0]
    assert all(f"captions/{i}.png: it is a damaged PNG file" in said for i in CORRUPT)
    assert re.search(r"captions/\d+\.png: ", said) and "Traceback" not in said
    assert re.search(
        r"pulse data info captions:\S+ --image-size 8 --channels 1 --verify' lists them all", said
    )
