"""Schedules as the integer program finds them, run on real backbones."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_pulse.planner.schedule.serialize import to_csv
from tests.integration.runs import STEPS, alone, assert_same, pipeline, run
from tests.solved import integer_programmed


def test_an_integer_programs_schedule_trains_as_one_process(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text(to_csv(integer_programmed(2, 4, split=True)))
    flags = [*STEPS, *pipeline(2), "--pulse-schedule", str(path)]
    got = run(2, *flags, backbone="unet")
    assert got.executed.operations == {"F", "I", "W"}
    assert_same(got, alone(*STEPS, backbone="unet"))


@pytest.mark.parametrize("name", ["wave", "wave-split"])
def test_rank_0_searches_for_all(name: str, schedule_cache: Path) -> None:
    before = set(schedule_cache.iterdir())
    flags = [*STEPS, *pipeline(2, "--pulse-schedule", name)]
    searched = run(2, *flags, "--pulse-solver", "highs", "--pulse-solver-seconds", "2")
    assert ("W" in searched.executed.operations) == (name == "wave-split")
    assert_same(searched, alone(*STEPS))
    assert len(set(schedule_cache.iterdir()) - before) == 1
