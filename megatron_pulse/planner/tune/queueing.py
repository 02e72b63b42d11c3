"""Schedules of steps whose messages wait for each other on shared links.

Searches let every message travel at once (``ScheduleProblem.link``). Where links have as much to do
as devices messages queue, and what was to arrive in time comes late. A schedule that is made as if
links were slower has more microbatches under way, and hides that: SDXL over four devices of 64 with
25 Gb/s takes 8 % less by it. Where nothing queues it is no better, and is not made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from megatron_pulse.planner.schedule.check.simulate import Timeline, run
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem, Synthesis
from megatron_pulse.planner.schedule.search.jobshop import exact_time, job_shop
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from megatron_pulse.planner.step.replay import Edge, replay

QUEUED = 1.005
"""Times as long as its schedule says that a step takes where messages are taken to queue."""

SLOWER = 2.0
"""Times as long as they take that messages are taken to travel then, in another schedule."""


def schedules(
    problem: ScheduleProblem, edges: Sequence[Edge], effort: int, bounded: bool = True
) -> list[tuple[Synthesis, Timeline]]:
    """Schedules of that effort, the soonest with shared links first, and when everything happens.

    Certificates are the problem's, whose messages queue nowhere.
    """
    found = synthesize(problem, math.inf, effort, bounded=bounded)
    timeline = replay(problem, found.schedule, edges).timeline
    if timeline.makespan <= QUEUED * found.certificate.makespan:
        return [(found, timeline)]
    slower = replace(problem, link=_times(SLOWER, problem.link))
    other = synthesize(slower, math.inf, effort, bounded=False).schedule
    played = replay(problem, other, edges).timeline
    length = _length(problem, other)
    bound = min(found.certificate.lower_bound, length)
    proved = length <= bound * (1 + 1e-9)
    known = replace(found.certificate, makespan=length, lower_bound=bound, proved=proved)
    made = [(found, timeline), (Synthesis(other, known), played)]
    return sorted(made, key=lambda each: each[1].makespan)


def _length(problem: ScheduleProblem, schedule: Schedule) -> float:
    """How long the schedule takes where every message travels at once."""
    if problem.recompute is not None or problem.offloaded is not None:
        return run(problem, schedule).makespan
    shop = job_shop(problem)
    return exact_time(problem, shop)(shop.earliest(schedule))


def _times(factor: float, link: float | tuple[float, ...]) -> float | tuple[float, ...]:
    return factor * link if isinstance(link, float) else tuple(factor * s for s in link)
