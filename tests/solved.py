"""Schedules as the integer program finds them."""

from __future__ import annotations

from megatron_pulse.planner.layout.placement import fold
from megatron_pulse.planner.schedule.check.validate import faults_for
from megatron_pulse.planner.schedule.ilp.solvers import Solver
from megatron_pulse.planner.schedule.ilp.time_indexed import shortest
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.search.jobshop import job_shop
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from tests.remembered import remembered


def integer_programmed(num_devices: int, num_microbatches: int, split: bool) -> Schedule:
    """What HiGHS finds on its own for a fold of equal stages with room for 2P activations."""
    asked = (num_devices, num_microbatches, split)
    return remembered(("integer program", *asked), lambda: _solve(*asked))


def _solve(num_devices: int, num_microbatches: int, split: bool) -> Schedule:
    num = 2 * num_devices
    backward, weight = (1.0 if split else 2.0,) * num, (1.0,) * num if split else None
    problem = ScheduleProblem(
        fold(num_devices),
        num_microbatches,
        (1.0,) * num,
        backward,
        weight,
        cap=(float(num),) * num_devices,
    )
    shop, known = job_shop(problem), synthesize(problem, effort=2).certificate.makespan
    found = shortest(shop, Solver.HIGHS, 60.0, round(known), 1)
    assert found.start is not None
    schedule = shop.schedule("ilp", found.start)
    assert not faults_for(problem, schedule)
    return schedule
