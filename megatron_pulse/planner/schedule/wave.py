"""A constructive schedule for any placement; on the fold it is PULSE's wave.

Three steps, without a solver: list schedules by a few static rules and paces, each squeezed by
``improve``, and the shortest is kept (the project's scheduling.md, section 3).

P = 2, M = 2, fold, equal stages, forward = backward = 1 (stage:microbatch; 10 slots)

========= ==== ==== ==== ==== ==== ==== ==== ==== ==== ====
device 0  F0:0 F0:1 .    F3:0 B3:0 F3:1 B3:1 B0:0 .    B0:1
device 1  .    F1:0 F2:0 F1:1 F2:1 B2:0 B1:0 B2:1 B1:1 .
========= ==== ==== ==== ==== ==== ==== ==== ==== ==== ====
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_pulse.planner.placement import Placement
from megatron_pulse.planner.schedule.classic import check_microbatches
from megatron_pulse.planner.schedule.improve import Problem, improve, make_problem, makespan
from megatron_pulse.planner.schedule.operations import Kind, Operation, Schedule

TICKS = 1000
"""Ticks of the longest operation when the durations are not whole numbers."""

WORK = 60_000
"""Operations placed by list schedules in all; bounds the time spent at some seconds."""


@dataclass(frozen=True)
class Rule:
    """Which of the ready operations of a device comes first: the one of the lowest rank.

    rank = direction * (earliest possible start of the stage in a microbatch)
    + weight * microbatch * (largest device load), with backwards last on request.
    """

    direction: int
    weight: float
    backward_last: bool


RULES = (
    Rule(-1, 0.0, True),
    Rule(1, 0.5, False),
    Rule(1, 1.0, True),
    Rule(-1, 0.0, False),
    Rule(1, 0.5, True),
    Rule(1, 0.25, False),
    Rule(1, 0.0, False),
    Rule(1, 1.0, False),
)

PACES = (0.0, 7 / 6, 13 / 12, 1.0, 1.25, 1.5, 5 / 3)
"""Time between injected microbatches in units of the largest device load; 0: as fast as it goes."""


def wave(
    placement: Placement,
    num_microbatches: int,
    cap: int | None = None,
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
    link: float = 0.0,
    effort: int | None = None,
) -> Schedule:
    """The shortest schedule that rules and improvement find; deterministic.

    ``cap`` bounds the live stage activations on a device; by default one per stage of the whole
    chain (2P on the fold: 1F1B's peak); ``num_chunks * num_microbatches`` is no bound. ``forward``
    and ``backward`` are durations per stage (default 1 and 2), ``link`` is the time of a boundary
    between devices, in the same unit. ``effort`` is the number of list schedules to start from.
    On every stage forwards and backwards are in microbatch order. Raises ValueError when the cap
    is below the stages per device, and on durations that are not positive.
    """
    check_microbatches(num_microbatches)
    num = placement.num_stages
    cap = num if cap is None else cap
    if cap < placement.num_chunks:
        raise ValueError(
            f"a cap of {cap} live activations is below the {placement.num_chunks} that one "
            f"microbatch holds on a device; use at least {placement.num_chunks}"
        )
    forward, backward = forward or [1.0] * num, backward or [2.0] * num
    if len(forward) != num or len(backward) != num:
        raise ValueError(f"{num} stages need {num} forward and {num} backward durations")
    if min(*forward, *backward) <= 0 or link < 0:
        raise ValueError("durations must be positive and the link time not negative")

    ticks = _to_ticks([*forward, *backward, link])
    problem = make_problem(placement, num_microbatches, ticks[:num], ticks[num:-1], ticks[-1], cap)
    heads = _heads(problem)
    bound = _lower_bound(problem, heads)
    effort = max(len(RULES), WORK // len(problem.duration)) if effort is None else effort
    best: list[int] = []
    seen: set[tuple[int, ...]] = set()
    for _, (rule, pace, burst) in zip(range(effort), _starts(placement), strict=False):
        start = _list_schedule(problem, heads, rule, pace, burst)
        if tuple(start) in seen:
            continue
        seen.add(tuple(start))
        start = improve(problem, start)
        if not best or makespan(problem, start) < makespan(problem, best):
            best = start
        if makespan(problem, best) <= bound:
            break
    return _as_schedule(problem, best)


def _starts(placement: Placement) -> Iterator[tuple[Rule, float, int]]:
    """Rules, paces and numbers of microbatches injected at once, the most promising first."""
    half = placement.num_devices // 2
    for burst in sorted({1, 2, 3, half, half + 1}):
        for pace in PACES if burst == 1 else PACES[1:]:
            for rule in RULES:
                yield rule, pace, max(1, burst)


def _to_ticks(times: Sequence[float]) -> list[int]:
    """Whole numbers in proportion; operations (all but the last, the link) take at least one."""
    whole = all(float(t).is_integer() for t in times) and max(times) <= TICKS
    unit = 1.0 if whole else TICKS / max(times[:-1])
    return [max(1, round(t * unit)) for t in times[:-1]] + [round(times[-1] * unit)]


def _heads(problem: Problem) -> list[int]:
    """Earliest possible start of each stage's forward, then of each stage's backward."""
    num, count = problem.placement.num_stages, problem.num_microbatches
    heads = [0] * (2 * num)
    for k in (*range(num), *reversed(range(num, 2 * num))):
        for j, lag in problem.before[k * count]:
            heads[k] = max(heads[k], heads[j // count] + problem.duration[j] + lag)
    return heads


def _lower_bound(problem: Problem, heads: Sequence[int]) -> int:
    """max over devices of (start of its first forward) + load + (what follows its last backward).

    Source: scheduling.md, section 1; capless, hence a bound under every cap too.
    """
    num, count = problem.placement.num_stages, problem.num_microbatches
    first_end = heads[num] + problem.duration[num * count]
    bound = 0
    for device in range(problem.placement.num_devices):
        first = problem.placement.stages_of_device(device)[0]
        last_end = heads[num + first] + problem.duration[(num + first) * count]
        load = sum(p for p, d in zip(problem.duration, problem.device, strict=True) if d == device)
        bound = max(bound, heads[first] + load + first_end - last_end)
    return bound


def _list_schedule(
    problem: Problem, heads: Sequence[int], rule: Rule, pace: float, burst: int
) -> list[int]:
    """Start times: whenever a device is free it takes the ready operation of lowest rank.

    A forward is admitted only if afterwards the unfinished microbatches, the oldest first, can
    each still get all the activations that they need on the device from what is spare and what
    the older ones give back (the banker's rule), so a cap never deadlocks.
    Microbatch m enters the first stage no earlier than ``pace * load * (m - burst + 1)``.
    """
    placement, count = problem.placement, problem.num_microbatches
    num, chunks, devices = placement.num_stages, placement.num_chunks, placement.num_devices
    classes = [
        [k for k in range(2 * num) if placement.device_of_stage[k % num] == d]
        for d in range(devices)
    ]
    load = max(sum(problem.duration[k * count] for k in mine) for mine in classes)
    late = 4 * (max(heads) + load * count)
    rank = [
        rule.direction * h + late * (rule.backward_last and k >= num) for k, h in enumerate(heads)
    ]
    release = [int(max(0, m - burst + 1) * pace * load) for m in range(count)]
    step = [0] * (2 * num)
    start, end = [-1] * len(problem.duration), [-1] * len(problem.duration)
    free, live, oldest = [0] * devices, [0] * devices, [0] * devices
    to_allocate = [[chunks] * count for _ in range(devices)]
    to_free = [[chunks] * count for _ in range(devices)]
    links = {lag for edges in problem.before for _, lag in edges} | {0}
    events = sorted(set(release))

    def ready(k: int, now: int) -> bool:
        m, device = step[k], problem.device[k * count]
        if m == count or (k == 0 and release[m] > now):
            return False
        if any(end[j] < 0 or end[j] + lag > now for j, lag in problem.before[k * count + m]):
            return False
        return k >= num or is_safe(device, m)

    def is_safe(device: int, admitted: int) -> bool:
        spare = problem.cap - live[device] - 1
        for m in range(oldest[device], count):
            needs = to_allocate[device][m] - (m == admitted)
            if needs > spare:
                return False
            if m >= admitted and needs == chunks:
                break
            spare += to_free[device][m] - needs
        return True

    while events:
        now = heapq.heappop(events)
        while events and events[0] == now:
            heapq.heappop(events)
        for device, mine in enumerate(classes):
            if free[device] > now:
                continue
            choices = [(rank[k] + rule.weight * load * step[k], k) for k in mine if ready(k, now)]
            if not choices:
                continue
            k = min(choices)[1]
            m = step[k]
            i = k * count + m
            step[k] += 1
            start[i] = now
            end[i] = free[device] = now + problem.duration[i]
            for lag in links:
                heapq.heappush(events, end[i] + lag)
            live[device] += problem.delta[i]
            if k < num:
                to_allocate[device][m] -= 1
                continue
            to_free[device][m] -= 1
            while oldest[device] < count - 1 and not to_free[device][oldest[device]]:
                oldest[device] += 1
    return start


def _as_schedule(problem: Problem, start: Sequence[int]) -> Schedule:
    num, count = problem.placement.num_stages, problem.num_microbatches
    order: list[list[Operation]] = [[] for _ in range(problem.placement.num_devices)]
    for i in sorted(range(len(start)), key=start.__getitem__):
        k, m = divmod(i, count)
        kind = Kind.FORWARD if k < num else Kind.BACKWARD
        order[problem.device[i]].append(Operation(kind, k % num, m))
    return Schedule("wave", problem.placement, count, tuple(map(tuple, order)))
