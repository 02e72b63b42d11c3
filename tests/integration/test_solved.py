"""Schedules as the integer program finds them, run on real backbones."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from megatron_pulse.planner.schedule.files import to_csv
from tests.integration.runs import Run, assert_same, pipeline, run
from tests.solved import integer_programmed

M = 4
STEPS = ["--global-batch-size", str(2 * M), "--train-iters", "3"]


@lru_cache
def alone(backbone: str) -> Run:
    """The same training on one process."""
    return run(1, *STEPS, backbone=backbone)


@pytest.mark.parametrize(
    ("backbone", "num_devices", "split"),
    [("uvit", 4, True), ("unet", 4, False), ("uvit", 2, False), ("unet", 2, True)],
)
def test_an_integer_programs_schedule_trains_as_one_process(
    tmp_path: Path, backbone: str, num_devices: int, split: bool
) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text(to_csv(integer_programmed(num_devices, M, split)))
    flags = [*STEPS, *pipeline(num_devices), "--pulse-schedule", str(path)]
    got = run(num_devices, *flags, backbone=backbone)
    assert got.executed.operations == ({"F", "I", "W"} if split else {"F", "B"})
    assert_same(got, alone(backbone))


@pytest.mark.parametrize("name", ["wave", "wave-split"])
def test_rank_0_searches_for_all(name: str, schedule_cache: Path) -> None:
    before = set(schedule_cache.iterdir())
    flags = [*STEPS, *pipeline(2, "--pulse-schedule", name)]
    searched = run(2, *flags, "--pulse-solver", "highs", "--pulse-solver-seconds", "2")
    assert ("W" in searched.executed.operations) == (name == "wave-split")
    assert_same(searched, alone("uvit"))
    assert len(set(schedule_cache.iterdir()) - before) == 1
