"""Lower bounds of the makespan, whatever the schedule.

The forwards and (input) gradients of a microbatch are a path: stage 0 to the last and back; weight
gradients hang on it. ``first[k]`` is when class k of the path can start at the earliest.

===============  ===========================================================================
device_bound     a device's first start, its whole load, and what must follow its last end
one_machine...   the same per operation: starts no earlier than what must run before lets it,
                 ends early enough for what must follow; the best preemptive order (Jackson)
memory_bound     memory times time is at least what the activations' shortest lives need (Little)
===============  ===========================================================================
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_pulse.planner.placement import PlacementKind
from megatron_pulse.planner.schedule.operations import Kind
from megatron_pulse.planner.schedule.problem import ScheduleProblem


def lower_bound(problem: ScheduleProblem) -> float:
    """No schedule is shorter: the best of the bounds of this module."""
    if problem.placement.kind is PlacementKind.BIDIRECTIONAL:
        return _replicated_bound(problem)
    path = _Path(problem)
    return max(device_bound(problem, path), one_machine_bound(problem, path), memory_bound(problem))


def _replicated_bound(problem: ScheduleProblem) -> float:
    """Where the model is there twice: a microbatch's path, and an even share of all work."""
    num = problem.placement.num_stages
    path = sum(problem.forward) + sum(problem.backward)
    path += 2 * sum(problem.lag(s, s + 1) for s in range(num - 1))
    work = sum(problem.duration(kind, s) for kind in problem.kinds for s in range(num))
    return max(path, work * problem.num_microbatches / problem.placement.num_devices)


@dataclass(frozen=True)
class _Path:
    """The path of a microbatch and what a device has of it; positions count along the path."""

    problem: ScheduleProblem

    @cached_property
    def classes(self) -> list[tuple[Kind, int]]:
        """(kind, stage) along the path."""
        stages = range(self.problem.placement.num_stages)
        there, back = self.problem.kinds[:2]
        return [*((there, s) for s in stages), *((back, s) for s in reversed(stages))]

    @cached_property
    def time(self) -> list[float]:
        """Duration of each class of the path."""
        return [self.problem.duration(kind, stage) for kind, stage in self.classes]

    @cached_property
    def first(self) -> list[float]:
        """Earliest start of each class of the path."""
        first = [0.0]
        for (_, s), (_, t), time in zip(self.classes, self.classes[1:], self.time, strict=False):
            first.append(first[-1] + time + self.problem.lag(s, t))
        return first

    @cached_property
    def weight(self) -> list[float]:
        """Weight gradient that hangs on each class of the path; 0 where none does."""
        split = self.problem.weight_grad is not None
        return [
            self.problem.duration(Kind.WEIGHT_GRAD, s) if split and kind is not Kind.FORWARD else 0
            for kind, s in self.classes
        ]

    @cached_property
    def last(self) -> list[float]:
        """Least time from the end of each class to the end of the step."""
        ends = [f + t + w for f, t, w in zip(self.first, self.time, self.weight, strict=True)]
        return [max(ends[k:]) - self.first[k] - self.time[k] for k in range(len(ends))]

    def on(self, device: int) -> list[int]:
        """Positions of a device's classes."""
        home = self.problem.placement.device_of_stage
        return [k for k, (_, stage) in enumerate(self.classes) if home[stage] == device]

    @cached_property
    def runs(self) -> list[tuple[int, int, float, float]]:
        """Neighbours on a device: first and last position, load, load with weight gradients."""
        found = []
        for device in range(self.problem.placement.num_devices):
            mine = self.on(device)
            for i, a in enumerate(mine):
                load = whole = 0.0
                for b in mine[i:]:
                    load += self.time[b]
                    whole += self.time[b] + self.weight[b]
                    found.append((a, b, load, whole))
        return found


def device_bound(problem: ScheduleProblem, path: _Path | None = None) -> float:
    """max over devices of first start + load of all microbatches + what follows.

    A weight gradient may come last, and nothing follows it; so each run of a device's classes
    counts both without weight gradients and what follows, and with them and nothing.
    """
    path = path or _Path(problem)
    count = problem.num_microbatches
    return max(
        path.first[a] + max(count * load + min(path.last[a : b + 1]), count * whole)
        for a, b, load, whole in path.runs
    )


def last_gradients(problem: ScheduleProblem) -> tuple[float, ...]:
    """For each stage the earliest start of what completes its gradients: the last microbatch's
    backward, or weight gradient. The stage has done all of its kind before, and the microbatch has
    waited for those before it wherever it came from."""
    path, num = _Path(problem), problem.placement.num_stages
    count = problem.num_microbatches
    starts = []
    for s in range(num):
        back = 2 * num - 1 - s
        before = (count - 1) * (path.time[back] + path.weight[back])
        own = path.time[back] if problem.weight_grad else 0.0
        queue = (count - 1) * max(path.time[: back + 1])
        starts.append(
            own
            + max(
                path.first[back] + max(before, queue),
                path.first[s] + count * path.time[s] + before,
            )
        )
    return tuple(starts)


def one_machine_bound(problem: ScheduleProblem, path: _Path | None = None) -> float:
    """max over devices of the shortest preemptive order under heads and tails of each operation."""
    path = path or _Path(problem)
    heads, tails = _heads(path), _tails(path)
    bound = 0.0
    for device in range(problem.placement.num_devices):
        jobs = []
        for k in path.on(device):
            for m in range(problem.num_microbatches):
                jobs.append((heads[k][m], path.time[k], tails[k][m]))
                if path.weight[k]:
                    follow = (problem.num_microbatches - 1 - m) * path.weight[k]
                    jobs.append((heads[k][m] + path.time[k], path.weight[k], follow))
        bound = max(bound, jackson(jobs))
    return bound


def memory_bound(problem: ScheduleProblem) -> float:
    """max over devices with a cap: first start + shares of the cap times lives + what follows.

    An activation lives at the least from the start of its forward to the end of what frees it.
    """
    if problem.cap is None:
        return 0.0
    path = _Path(problem)
    num = problem.placement.num_stages
    bound = 0.0
    for device, cap in enumerate(problem.cap):
        if not cap:
            continue
        stages = problem.placement.stages_of_device(device)
        need = 0.0
        for s in stages:
            back = 2 * num - 1 - s
            life = path.first[back] + path.time[back] + path.weight[back] - path.first[s]
            need += problem.activation_of(s) / cap * life
        follows = 0.0 if problem.weight_grad else path.last[2 * num - 1 - stages[0]]
        bound = max(bound, path.first[stages[0]] + problem.num_microbatches * need + follows)
    return bound


def jackson(jobs: list[tuple[float, float, float]]) -> float:
    """Shortest preemptive one-machine schedule of (head, time, tail): longest tail first."""
    todo = sorted(jobs)
    waiting: list[tuple[float, float]] = []
    now = makespan = 0.0
    at = 0
    while at < len(todo) or waiting:
        if not waiting:
            now = max(now, todo[at][0])
        while at < len(todo) and todo[at][0] <= now:
            heapq.heappush(waiting, (-todo[at][2], todo[at][1]))
            at += 1
        tail, left = heapq.heappop(waiting)
        arrival = todo[at][0] if at < len(todo) else float("inf")
        if now + left > arrival:
            heapq.heappush(waiting, (tail, left - (arrival - now)))
            now = arrival
        else:
            now += left
            makespan = max(makespan, now - tail)
    return makespan


def _reuse(path: _Path) -> Iterator[tuple[int, int, int]]:
    """(stage, what frees its activation, n): forward m + n starts when activation m is free."""
    problem, num = path.problem, path.problem.placement.num_stages
    for s, device in enumerate(problem.placement.device_of_stage):
        takes, count = problem.activation_of(s), problem.num_microbatches
        cap = None if problem.cap is None else problem.cap[device] * (1 + 1e-9)
        if cap is not None and cap < takes * count:
            yield s, 2 * num - 1 - s, int(cap / takes)


def _waits(count: int, lines: list[tuple[float, float]]) -> list[float]:
    """max of base + n * load over ``lines``, for n = 1 to ``count``."""
    base, load = np.array(lines).T
    waits: list[float] = (base[:, None] + load[:, None] * np.arange(1, count + 1)).max(0).tolist()
    return waits


def _heads(path: _Path) -> list[list[float]]:
    """Earliest start of every class of the path for every microbatch.

    The j-th start of a class waits for j+1 runs of any of a device's classes before it.
    """
    count, first, time = path.problem.num_microbatches, path.first, path.time
    reuse = list(_reuse(path))
    heads = [
        _waits(
            count,
            [(f, 0.0)]
            + [
                (first[a] + f - first[b] - time[b], load)
                for a, b, load, _ in path.runs
                if b < k and load > 0
            ],
        )
        for k, f in enumerate(first)
    ]
    for m in range(count):
        for k in range(len(first)):
            best = heads[k][m]
            if k:
                best = max(best, heads[k - 1][m] + first[k] - first[k - 1])
            if m:
                best = max(best, heads[k][m - 1] + time[k])
            for stage, frees, room in reuse:
                if k == stage and m >= room:
                    free = heads[frees][m - room] + time[frees] + path.weight[frees]
                    best = max(best, free)
            heads[k][m] = best
    return heads


def _tails(path: _Path) -> list[list[float]]:
    """Least time from the end of every operation of the path to the end of the step."""
    count, first, time = path.problem.num_microbatches, path.first, path.time
    reuse = list(_reuse(path))
    runs = [(a, load, whole, min(path.last[a : b + 1])) for a, b, load, whole in path.runs]
    tails = []
    for k, last in enumerate(path.last):
        after = [(last, 0.0), (0.0, path.weight[k])]
        for a, load, whole, least in runs:
            if a > k:
                wait = first[a] - first[k] - time[k]
                after += [(wait + least, load), (wait, whole)]
        tails.append(_waits(count, after)[::-1])
    for m in reversed(range(count)):
        for k in reversed(range(len(first))):
            best = tails[k][m]
            if k + 1 < len(first):
                gap = first[k + 1] - first[k] - time[k]
                best = max(best, gap + time[k + 1] + tails[k + 1][m])
            if m + 1 < count:
                best = max(best, time[k] + tails[k][m + 1])
            for stage, frees, room in reuse:
                if k == frees and m + room < count:
                    following = time[stage] + tails[stage][m + room]
                    best = max(best, path.weight[k] + following)
            tails[k][m] = best
    return tails
