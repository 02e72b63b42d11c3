"""Schedules of a run, synthesized within a time limit or taken from the cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from megatron_pulse.planner.program.plan import Plan
from megatron_pulse.planner.schedule.cache import cached
from megatron_pulse.planner.schedule.problem import Certificate
from megatron_pulse.planner.schedule.registry import pick
from megatron_pulse.planner.schedule.solve import solve


def find_schedules(
    plan: Plan, counts: Iterable[int], seconds: float = 10.0, solver: str = "auto"
) -> tuple[Plan, tuple[Certificate, ...]]:
    """Return ``plan`` with a schedule for each number of microbatches, and their certificates.

    Classic schedules and schedules from files are left as they are. ``seconds`` limits each search.
    Raises ValueError for an unavailable solver.
    """
    schedules, certificates = list(plan.schedules), []
    known = {schedule.num_microbatches for schedule in schedules}
    for count in sorted(set(counts) - known) if plan.is_synthesized else ():
        found = cached(plan.problem_of(count), seconds, solver, solve)
        name = pick(plan.schedule_name, plan.placement)
        schedules.append(replace(found.schedule, name=name))
        certificates.append(found.certificate)
    return replace(plan, schedules=tuple(schedules)), tuple(certificates)
