"""Activations that wait on the host: which microbatches' leave, and when they come back.

Searches take what may leave as if it were on the host all the time, with some room less, in which
it travels. Here each device's order gets O and L where its memory would not do otherwise::

    memory of a device     ______     ________
                      ____|      |___|        |___     at most the cap
                     F2:0      O2:0 L2:0     B2:0

    O2:0    the first operation that begins when the copy is on the host by then
    L2:0    the last at whose begin the copy back is in time for B2:0

Of those that would be away in time the one whose backward is last leaves, as an optimal cache would
have it (Belady, IBM Systems Journal 5, 1966). Copies queue up; where the link is too slow for that
O is earlier and L later than it should be, and the device waits.
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
from megatron_pulse.planner.schedule.check.simulate import Timeline, run
from megatron_pulse.planner.schedule.operations import BACKWARDS, Kind, Operation, Schedule
from megatron_pulse.planner.schedule.problem import Certificate, ScheduleProblem, Synthesis

TRAVELLING = 3
"""The largest activations of a device for which there is room while they travel, if there can be:
one that leaves, one that comes, and one that is in use."""

ROUNDS = 4
"""Times that copies are put into the queues anew, as more come to leave."""

_TIGHT = 1 + 1e-9

TRIES, STEP = 4, 0.5
"""Searches with more and more of what weight gradients wait with counted on the devices that have
no room for it, and by how much more."""


class NoRoomError(ValueError):
    """A device has no room for an operation, be all other activations on the host."""

    def __init__(self, device: int, room: float) -> None:
        super().__init__(f"device {device} has {room:.6g} for activations")
        self.device = device


type _Key = tuple[int, int]
"""Stage and microbatch"""


def searched(
    problem: ScheduleProblem, parts: Sequence[float] | None = None, room: bool = True
) -> ScheduleProblem:
    """What searches look for a schedule of: what may leave is away, and with ``room`` devices have
    less, in which it travels, but for as many microbatches as are in flight at full rate, if only
    one can travel then. Each device's activations are counted with its part (1: all) of what weight
    gradients wait with."""
    assert problem.offloaded is not None
    placement, flying = problem.placement, in_flight(problem.placement, problem.num_microbatches)
    home, each = placement.device_of_stage, parts or (1.0,) * placement.num_devices
    found = problem.with_all_elsewhere([each[home[s]] for s in range(placement.num_stages)])
    if problem.cap is None or not room:
        return found
    caps = []
    for device, cap in enumerate(problem.cap):
        stages = placement.stages_of_device(device)
        most = max(problem.offloaded[s] for s in stages)
        least = sum(map(found.activation_of, stages))
        wanted = sum(flying[s] * found.activation_of(s) for s in stages)
        ample = max(wanted, cap - TRAVELLING * most)
        caps.append(min(cap, max(least, min(ample, cap - most))))
    return replace(found, cap=tuple(caps))


def with_offload(
    problem: ScheduleProblem,
    search: Callable[[ScheduleProblem, float], Synthesis],
    seconds: float = math.inf,
) -> Synthesis:
    """The soonest of the schedules that ``search`` finds where all is away that may leave, with
    room to travel or all the memory, with what then must leave, and of the one where nothing does;
    no more are tried once one is as short as any can be. Each search has half of what is left of
    ``seconds``. Its bound is of all such schedules."""
    began, best = time.process_time(), None
    bound = lower_bound(problem, work=0.0)

    def in_time(of: ScheduleProblem) -> Synthesis:
        return search(of, max(0.0, seconds - (time.process_time() - began)) / 2)

    for found in _candidates(problem, in_time):
        length = run(problem, found.schedule).makespan
        if best is None or length < best[0]:
            best = length, found
        if length <= bound * _TIGHT:
            break
    assert best is not None  # one keeps everything
    length, found = best
    spent, solver = time.process_time() - began, found.certificate.solver
    certificate = Certificate(length, min(bound, length), length <= bound * _TIGHT, solver, spent)
    return Synthesis(found.schedule, certificate)


def _candidates(
    problem: ScheduleProblem, search: Callable[[ScheduleProblem], Synthesis]
) -> Iterator[Synthesis]:
    parts = [0.0] * problem.placement.num_devices
    for room in (True, False):
        for _ in range(TRIES):
            found = search(searched(problem, parts, room))
            try:
                yield replace(found, schedule=placed(problem, found.schedule))
                break
            except NoRoomError as error:
                if problem.weight_grad is None or parts[error.device] >= 1.0:
                    break
                parts[error.device] += STEP
    yield search(replace(problem, offloaded=None, copying=None))


def placed(problem: ScheduleProblem, schedule: Schedule) -> Schedule:
    """``schedule`` with O and L where devices have no room otherwise; raises NoRoomError where an
    operation takes more than there is with all others' on the host."""
    if problem.cap is None or problem.offloaded is None:
        return schedule
    timeline = run(problem, schedule)
    lines = []
    for device, order in enumerate(schedule.order):
        line = _Line(problem, order, timeline, problem.cap[device] * _TIGHT)
        if (items := line.items()) is None:
            raise NoRoomError(device, problem.cap[device])
        lines.append(items)
    return replace(schedule, order=tuple(lines))


def all_leave(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """``schedule`` where all activations of ``stages`` leave, whatever room there is: until the
    operation after the next, and from the one before their backward; not those that it follows."""
    orders = []
    for order in schedule.order:
        position = {op: k for k, op in enumerate(order)}
        before: list[list[Operation]] = [[] for _ in order]
        for back, op in enumerate(order):
            forward = position.get(op._replace(kind=Kind.FORWARD), back)
            if op.kind in BACKWARDS and op.stage in stages and back > forward + 1:
                leaves = min(forward + 2, back - 1)
                before[leaves].insert(0, op._replace(kind=Kind.OFFLOAD))
                before[max(leaves + 1, back - 1)].append(op._replace(kind=Kind.RELOAD))
        orders.append(tuple(item for k, op in enumerate(order) for item in (*before[k], op)))
    return replace(schedule, order=tuple(orders))


@dataclass(frozen=True)
class _Stay:
    """What may leave: from behind its ``forward`` to its ``backward``, positions in the order."""

    forward: int
    backward: int
    num_bytes: float
    copying: float


@dataclass
class _Away:
    """Before which operations the O and the L are."""

    leaves: int
    comes: int

    def covers(self, at: int) -> bool:
        """Whether it is on the host while operation ``at`` runs."""
        return self.leaves <= at < self.comes


class _Line:
    """One device's order; ``held[k]`` is what operation k runs with, if none leaves."""

    def __init__(
        self,
        problem: ScheduleProblem,
        order: Sequence[Operation],
        timeline: Timeline,
        cap: float,
    ) -> None:
        assert problem.offloaded is not None
        self.order, self.cap = order, cap
        self.begins = [timeline.start[op] for op in order]
        self.ends = [timeline.end[op] for op in order]
        self.held = held(problem, order)
        position = {op: k for k, op in enumerate(order)}
        self.stays: dict[_Key, _Stay] = {}
        for k, op in enumerate(order):
            if op.kind in BACKWARDS and problem.offloaded[op.stage] > 0:
                forward = position[op._replace(kind=Kind.FORWARD)]
                if k > forward + 1:
                    moved = problem.offloaded[op.stage], problem.copying_of(op.stage)
                    self.stays[op.stage, op.microbatch] = _Stay(forward, k, *moved)

    def items(self) -> tuple[Operation, ...] | None:
        """The order with O and L; None where there is no room."""
        away: dict[_Key, _Away] = {}
        for _ in range(ROUNDS):
            away = self._timed(away)
            if not self._add(away):
                break
        else:
            away = self._timed(away)
        if not self._force(away):
            return None
        self._take_turns(away)
        self._drop(away)
        before: list[list[Operation]] = [[] for _ in self.order]
        for key, one in sorted(away.items(), key=lambda item: self.stays[item[0]].backward):
            before[one.comes].append(Operation(Kind.RELOAD, *key))
        for key, one in away.items():
            before[one.leaves].insert(0, Operation(Kind.OFFLOAD, *key))
        return tuple(item for k, op in enumerate(self.order) for item in (*before[k], op))

    def _in_use(self, away: Mapping[_Key, _Away]) -> Floats:
        change = np.zeros(len(self.order) + 1)
        for key, one in away.items():
            change[one.leaves] -= self.stays[key].num_bytes
            change[one.comes] += self.stays[key].num_bytes
        return np.asarray(self.held + np.cumsum(change[:-1]), dtype=np.float64)

    def _timed(self, away: Mapping[_Key, _Away]) -> dict[_Key, _Away]:
        """The same keys, where their copies queue up, as far as they are away at all."""
        leaving, left = 0.0, {}
        for key in sorted(away, key=lambda key: self.stays[key].forward):
            stay = self.stays[key]
            leaving = max(leaving, self.ends[stay.forward]) + stay.copying
            left[key] = leaving
        found, coming = {}, float("inf")
        for key in sorted(away, key=lambda key: -self.stays[key].backward):
            stay = self.stays[key]
            coming = min(coming, self.begins[stay.backward]) - stay.copying
            if (one := self._between(stay, left[key], coming)) is not None:
                found[key] = one
        return found

    def _between(self, stay: _Stay, left: float, comes: float) -> _Away | None:
        """Where it is away in time: it has ``left``, and begins to come back when it ``comes``."""
        leaves = max(stay.forward + 1, bisect_left(self.begins, left))
        back = min(stay.backward, bisect_right(self.ends, comes))
        return _Away(leaves, back) if leaves < back else None

    def _add(self, away: dict[_Key, _Away]) -> bool:
        """Let more leave, where there is too much in use; whether any does."""
        added, in_use = False, self._in_use(away)
        alone = {
            key: one
            for key, stay in self.stays.items()
            if key not in away
            and (
                one := self._between(
                    stay,
                    self.ends[stay.forward] + stay.copying,
                    self.begins[stay.backward] - stay.copying,
                )
            )
        }
        for k in range(len(self.order)):
            while in_use[k] > self.cap:
                there = [key for key, one in alone.items() if one.covers(k)]
                if not there:
                    break
                last = max(there, key=lambda key: self.stays[key].backward)
                one = away[last] = alone.pop(last)
                in_use[one.leaves : one.comes] -= self.stays[last].num_bytes
                added = True
        return added

    def _force(self, away: dict[_Key, _Away]) -> bool:
        """Have what is away so for longer, and more, where there is too much in use still; whether
        there is room then."""
        in_use = self._in_use(away)
        for k in range(len(self.order)):
            while in_use[k] > self.cap:
                there = [
                    key
                    for key, stay in self.stays.items()
                    if stay.forward < k < stay.backward
                    and not (key in away and away[key].covers(k))
                ]
                if not there:
                    return False
                best = min(there, key=lambda key: self._further(key, away.get(key), k))
                stay, one = self.stays[best], away.get(best, _Away(k, k))
                longer = _Away(min(one.leaves, k), max(one.comes, k + 1))
                in_use[longer.leaves : one.leaves] -= stay.num_bytes
                in_use[one.comes : longer.comes] -= stay.num_bytes
                away[best] = longer
        return True

    def _further(self, key: _Key, one: _Away | None, k: int) -> tuple[int, int]:
        """How much longer than it is in time something has to be away for operation k."""
        stay = self.stays[key]
        if one is None:
            return 1, -stay.backward
        return 0, one.leaves - k if k < one.leaves else k - one.comes

    def _take_turns(self, away: Mapping[_Key, _Away]) -> None:
        """Let nothing come before what is taken sooner: copies queue up."""
        first = 0
        for key in sorted(away, key=lambda key: self.stays[key].backward):
            first = away[key].comes = max(first, away[key].comes)

    def _drop(self, away: dict[_Key, _Away]) -> None:
        """Let stay what there is room for after all, the shortest away first."""
        in_use = self._in_use(away)
        for key, one in sorted(away.items(), key=lambda item: item[1].comes - item[1].leaves):
            num_bytes = self.stays[key].num_bytes
            if in_use[one.leaves : one.comes].max(initial=0.0) + num_bytes <= self.cap:
                in_use[one.leaves : one.comes] += num_bytes
                del away[key]


def held(problem: ScheduleProblem, order: Sequence[Operation]) -> Floats:
    """The memory that activations take while each operation of a device's ``order`` runs, what is
    computed again included."""
    live, found = 0.0, []
    again = {op[1:] for op in order if op.kind is Kind.RECOMPUTE}
    for op in order:
        computed = 0.0 if problem.recomputed is None else problem.recomputed[op.stage]
        change = problem.change(op.kind, op.stage)
        live += computed if op.kind is Kind.RECOMPUTE else max(0.0, change)
        found.append(live)
        live += min(0.0, change)
        if op.kind in BACKWARDS and op[1:] in again:
            live -= computed
    return np.array(found, dtype=np.float64)
