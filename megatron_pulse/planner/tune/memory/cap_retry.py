"""Schedules whose peak memory fits the devices.

The caps of a schedule problem leave room for the largest working memory of any operation. The peak
of a schedule is counted differently (``memory.peaks``). Skips between stages of one device are
included, and the working memory of each operation is added to the bytes held when it runs. A
schedule within its caps can therefore exceed a device, mostly by less than a percent. Lowering the
caps by the excess gives a schedule that fits and is hardly longer::

    caps --> schedule --> peaks --> room? yes
     ^                               | no
     +---- lower by the excess ------+
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import ge

from megatron_pulse.planner.schedule.bound.bounds import lower_bound
from megatron_pulse.planner.schedule.check.simulate import Timeline
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem, Synthesis

type Caps = tuple[float, ...] | None
"""Caps of a schedule problem: bytes per device."""

type Make = Callable[[ScheduleProblem], Sequence[tuple[Synthesis, Timeline]]]
"""Function that returns schedules of a problem with their timelines, shortest first."""

LOWERED = 3
"""Maximum number of times that the caps are lowered."""

_TIGHT = 1 + 1e-9


def schedule_with_room(
    problem: ScheduleProblem,
    make: Make,
    peaks: Callable[[Schedule], tuple[float, ...]],
    limits: Sequence[float],
    least: Sequence[float],
    has_time: Callable[[], bool] = lambda: True,
) -> tuple[Synthesis, Timeline, tuple[float, ...], Caps]:
    """First schedule that ``make`` returns for the problem and that fits every device.

    ``peaks`` are the bytes of each device in a schedule, ``limits`` what each has, ``least``
    what one microbatch needs of each device's caps. If no schedule fits, the caps are lowered by
    the excess, up to ``LOWERED`` times while ``has_time``. If none ever fits, the very first
    schedule is returned. Returns the schedule, the timeline, the peak bytes of each device and the
    caps.
    """
    lowered, first = problem, None
    for _ in range(LOWERED + 1):
        for found, timeline in make(lowered):
            memory = peaks(found.schedule)
            first = first or (found, timeline, memory, lowered.cap)
            if fit_in(memory, limits):
                return _of_problem(found, problem, lowered.cap), timeline, memory, lowered.cap
        caps = _lower(lowered.cap, memory, limits, least)
        if caps is None or not has_time():
            break
        lowered = replace(lowered, cap=caps)
    assert first is not None
    return first


def fit_in(memory: Sequence[float], limits: Sequence[float]) -> bool:
    """True if the ``memory`` of every device is within its limit, up to rounding."""
    return all(held <= limit * _TIGHT for held, limit in zip(memory, limits, strict=True))


def _lower(
    caps: Caps, memory: Sequence[float], limits: Sequence[float], least: Sequence[float]
) -> Caps:
    """Caps lowered by each device's excess; None if one microbatch would no longer fit."""
    if caps is None:
        return None
    each = zip(caps, memory, limits, strict=True)
    lower = tuple(cap - max(0.0, used - limit) for cap, used, limit in each)
    return lower if all(map(ge, lower, least)) else None


def _of_problem(found: Synthesis, problem: ScheduleProblem, caps: Caps) -> Synthesis:
    """Certificate of a schedule made with lower ``caps``, with the lower bound of the original
    problem."""
    if caps == problem.cap:
        return found
    known, least = found.certificate, lower_bound(problem, work=0.0)
    proved = known.makespan <= least * _TIGHT
    return replace(found, certificate=replace(known, lower_bound=least, proved=proved))
