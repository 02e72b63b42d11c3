"""Recomputation as an operation of its own: in idle time, before the gradient is there.

What a stage computes again needs nothing of another stage. Searches take it as a part of the
backward (B, or I); here it is taken out where a device would otherwise wait::

    before   F1:0  .     .     [ R  B1:0 ]         the gradient for B1:0 is there at |
    after    F1:0  .     [ R ]|[ B1:0 ]            B1:0 ends sooner, and all that waits for it

or where it waited longer, earlier still. All else keeps its order, so that nothing starts later
than it did. From R on all that the stage computes again is in memory at once, and not layer by
layer: where there is no room for that, it stays within the backward.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from megatron_pulse.planner.schedule.bound.bounds import lower_bound
from megatron_pulse.planner.schedule.check.simulate import Timeline, dependency, run
from megatron_pulse.planner.schedule.offload import held
from megatron_pulse.planner.schedule.operations import BACKWARDS, Kind, Operation, Schedule
from megatron_pulse.planner.schedule.problem import Certificate, ScheduleProblem, Synthesis

ROUNDS = 4
"""Times that idle time is looked for, each in what the last has left."""

LEAST = 1e-9
"""Share of the makespan that counts as idle time."""


def with_recomputation(problem: ScheduleProblem, found: Synthesis) -> Synthesis:
    """``found``, whose backwards compute again what they need, with operations of their own for
    that where a device is idle; never longer. Its bound is of all such schedules."""
    began = time.monotonic()
    schedule = placed(problem, found.schedule)
    length = run(problem, schedule).makespan
    bound = min(lower_bound(problem, work=0.0), length)
    known = found.certificate
    spent = known.seconds + time.monotonic() - began
    proved = length <= bound * (1 + 1e-9)
    return Synthesis(schedule, Certificate(length, bound, proved, known.solver, spent))


def placed(problem: ScheduleProblem, schedule: Schedule) -> Schedule:
    """``schedule`` with R where its devices are idle and have room."""
    lines = [_Line(problem, device, order) for device, order in enumerate(schedule.order)]
    found = replace(schedule, order=tuple(tuple(line.items) for line in lines))
    for _ in range(ROUNDS):
        timeline = run(problem, found)
        if not any([line.move(timeline) for line in lines]):
            break
        found = replace(schedule, order=tuple(tuple(line.items) for line in lines))
    return found


class _Line:
    """A device's order, and before which of its operations each R comes.

    ``held[k]`` is the memory in use while operation k runs, what is computed again included.
    """

    def __init__(self, problem: ScheduleProblem, device: int, order: tuple[Operation, ...]) -> None:
        assert problem.recompute is not None
        self.problem, self.order, self.seconds = problem, order, problem.recompute
        self.bytes = problem.recomputed or (0.0,) * problem.placement.num_stages
        self.cap = math.inf if problem.cap is None else problem.cap[device] * (1 + 1e-9)
        self.held = held(problem, order)
        self.position = {op: k for k, op in enumerate(order)}
        self.before: list[list[Operation]] = [[] for _ in order]
        self.place: dict[Operation, int] = {}
        home = problem.placement.device_of_stage
        for k, op in enumerate(order):
            if op.kind in BACKWARDS and self.seconds[op.stage] > 0:
                source = dependency(op, problem.placement)
                if source is not None and home[source.stage] != device:
                    self._put(op, k)

    @property
    def items(self) -> list[Operation]:
        """The order with its R."""
        return [item for k, op in enumerate(self.order) for item in (*self.before[k], op)]

    def move(self, timeline: Timeline) -> bool:
        """Put what a backward waits for where the device does for long enough; whether any was."""
        idle = self._idle(timeline)
        least = LEAST * timeline.makespan
        waits = [k for k, seconds in enumerate(idle) if seconds > least]
        moved = False
        for k, op in enumerate(self.order):
            if op.kind not in BACKWARDS or self.seconds[op.stage] <= 0 or idle[k] > least:
                continue
            if self.place.get(op, k) < k or timeline.start[op] <= self._ready(op, timeline) + least:
                continue
            first = self.position[op._replace(kind=Kind.FORWARD)]
            for wait in reversed(waits):
                if first < wait < k and idle[wait] >= self.seconds[op.stage]:
                    if self._put(op, wait):
                        idle[wait] -= self.seconds[op.stage]
                        moved = True
                        break
        return moved

    def _ready(self, op: Operation, timeline: Timeline) -> float:
        """When what a backward takes is there; its own recomputation aside."""
        source = dependency(op, self.problem.placement)
        assert source is not None
        return timeline.end[source] + self.problem.lag(source.stage, op.stage)

    def _put(self, op: Operation, where: int) -> bool:
        """Have what backward ``op`` computes again before operation ``where``; whether there is
        room."""
        k, again = self.position[op], op._replace(kind=Kind.RECOMPUTE)
        known = self.place.get(op)
        end = k + 1 if known is None else known
        if self.held[where:end].max(initial=0.0) + self.bytes[op.stage] > self.cap:
            return False
        if known is not None:
            self.before[known].remove(again)
        self.held[where:end] += self.bytes[op.stage]
        self.before[where].append(again)
        self.place[op] = where
        return True

    def _idle(self, timeline: Timeline) -> list[float]:
        """How long the device waits right before each operation."""
        idle, now = [], 0.0
        for k, op in enumerate(self.order):
            now = timeline.end[self.before[k][-1]] if self.before[k] else now
            idle.append(timeline.start[op] - now)
            now = timeline.end[op]
        return idle
