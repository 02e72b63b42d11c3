"""Schedules as the integer program finds them, run on real backbones."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from megatron_pulse.planner.placement import fold
from megatron_pulse.planner.schedule.files import to_csv
from megatron_pulse.planner.schedule.ilp.solvers import Solver
from megatron_pulse.planner.schedule.ilp.time_indexed import shortest
from megatron_pulse.planner.schedule.jobshop import job_shop
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.synthesize import synthesize
from megatron_pulse.planner.schedule.validate import faults_for
from tests.integration.runs import Run, assert_same, pipeline, run

M = 4
STEPS = ["--global-batch-size", str(2 * M), "--train-iters", "3"]


def write_schedule(path: Path, num_devices: int, split: bool) -> Path:
    """What HiGHS finds on its own for equal stages, as a CSV file."""
    num = 2 * num_devices
    backward, weight = (1.0 if split else 2.0,) * num, (1.0,) * num if split else None
    problem = ScheduleProblem(
        fold(num_devices), M, (1.0,) * num, backward, weight, cap=(float(num),) * num_devices
    )
    shop, known = job_shop(problem), synthesize(problem, effort=2).certificate.makespan
    found = shortest(shop, Solver.HIGHS, 30.0, round(known), 1)
    assert found.start is not None
    schedule = shop.schedule("ilp", found.start)
    assert not faults_for(problem, schedule)
    path.write_text(to_csv(schedule))
    return path


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
    path = write_schedule(tmp_path / "schedule.csv", num_devices, split)
    flags = [*STEPS, *pipeline(num_devices), "--pulse-schedule", str(path)]
    assert_same(run(num_devices, *flags, backbone=backbone), alone(backbone))


@pytest.mark.parametrize("name", ["wave", "wave-split"])
def test_rank_0_searches_for_all(name: str, schedule_cache: Path) -> None:
    before = set(schedule_cache.iterdir())
    flags = [*STEPS, *pipeline(2, "--pulse-schedule", name)]
    searched = run(2, *flags, "--pulse-solver", "highs", "--pulse-solver-seconds", "2")
    assert_same(searched, alone("uvit"))
    assert len(set(schedule_cache.iterdir()) - before) == 1
