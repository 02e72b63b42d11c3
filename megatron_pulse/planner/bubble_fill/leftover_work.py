"""Slices after the last operations, spread over all devices.

This is McNaughton's wrap-around rule (Management Science 6, 1959) in whole layers. Devices are
filled up to a common end one after another. The chain that would exceed the end is split there; its
first part runs at the start of another device. Bisection finds the end.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megatron_pulse.planner.bubble_fill.components import Slice
from megatron_pulse.planner.bubble_fill.problem import FillProblem

STEPS = 24


@dataclass(frozen=True, slots=True)
class RemainingJob:
    """Layers of a job from ``done`` on.

    The job is on ``device`` (-1: not started) since ``ready``.
    """

    component: int
    samples: tuple[int, int]
    done: int
    seconds: Sequence[float]
    device: int
    ready: float
    left: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "left", sum(self.seconds[self.done :]))

    def slice_of(self, first: int, last: int) -> Slice:
        """Slice of its layers ``first`` to ``last``, exclusive."""
        return Slice(self.component, (first, last), self.samples)

    @property
    def whole(self) -> Slice:
        """Slice of all its layers."""
        return self.slice_of(self.done, len(self.seconds))


def wrap_around(
    problem: FillProblem,
    rest: Sequence[RemainingJob],
    homes: Sequence[frozenset[int]],
    starts: Sequence[float],
    moving: bool = True,
) -> list[list[Slice]]:
    """Slices of each device after its last operation, so that the last slice ends earliest.

    Device d is free from ``starts[d]`` on. Without ``moving`` a job stays on one device. Raises
    ValueError for a job without a device.
    """
    if not rest:
        return [[] for _ in range(problem.num_devices)]
    low = max(problem.timeline.makespan, (sum(starts) + sum(r.left for r in rest)) / len(starts))
    best = _spread_until(problem, rest, homes, moving, starts, low)
    if best is not None:
        return best
    high = low
    while best is None:
        high = 2 * high - min(starts) + 1e-9
        if not math.isfinite(high) or high > 1e12:
            raise ValueError("components have no device that may host them")
        best = _spread_until(problem, rest, homes, moving, starts, high)
    for _ in range(STEPS):
        if high - low <= 1e-5 * high:
            break
        middle = (low + high) / 2
        found = _spread_until(problem, rest, homes, moving, starts, middle)
        if found is None:
            low = middle
        else:
            high, best = middle, found
    return best


def _spread_until(
    problem: FillProblem,
    rest: Sequence[RemainingJob],
    homes: Sequence[frozenset[int]],
    moving: bool,
    starts: Sequence[float],
    end: float,
) -> list[list[Slice]] | None:
    """Slices that end by ``end``; None if this rule finds none."""
    order = sorted(range(len(starts)), key=starts.__getitem__)
    free = [end - start for start in starts]
    lines: list[list[tuple[int, Slice]]] = [[] for _ in starts]
    waited = {b for r in rest for b in problem.before[r.component]}
    pool: list[RemainingJob] = []
    # Longest first; jobs already on a device come before the pool.
    for r in sorted(rest, key=lambda r: -r.left):
        if r.device >= 0 and (r.left <= free[r.device] or not moving):
            free[r.device] -= r.left
            lines[r.device].append((problem.levels[r.component], r.whole))
        else:
            pool.append(r)
    if min(free) < 0:
        return None
    pool.sort(key=lambda r: (len(homes[r.component]), -r.left))
    first: list[Slice | None] = [None] * len(starts)
    last: list[Slice | None] = [None] * len(starts)
    for at, device in enumerate(order):
        left = []
        for r in pool:
            if device in homes[r.component] and r.left <= free[device]:
                free[device] -= r.left
                lines[device].append((problem.levels[r.component], r.whole))
            else:
                left.append(r)
        pool = left
        # One job of each shape: identical ones split in the same way.
        can: dict[tuple[int, int, int], RemainingJob] = {}
        for r in pool if moving else ():
            waits = r.component in waited or problem.before[r.component]
            if device in homes[r.component] and not waits:
                can.setdefault((r.component, r.done, r.samples[1] - r.samples[0]), r)
        found = None
        for other in order[at + 1 :]:
            if first[other] is None:
                split = _split(
                    problem, can.values(), homes, free[device], other, starts[other], end, free
                )
                if split is not None and (found is None or split[0] > found[0]):
                    found = (*split, other)
        if found is not None:
            ran, r, layer, other = found
            last[device], first[other] = (
                r.slice_of(layer, len(r.seconds)),
                r.slice_of(r.done, layer),
            )
            free[device] -= ran
            free[other] -= r.left - ran
            pool.remove(r)
    if pool:
        return None
    return [
        [
            *([head] if (head := first[d]) else []),
            *(slice_ for _, slice_ in sorted(lines[d], key=lambda item: item[0])),
            *([tail] if (tail := last[d]) else []),
        ]
        for d in range(len(starts))
    ]


def _split(
    problem: FillProblem,
    rest: Iterable[RemainingJob],
    homes: Sequence[frozenset[int]],
    room: float,
    other: int,
    start: float,
    end: float,
    free: Sequence[float],
) -> tuple[float, RemainingJob, int] | None:
    """Chain of which the most runs last within ``room``: its seconds there, the chain, its first
    layer there.

    The earlier layers run first on ``other``, from ``start`` on, and their output has arrived by
    then.
    """
    best = None
    for r in rest:
        if other not in homes[r.component]:
            continue
        ran = 0.0
        for layer in range(len(r.seconds) - 1, r.done, -1):
            ran += r.seconds[layer]
            if ran > room:
                break
            before = r.left - ran
            lag = problem.lag_s(r.component, layer - 1, r.samples[1] - r.samples[0])
            if before <= free[other] and start + before + lag <= end - ran:
                if best is None or ran > best[0]:
                    best = ran, r, layer
    return best


def list_schedule(
    problem: FillProblem,
    rest: Sequence[RemainingJob],
    homes: Sequence[frozenset[int]],
    starts: Sequence[float],
    moving: bool,
    seeds: Sequence[int],
) -> list[list[Slice]]:
    """Slices of each device from ``starts[d]`` on, by a randomised list schedule.

    Each choice has a seed of its own, so that one can change alone; seeds repeat cyclically. The
    earliest free device takes some layers of a job, usually all layers of the job with the most
    work left. Raises ValueError for a job without a device.
    """
    each = itertools.cycle(seeds)
    free = [*starts]
    lines: list[list[Slice]] = [[] for _ in free]
    done = {id(r): r.done for r in rest}
    at = {id(r): (r.device, r.ready) for r in rest}
    left = list(rest)

    def ready(r: RemainingJob, device: int) -> float:
        if not done[id(r)]:
            return max((at[id(o)][1] for o in rest if _is_before(problem, o, r)), default=0.0)
        where, when = at[id(r)]
        count = r.samples[1] - r.samples[0]
        lag = problem.lag_s(r.component, done[id(r)] - 1, count)
        return when + (lag if where != device else 0.0)

    while left:
        chance = random.Random(next(each))
        can = [
            (max(free[device], ready(r, device)), device, r)
            for r in left
            if not any(_is_before(problem, o, r) for o in left)
            for device in homes[r.component]
            if moving or at[id(r)][0] in (-1, device)
        ]
        if not can:
            raise ValueError("components have no device that may host them")
        soonest = min(now for now, _, _ in can)
        same = [c for c in can if c[0] <= soonest * (1 + 1e-9)]
        start, device, r = (
            chance.choice(can)
            if chance.random() < 0.1
            else max(same, key=lambda c: c[2].left * chance.uniform(0.7, 1.3))
        )
        first, last = done[id(r)], len(r.seconds)
        if last - first > 1 and chance.random() < 0.4:
            last = chance.randint(first + 1, last)
        lines[device].append(r.slice_of(first, last))
        done[id(r)] = last
        free[device] = start + sum(r.seconds[first:last])
        at[id(r)] = device, free[device]
        if last == len(r.seconds):
            left.remove(r)
    return lines


def _is_before(problem: FillProblem, one: RemainingJob, other: RemainingJob) -> bool:
    """True if ``other`` depends on results of ``one``."""
    return (
        one.component in problem.before[other.component]
        and one.samples[0] < other.samples[1]
        and other.samples[0] < one.samples[1]
    )
