"""Activation offload in a schedule: insertion of O (on the host) and L (reload) operations.

Searches treat activations under offload as always on the host, with a little memory set aside for
copies. Afterwards this pass adds O and L to each device's order, only where its memory requires
them::

    memory of a device     ______     ________
                      ____|      |___|        |___     at most the cap
                     F2:0      O2:0 L2:0     B2:0

    O2:0    the first operation that begins after the copy to the host has ended
    L2:0    the last point from which the copy back is in time for B2:0

The pass offloads the activation whose backward comes last, among those that can be offloaded in
time. An optimal cache evicts likewise (Belady, IBM Systems Journal 5, 1966). Copies queue up. If
the link is too slow, O is earlier and L later than it should be, and the device waits. See
../README.md: Recomputation and offload.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_pulse.backbone.costs import Floats
from megatron_pulse.planner.partition.memory import in_flight
from megatron_pulse.planner.schedule.bound.bounds import lower_bound
from megatron_pulse.planner.schedule.check.simulate import Timeline, simulate
from megatron_pulse.planner.schedule.operations import BACKWARDS, Operation, OpType, Schedule
from megatron_pulse.planner.schedule.problem import Certificate, ScheduleProblem, Synthesis

TRAVELLING = 3
"""Number of a device's largest activations for which memory is set aside during copies.

They are one that leaves, one that returns, and one in use. Less is set aside if memory is small.
"""

_TIGHT = 1 + 1e-9


class NoRoomError(ValueError):
    """A device has no room for an operation even with all other activations on the host."""

    def __init__(self, device: int, room: float) -> None:
        super().__init__(f"device {device} has {room:.6g} for activations")
        self.device = device


type _Key = tuple[int, int]
"""Stage and microbatch."""


def problem_without_offload(
    problem: ScheduleProblem, parts: Sequence[float] | None = None, room: bool = True
) -> ScheduleProblem:
    """Problem for the search, with all activations under offload absent.

    With ``room`` devices have less memory, to set some aside for copies. Memory for the in-flight
    microbatches at full rate comes first, as long as one activation can still be copied. Each
    device's activations count with its part in ``parts`` (default 1: all) of their weight-gradient
    queue bytes.
    """
    assert problem.offload_bytes is not None
    placement, flying = problem.placement, in_flight(problem.placement, problem.num_microbatches)
    home, each = placement.device_of_stage, parts or (1.0,) * placement.num_devices
    found = problem.with_all_offloaded([each[home[s]] for s in range(placement.num_stages)])
    if problem.cap is None or not room:
        return found
    caps = []
    for device, cap in enumerate(problem.cap):
        stages = placement.stages_of_device(device)
        most = max(problem.offload_bytes[s] for s in stages)
        least = sum(map(found.activation_of, stages))
        wanted = sum(flying[s] * found.activation_of(s) for s in stages)
        max_in_flight = max(wanted, cap - TRAVELLING * most)
        caps.append(min(cap, max(least, min(max_in_flight, cap - most))))
    return replace(found, cap=tuple(caps))


def with_offload(
    problem: ScheduleProblem,
    search: Callable[[ScheduleProblem, float], Synthesis],
    seconds: float = math.inf,
) -> Synthesis:
    """Find the shortest schedule with offload.

    The candidates are schedules that ``search`` finds with all offload activations absent, with
    memory set aside for copies and without; O and L are then inserted where necessary. The last
    candidate keeps everything. The search stops at the lower bound. Each search has half of the
    rest of ``seconds``. The bound holds for all such schedules.
    """
    began, best = time.process_time(), None
    bound = lower_bound(problem, work=0.0)

    def in_time(of: ScheduleProblem) -> Synthesis:
        return search(of, max(0.0, seconds - (time.process_time() - began)) / 2)

    for found in _candidates(problem, in_time):
        length = simulate(problem, found.schedule).makespan
        if best is None or length < best[0]:
            best = length, found
        if length <= bound * _TIGHT:
            break
    assert best is not None  # the last candidate keeps everything
    length, found = best
    spent, solver = time.process_time() - began, found.certificate.solver
    certificate = Certificate(length, min(bound, length), length <= bound * _TIGHT, solver, spent)
    return Synthesis(found.schedule, certificate)


def _candidates(
    problem: ScheduleProblem, search: Callable[[ScheduleProblem], Synthesis]
) -> Iterator[Synthesis]:
    parts = [0.0] * problem.placement.num_devices
    for room in (True, False):
        for _ in range(4):
            found = search(problem_without_offload(problem, parts, room))
            try:
                yield replace(found, schedule=insert_offload(problem, found.schedule))
                break
            except NoRoomError as error:
                if problem.weight_grad is None or parts[error.device] >= 1.0:
                    break
                parts[error.device] += 0.5  # count more of the queue on devices without room for it
    yield search(replace(problem, offload_bytes=None, offload_s=None))


def insert_offload(problem: ScheduleProblem, schedule: Schedule) -> Schedule:
    """Insert O and L into ``schedule`` where devices have no room otherwise.

    Raises NoRoomError if an operation does not fit with all other activations on the host.
    """
    if problem.cap is None or problem.offload_bytes is None:
        return schedule
    timeline = simulate(problem, schedule)
    lines = []
    for device, order in enumerate(schedule.order):
        line = _Line(problem, order, timeline, problem.cap[device] * _TIGHT)
        if (items := line.items()) is None:
            raise NoRoomError(device, problem.cap[device])
        lines.append(items)
    return replace(schedule, order=tuple(lines))


def offload_all(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """Offload all activations of ``stages``, even with free memory.

    The O comes after the operation that follows the forward. The L comes before the operation that
    precedes the backward. Activations whose backward follows at once stay.
    """
    orders = []
    for order in schedule.order:
        position = {op: k for k, op in enumerate(order)}
        before: list[list[Operation]] = [[] for _ in order]
        for back, op in enumerate(order):
            forward = position.get(op._replace(kind=OpType.FORWARD), back)
            if op.kind in BACKWARDS and op.stage in stages and back > forward + 1:
                leaves = min(forward + 2, back - 1)
                before[leaves].insert(0, op._replace(kind=OpType.OFFLOAD))
                before[max(leaves + 1, back - 1)].append(op._replace(kind=OpType.RELOAD))
        orders.append(tuple(item for k, op in enumerate(order) for item in (*before[k], op)))
    return replace(schedule, order=tuple(orders))


@dataclass(frozen=True)
class _Stay:
    """Lifetime of an activation, as positions of its forward and backward in the order."""

    forward: int
    backward: int
    num_bytes: float
    offload_s: float


@dataclass
class _Interval:
    """Positions before which the O and the L come."""

    leaves: int
    comes: int

    def covers(self, at: int) -> bool:
        """True if the activation is on the host while operation ``at`` runs."""
        return self.leaves <= at < self.comes


class _Line:
    """Order of one device; ``held[k]`` is the memory in use at operation k without offload."""

    def __init__(
        self,
        problem: ScheduleProblem,
        order: Sequence[Operation],
        timeline: Timeline,
        cap: float,
    ) -> None:
        assert problem.offload_bytes is not None
        self.order, self.cap = order, cap
        self.begins = [timeline.start[op] for op in order]
        self.ends = [timeline.end[op] for op in order]
        self.held = memory_by_operation(problem, order)
        position = {op: k for k, op in enumerate(order)}
        self.stays: dict[_Key, _Stay] = {}
        for k, op in enumerate(order):
            if op.kind in BACKWARDS and problem.offload_bytes[op.stage] > 0:
                forward = position[op._replace(kind=OpType.FORWARD)]
                if k > forward + 1:
                    moved = problem.offload_bytes[op.stage], problem.offload_s_of(op.stage)
                    self.stays[op.stage, op.microbatch] = _Stay(forward, k, *moved)

    def items(self) -> tuple[Operation, ...] | None:
        """The order with O and L; None if there is no room."""
        intervals: dict[_Key, _Interval] = {}
        for _ in range(4):  # more copies queue up
            intervals = self._timed(intervals)
            if not self._add(intervals):
                break
        else:
            intervals = self._timed(intervals)
        if not self._force(intervals):
            return None
        self._take_turns(intervals)
        self._drop(intervals)
        before: list[list[Operation]] = [[] for _ in self.order]
        for key, one in sorted(intervals.items(), key=lambda item: self.stays[item[0]].backward):
            before[one.comes].append(Operation(OpType.RELOAD, *key))
        for key, one in intervals.items():
            before[one.leaves].insert(0, Operation(OpType.OFFLOAD, *key))
        return tuple(item for k, op in enumerate(self.order) for item in (*before[k], op))

    def _in_use(self, intervals: Mapping[_Key, _Interval]) -> Floats:
        change = np.zeros(len(self.order) + 1)
        for key, one in intervals.items():
            change[one.leaves] -= self.stays[key].num_bytes
            change[one.comes] += self.stays[key].num_bytes
        return np.asarray(self.held + np.cumsum(change[:-1]), dtype=np.float64)

    def _timed(self, intervals: Mapping[_Key, _Interval]) -> dict[_Key, _Interval]:
        """Positions that follow from the queues of copies; activations without time on the host are
        dropped."""
        leaving, left = 0.0, {}
        for key in sorted(intervals, key=lambda key: self.stays[key].forward):
            stay = self.stays[key]
            leaving = max(leaving, self.ends[stay.forward]) + stay.offload_s
            left[key] = leaving
        found, coming = {}, float("inf")
        for key in sorted(intervals, key=lambda key: -self.stays[key].backward):
            stay = self.stays[key]
            coming = min(coming, self.begins[stay.backward]) - stay.offload_s
            if (one := self._between(stay, left[key], coming)) is not None:
                found[key] = one
        return found

    def _between(self, stay: _Stay, left: float, comes: float) -> _Interval | None:
        """Positions for a copy that has ended at ``left`` and a copy back that begins at
        ``comes``."""
        leaves = max(stay.forward + 1, bisect_left(self.begins, left))
        back = min(stay.backward, bisect_right(self.ends, comes))
        return _Interval(leaves, back) if leaves < back else None

    def _add(self, intervals: dict[_Key, _Interval]) -> bool:
        """Offload more activations, in time, where memory is exceeded; true if any was added."""
        added, in_use = False, self._in_use(intervals)
        alone = {
            key: one
            for key, stay in self.stays.items()
            if key not in intervals
            and (
                one := self._between(
                    stay,
                    self.ends[stay.forward] + stay.offload_s,
                    self.begins[stay.backward] - stay.offload_s,
                )
            )
        }
        for k in range(len(self.order)):
            while in_use[k] > self.cap:
                there = [key for key, one in alone.items() if one.covers(k)]
                if not there:
                    break
                last = max(there, key=lambda key: self.stays[key].backward)
                one = intervals[last] = alone.pop(last)
                in_use[one.leaves : one.comes] -= self.stays[last].num_bytes
                added = True
        return added

    def _force(self, intervals: dict[_Key, _Interval]) -> bool:
        """Extend or add offloads that delay the device where memory is still exceeded; true if that
        suffices."""
        in_use = self._in_use(intervals)
        for k in range(len(self.order)):
            while in_use[k] > self.cap:
                there = [
                    key
                    for key, stay in self.stays.items()
                    if stay.forward < k < stay.backward
                    and not (key in intervals and intervals[key].covers(k))
                ]
                if not there:
                    return False
                best = min(there, key=lambda key: self._further(key, intervals.get(key), k))
                stay, one = self.stays[best], intervals.get(best, _Interval(k, k))
                longer = _Interval(min(one.leaves, k), max(one.comes, k + 1))
                in_use[longer.leaves : one.leaves] -= stay.num_bytes
                in_use[one.comes : longer.comes] -= stay.num_bytes
                intervals[best] = longer
        return True

    def _further(self, key: _Key, one: _Interval | None, k: int) -> tuple[int, int]:
        """Cost of extending an offload to operation ``k``: new or not, then the number of
        positions."""
        stay = self.stays[key]
        if one is None:
            return 1, -stay.backward
        return 0, one.leaves - k if k < one.leaves else k - one.comes

    def _take_turns(self, intervals: Mapping[_Key, _Interval]) -> None:
        """Order the reloads by their backwards, because copies queue up."""
        first = 0
        for key in sorted(intervals, key=lambda key: self.stays[key].backward):
            first = intervals[key].comes = max(first, intervals[key].comes)

    def _drop(self, intervals: dict[_Key, _Interval]) -> None:
        """Cancel offloads that memory does not need, the shortest first."""
        in_use = self._in_use(intervals)
        for key, one in sorted(intervals.items(), key=lambda item: item[1].comes - item[1].leaves):
            num_bytes = self.stays[key].num_bytes
            if in_use[one.leaves : one.comes].max(initial=0.0) + num_bytes <= self.cap:
                in_use[one.leaves : one.comes] += num_bytes
                del intervals[key]


def memory_by_operation(problem: ScheduleProblem, order: Sequence[Operation]) -> Floats:
    """Memory of activations at each operation of a device's ``order``, including recomputed
    ones."""
    live, found = 0.0, []
    again = {op[1:] for op in order if op.kind is OpType.RECOMPUTE}
    for op in order:
        computed = 0.0 if problem.recompute_bytes is None else problem.recompute_bytes[op.stage]
        change = problem.change(op.kind, op.stage)
        live += computed if op.kind is OpType.RECOMPUTE else max(0.0, change)
        found.append(live)
        live += min(0.0, change)
        if op.kind in BACKWARDS and op[1:] in again:
            live -= computed
    return np.array(found, dtype=np.float64)
