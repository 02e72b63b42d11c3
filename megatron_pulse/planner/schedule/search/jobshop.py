"""A step as a job shop in integers, the form that list scheduling and improvement work on.

A *class* is an operation type on a stage, numbered ``kind * S + stage`` with the types of the
problem in order. Operation ``class * M + m`` is the class on microbatch m.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from operator import add
from typing import Any, NamedTuple

import numpy as np

from megatron_pulse.planner.layout.placement import Placement
from megatron_pulse.planner.schedule.operations import Operation, OpType, Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.simulate_kernel import Waits, completes, earliest_starts

TICKS = 1000
"""Ticks of the longest operation if the durations are not whole numbers."""


@dataclass(frozen=True)
class JobShop:
    """Job shop of one step; operations are numbered as described in the module.

    ``duration[i]`` is in ticks >= 1. ``before[i]`` lists ``(j, lag)``: i starts at least ``lag``
    ticks after the end of j. ``delta[i]`` is the change of memory in use by i on its device, which
    has ``cap[device]``.
    """

    placement: Placement
    num_microbatches: int
    kinds: tuple[OpType, ...]
    duration: tuple[int, ...]
    device: tuple[int, ...]
    before: tuple[tuple[tuple[int, int], ...], ...]
    delta: tuple[int, ...]
    cap: tuple[int, ...]

    @cached_property
    def waits(self) -> Waits:
        """``before`` as arrays for compiled functions."""
        first: Any = np.cumsum([0, *map(len, self.before)])
        pairs = [pair for edges in self.before for pair in edges]
        both = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return Waits(first, both[:, 0].copy(), both[:, 1].copy())

    @property
    def num_classes(self) -> int:
        """Number of operation types times number of stages."""
        return len(self.kinds) * self.placement.num_stages

    def classes_of(self, device: int) -> list[int]:
        """Classes of ``device``."""
        count = self.num_microbatches
        return [k for k in range(self.num_classes) if self.device[k * count] == device]

    def most(self, stage: int) -> int:
        """Largest memory that one microbatch takes on a stage."""
        count, num = self.num_microbatches, self.placement.num_stages
        return max(self.delta[stage * count], -self.delta[(self.num_classes - num + stage) * count])

    def load(self, device: int) -> int:
        """Ticks that one microbatch takes on ``device``."""
        return sum(self.duration[k * self.num_microbatches] for k in self.classes_of(device))

    @property
    def most_load(self) -> int:
        """Ticks that one microbatch takes on the busiest device."""
        return max(map(self.load, range(len(self.cap))))

    def heads(self) -> list[int]:
        """Earliest possible start of each class."""
        count, num = self.num_microbatches, self.placement.num_stages
        heads = [0] * self.num_classes
        for k in (*range(num), *reversed(range(num, 2 * num)), *range(2 * num, self.num_classes)):
            for j, lag in self.before[k * count]:
                heads[k] = max(heads[k], heads[j // count] + self.duration[j] + lag)
        return heads

    def makespan(self, start: Sequence[int]) -> int:
        """Ticks from 0 to the last end."""
        ends: Iterator[int] = map(add, start, self.duration)
        return max(ends)

    @property
    def _operations(self) -> tuple[Operation, ...]:
        return _numbered(self.kinds, self.placement.num_stages, self.num_microbatches)[0]

    @property
    def _numbers(self) -> Mapping[Operation, int]:
        return _numbered(self.kinds, self.placement.num_stages, self.num_microbatches)[1]

    def lines(self, start: Sequence[int]) -> list[list[int]]:
        """Operations of every device in the order of their starts."""
        lines: list[list[int]] = [[] for _ in self.cap]
        for i in np.argsort(start, kind="stable").tolist():
            lines[self.device[i]].append(i)
        return lines

    def schedule(self, name: str, start: Sequence[int]) -> Schedule:
        """Schedule with the orders of these start times."""
        known = self._operations
        order = tuple(tuple(known[i] for i in line) for line in self.lines(start))
        return Schedule(name, self.placement, self.num_microbatches, order)

    def can_run(self, schedule: Schedule) -> bool:
        """True if the schedule has every operation once, on its device, and no circular wait."""
        number = self._numbers
        lines = [[number.get(op, -1) for op in order] for order in schedule.order]
        if sorted(i for line in lines for i in line) != list(range(len(self.device))):
            return False
        at_home = all(self.device[i] == d for d, line in enumerate(lines) for i in line)
        return at_home and len(lines) == len(self.cap) and completes(lines, self.waits)

    def earliest(self, schedule: Schedule) -> list[int]:
        """Start times of a valid schedule's orders, each operation as early as the orders allow."""
        number = self._numbers
        return self.timed([[number[op] for op in order] for order in schedule.order])

    def timed(self, lines: Sequence[Sequence[int]]) -> list[int]:
        """Start times of the operations in these orders of the devices, which have no circular
        waits."""
        found: list[int] = earliest_starts(lines, self.waits, np.array(self.duration)).tolist()
        return found


@lru_cache(maxsize=8)
def _numbered(
    kinds: tuple[OpType, ...], num_stages: int, count: int
) -> tuple[tuple[Operation, ...], Mapping[Operation, int]]:
    """Operations of all job shops of that size, and their numbers."""
    every = tuple(
        Operation(kind, stage, m)
        for kind in kinds
        for stage in range(num_stages)
        for m in range(count)
    )
    return every, {op: i for i, op in enumerate(every)}


def job_shop(problem: ScheduleProblem, ticks: int = TICKS) -> JobShop:
    """Convert ``problem`` into ticks and units of memory.

    Whole numbers are kept, times only up to ``ticks``. Otherwise the longest operation gets
    ``ticks``.
    """
    placement, count, kinds = problem.placement, problem.num_microbatches, problem.kinds
    num, home = placement.num_stages, placement.device_of_stage
    times = [problem.duration(kind, s) for kind in kinds for s in range(num)]
    lags = [problem.lag(s, s + 1) for s in range(num - 1)]
    durations, lag_ticks = _to_ticks(times, lags, ticks)
    changes, cap = _to_units(problem)
    duration, device, delta = [], [], []
    before: list[tuple[tuple[int, int], ...]] = []
    for own in range(len(kinds) * num):
        source, lag = _source(own, kinds, placement, lag_ticks)
        for m in range(count):
            edges = [] if source is None else [(source * count + m, lag)]
            if m:
                edges.append((own * count + m - 1, 0))
            before.append(tuple(edges))
        duration += [durations[own]] * count
        device += [home[own % num]] * count
        delta += [changes[own]] * count
    return JobShop(
        placement,
        count,
        kinds,
        tuple(duration),
        tuple(device),
        tuple(before),
        tuple(delta),
        cap,
    )


def exact_time(problem: ScheduleProblem, shop: JobShop) -> Callable[[Sequence[int]], float]:
    """Function from start times of ``shop`` to the makespan of their orders in the problem's unit.

    The makespan equals that of ``simulate.run``.
    """
    count, num = shop.num_microbatches, shop.placement.num_stages
    duration = [problem.duration(kind, s) for kind in shop.kinds for s in range(num)]
    each: Any = np.repeat(np.array(duration, dtype=np.float64), count)
    between = np.array([*(problem.lag(s, s + 1) for s in range(num - 1)), 0.0])
    first, edges, _ = shop.waits
    waiting: Any = np.repeat(np.arange(len(each)), np.diff(first))
    source, own = edges // count % num, waiting // count % num
    lags = np.where(source == own, 0.0, between[np.minimum(source, own)])
    waits = Waits(first, edges, lags)

    def seconds(start: Sequence[int]) -> float:
        return float((earliest_starts(shop.lines(start), waits, each) + each).max())

    return seconds


def _source(
    own: int, kinds: tuple[OpType, ...], placement: Placement, lags: Sequence[int]
) -> tuple[int | None, int]:
    """Predecessor of a class, and the lag."""
    num = placement.num_stages
    index, stage = divmod(own, num)
    upstream = placement.before[stage] if index == 0 else placement.after[stage]
    if kinds[index] is OpType.WEIGHT_GRAD or (index == 1 and upstream is None):
        return own - num, 0
    if upstream is None:
        return None, 0
    return index * num + upstream, lags[min(stage, upstream)]


def _to_ticks(
    times: Sequence[float], lags: Sequence[float], ticks: int
) -> tuple[list[int], list[int]]:
    """Integers in proportion; operations take at least one tick."""
    whole = all(float(t).is_integer() for t in (*times, *lags)) and max(*times, *lags) <= ticks
    unit = 1.0 if whole else ticks / max(times)
    return [max(1, round(t * unit)) for t in times], [round(t * unit) for t in lags]


def _to_units(problem: ScheduleProblem) -> tuple[list[int], tuple[int, ...]]:
    """Change of memory in use of each class, and capacity of each device, in units."""
    first = list(map(problem.activation_of, range(problem.placement.num_stages)))
    rest = list(first if problem.wgrad_holds_all else problem.wgrad_bytes or ())
    most = list(map(problem.peak_bytes_of, range(problem.placement.num_stages)))
    home = problem.placement.device_of_stage
    enough = problem.num_microbatches * sum(most)
    cap = [min(enough, c) for c in problem.cap or [enough] * problem.placement.num_devices]
    unit = [Fraction(1)] * len(cap)
    units_of_largest = 1 << 60
    if not all(w.is_integer() for w in map(float, [*first, *rest])):
        unit = [units_of_largest / Fraction(max(*most, *cap))] * len(cap)
        for d, room in enumerate(cap):
            largest = Fraction(max(room, *(w for w, at in zip(most, home, strict=True) if at == d)))
            if 0 < largest * unit[d] < 1 << 30:  # too coarse for a device with little memory
                unit[d] = units_of_largest / largest
    room_of = tuple(int(Fraction(c * (1 + 1e-9)) * u) for c, u in zip(cap, unit, strict=True))

    def units(values: Sequence[float]) -> list[int]:
        return [round(Fraction(w) * unit[d]) for w, d in zip(values, home, strict=True)]

    taken, left = units(first), units(rest)
    if problem.weight_grad is None:
        return [*taken, *(-w for w in taken)], room_of
    waits = [w - a for a, w in zip(taken, left, strict=True)]
    return [*taken, *waits, *(-w for w in left)], room_of


class Arrays(NamedTuple):
    """A job shop of n operations.

    ``edges[first[i]:first[i + 1]]`` are the predecessors of i, with ``lags``; they include the
    previous operation of its class.
    """

    duration: Any
    device: Any
    delta: Any
    cap: Any
    first: Any
    edges: Any
    lags: Any


def arrays(shop: JobShop) -> Arrays:
    """``shop`` for compiled functions; 64-bit integers throughout."""
    columns = shop.duration, shop.device, shop.delta, shop.cap
    duration, device, delta, cap = (np.array(values, dtype=np.int64) for values in columns)
    return Arrays(duration, device, delta, cap, *shop.waits)


def mirrored(shop: Arrays) -> Arrays:
    """The same job shop with time reversed."""
    count = len(shop.duration)
    waiting: Any = np.repeat(np.arange(count), np.diff(shop.first))
    order = np.argsort(shop.edges, kind="stable")
    first: Any = np.concatenate(([0], np.cumsum(np.bincount(shop.edges, minlength=count))))
    return shop._replace(
        delta=-shop.delta, first=first, edges=waiting[order], lags=shop.lags[order]
    )
