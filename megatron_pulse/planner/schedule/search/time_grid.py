"""A problem on a grid of slots: exact for commensurable times, else a relaxation.

Durations and links are rounded down to multiples of a slot w. Take any real schedule with starts
s_i, and let s'_i = floor(s_i / w). If i must start at least p_j + l after j starts (data flow,
microbatches in order, or j before i on one device with l = 0), then s'_i >= floor(s_j / w + (p_j +
l) / w) >= s'_j + floor(p_j / w) + floor(l / w): the same holds on the grid. A forward that starts
after an activation was freed on its device does so on the grid too. Live memory after each forward
is therefore no more than before. The grid's makespan is max(s'_i + floor(p_i / w)) <= max((s_i +
p_i) / w).
So w times the least makespan on the grid is a lower bound of every real makespan. If every time is
a multiple of w, the grid equals the problem.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.search.jobshop import TICKS


@dataclass(frozen=True)
class Grid:
    """``problem`` in whole multiples of ``width``; ``exact`` means that nothing was rounded."""

    problem: ScheduleProblem
    width: float
    exact: bool


def on_grid(problem: ScheduleProblem, slots: int) -> Grid:
    """``problem`` on the finest grid whose longest operation has at most ``slots`` slots.

    The grid is exact if the times allow it. Otherwise times are rounded down, on a grid at least as
    fine as the shortest operation, even if it takes more slots.
    """
    times = [*problem.forward, *problem.backward, *(problem.weight_grad or ())]
    links = problem.link if isinstance(problem.link, tuple) else (problem.link,)
    fractions = [_exact(t) for t in (*times, *links) if t]
    unit = Fraction(
        math.gcd(*(f.numerator for f in fractions)), math.lcm(*(f.denominator for f in fractions))
    )
    longest = max(map(_exact, times))
    # A common divisor of numerators over a common multiple of denominators divides them all.
    exact = longest / unit <= min(slots, TICKS)
    width = unit if exact else longest / slots
    if not exact:
        width = min(width, min(map(_exact, times)))

    def whole(time: float, least: int) -> float:
        return float(max(least, math.floor(_exact(time) / width)))

    def wholes(values: tuple[float, ...], least: int = 1) -> tuple[float, ...]:
        return tuple(whole(v, least) for v in values)

    rounded = replace(
        problem,
        forward=wholes(problem.forward),
        backward=wholes(problem.backward),
        weight_grad=None if problem.weight_grad is None else wholes(problem.weight_grad),
        link=wholes(problem.link, 0) if isinstance(problem.link, tuple) else whole(problem.link, 0),
    )
    return Grid(rounded, float(width), exact)


def _exact(time: float) -> Fraction:
    """Fraction of the decimal number that a time is written as."""
    return Fraction(repr(float(time)))
