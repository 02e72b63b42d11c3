"""Schedules under link contention.

Schedule searches let every message travel at once (``ScheduleProblem.link``). If links are about as
busy as devices, messages queue and arrive late. A schedule made for slower links has more
microbatches in flight and hides the delays. It is made only if messages queue.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from megatron_pulse.planner.program.simulate import StageMessage, simulate_step
from megatron_pulse.planner.schedule.check.simulate import Timeline, simulate
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem, Synthesis
from megatron_pulse.planner.schedule.search.jobshop import exact_time, job_shop
from megatron_pulse.planner.schedule.search.synthesize import synthesize

QUEUED = 1.005
"""Ratio of the makespan with contention to that without, above which messages count as queueing."""

SLOWER = 2.0
"""Factor on the message times for the second schedule."""


def schedules(
    problem: ScheduleProblem, edges: Sequence[StageMessage], effort: int, bounded: bool = True
) -> list[tuple[Synthesis, Timeline]]:
    """Schedules of that effort with their timelines, shortest under link contention first.

    Certificates are those of the problem without contention.
    """
    found = synthesize(problem, math.inf, effort, bounded=bounded)
    timeline = simulate_step(problem, found.schedule, edges).timeline
    if timeline.makespan <= QUEUED * found.certificate.makespan:
        return [(found, timeline)]
    slower = replace(problem, link=_times(SLOWER, problem.link))
    other = synthesize(slower, math.inf, effort, bounded=False).schedule
    played = simulate_step(problem, other, edges).timeline
    length = _length(problem, other)
    bound = min(found.certificate.lower_bound, length)
    proved = length <= bound * (1 + 1e-9)
    known = replace(found.certificate, makespan=length, lower_bound=bound, proved=proved)
    made = [(found, timeline), (Synthesis(other, known), played)]
    return sorted(made, key=lambda each: each[1].makespan)


def _length(problem: ScheduleProblem, schedule: Schedule) -> float:
    """Makespan of the schedule without contention."""
    if problem.recompute_s is not None or problem.offload_bytes is not None:
        return simulate(problem, schedule).makespan
    shop = job_shop(problem)
    return exact_time(problem, shop)(shop.earliest(schedule))


def _times(factor: float, link: float | tuple[float, ...]) -> float | tuple[float, ...]:
    return factor * link if isinstance(link, float) else tuple(factor * s for s in link)
