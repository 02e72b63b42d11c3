"""Optimal makespan of a small problem, over every order of its operations.

Orders grow by one operation at a time, which starts as soon as its device and its inputs allow. Two
partial schedules with the same operations differ only in when devices are free and results are
available. A partial schedule that is later in all of these is dropped, and so is one that cannot
end in time. The method sees devices that keep each other waiting, which bounds of single devices
cannot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megatron_pulse.planner.schedule.bound.microbatch_path import MicrobatchPath
from megatron_pulse.planner.schedule.operations import OpType

type _Done = tuple[int, ...]
"""Number of completed microbatches of each class."""

type _Times = tuple[float, ...]
"""Time at which each device is free, then the ends of results that are still needed."""


@dataclass(frozen=True)
class _Class:
    """Operations of one type on one stage.

    ``source`` is the class that the operations wait for (-1: none). ``position`` is their position
    on the path of a microbatch (-1: a weight gradient).
    """

    time: float
    device: int
    source: int
    lag: float
    change: float
    position: int


def exhaustive_bound(path: MicrobatchPath, length: float) -> float:
    """Length of the shortest schedule, or ``length`` if none is shorter.

    Returns 0 if the problem has too many operations or partial schedules.
    """
    problem = path.problem
    operations = problem.num_microbatches * problem.placement.num_stages * len(problem.kinds)
    if operations > 48:  # with 1,500 beginnings below a tenth of a second
        return 0.0
    return _Orders(path, length * (1 - 1e-9)).shortest(length)


@dataclass(frozen=True)
class _Orders:
    path: MicrobatchPath
    latest: float
    """Latest end of a step that is shorter than the known one."""

    @cached_property
    def classes(self) -> list[_Class]:
        problem, path = self.path.problem, self.path
        home, found = problem.placement.device_of_stage, list[_Class]()
        for k, (kind, s) in enumerate(path.classes):
            lag = path.first[k] - path.first[k - 1] - path.time[k - 1] if k else 0.0
            found.append(_Class(path.time[k], home[s], k - 1, lag, problem.change(kind, s), k))
        for k, (_, s) in enumerate(path.classes):
            if path.weight[k]:
                change = problem.change(OpType.WEIGHT_GRAD, s)
                found.append(_Class(path.weight[k], home[s], k, 0.0, change, -1))
        return found

    @cached_property
    def consumers(self) -> list[list[int]]:
        """Classes that wait for each class."""
        return [[c for c, x in enumerate(self.classes) if x.source == k] for k in self._every]

    @cached_property
    def _every(self) -> range:
        return range(len(self.classes))

    def shortest(self, length: float) -> float:
        """Shortest makespan of all orders that end in time; ``length`` if none does, 0 if
        unknown."""
        count, devices = self.path.problem.num_microbatches, self.path.problem.placement.num_devices
        begun: dict[_Done, list[_Times]] = {(0,) * len(self.classes): [(0.0,) * devices]}
        for _ in range(len(self.classes) * count):
            following: dict[_Done, list[_Times]] = {}
            for done, every in begun.items():
                for k in self._next(done):
                    after = (*done[:k], done[k] + 1, *done[k + 1 :])
                    grown = (self._grown(done, after, k, times) for times in every)
                    following.setdefault(after, []).extend(t for t in grown if t is not None)
            begun = {done: _earliest(every) for done, every in following.items() if every}
            if sum(map(len, begun.values())) > 1_500:
                return 0.0
        ends = [max(times[:devices]) for every in begun.values() for times in every]
        return min(ends, default=length)

    def _next(self, done: _Done) -> Iterator[int]:
        """Classes whose next operation can start."""
        problem = self.path.problem
        for k, one in enumerate(self.classes):
            if done[k] == problem.num_microbatches:
                continue
            if one.source >= 0 and done[one.source] == done[k]:
                continue
            if problem.cap is not None and one.change > 0:
                held = sum(
                    n * x.change for n, x in zip(done, self.classes, strict=True)
                    if x.device == one.device
                )  # fmt: skip
                if held + one.change > problem.cap[one.device] * (1 + 1e-9):
                    continue
            yield k

    def _waited_for(self, done: _Done) -> list[tuple[int, int]]:
        """Class and microbatch of completed operations that others still wait for."""
        return [
            (k, m)
            for k in self._every
            for m in range(min((done[c] for c in self.consumers[k]), default=done[k]), done[k])
        ]

    def _grown(self, done: _Done, after: _Done, k: int, times: _Times) -> _Times | None:
        """Times after one more operation of class k; None if the step cannot end in time."""
        one, m = self.classes[k], done[k]
        devices = self.path.problem.placement.num_devices
        ends = dict(zip(self._waited_for(done), times[devices:], strict=True))
        begin = times[one.device]
        if one.source >= 0:
            begin = max(begin, ends[one.source, m] + one.lag)
        end = begin + one.time
        if end + self._rest(k, m, after) > self.latest:
            return None
        ends[k, m] = end
        free = (*times[: one.device], end, *times[one.device + 1 : devices])
        return (*free, *(ends[each] for each in self._waited_for(after)))

    def _rest(self, k: int, m: int, after: _Done) -> float:
        """Lower bound on the time from the end of that operation to the end of the step."""
        one, count = self.classes[k], self.path.problem.num_microbatches
        left = sum(
            (count - n) * x.time
            for n, x in zip(after, self.classes, strict=True)
            if x.device == one.device
        )
        return max(left, 0.0 if one.position < 0 else self.path.tails[one.position][m])


def _earliest(every: list[_Times]) -> list[_Times]:
    """Keep the times that no other is as early as in every entry."""
    kept: list[_Times] = []
    for times in sorted(set(every)):
        if not any(all(a <= b for a, b in zip(old, times, strict=True)) for old in kept):
            kept.append(times)
    return kept
