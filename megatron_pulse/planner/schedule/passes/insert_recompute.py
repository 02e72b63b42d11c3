"""Recomputation as a separate operation, in idle time before the gradient arrives.

The recomputation of a stage depends on no other stage. Searches treat it as a part of the backward
(B, or I). This pass moves it to the front where a device would otherwise wait::

    before   F1:0  .     .     [ R  B1:0 ]         the gradient for B1:0 is there at |
    after    F1:0  .     [ R ]|[ B1:0 ]            B1:0 ends sooner, and all that waits for it

It may also move to an earlier, longer wait. All other operations keep their order, so none starts
later than before. From R on all recomputed activations of the stage are in memory at once, and not
layer by layer. Without memory for them the recomputation stays within the backward.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from megatron_pulse.planner.schedule.bound.bounds import lower_bound
from megatron_pulse.planner.schedule.check.simulate import Timeline, dependency, simulate
from megatron_pulse.planner.schedule.operations import BACKWARDS, Operation, OpType, Schedule
from megatron_pulse.planner.schedule.passes.insert_offload import memory_by_operation
from megatron_pulse.planner.schedule.problem import Certificate, ScheduleProblem, Synthesis


def with_recomputation(problem: ScheduleProblem, found: Synthesis) -> Synthesis:
    """Move recomputation within backwards of ``found`` to idle time; the result is never longer.

    The bound holds for all schedules with recomputation, separate or not.
    """
    began = time.monotonic()
    schedule = insert_recompute(problem, found.schedule)
    length = simulate(problem, schedule).makespan
    bound = min(lower_bound(problem, work=0.0), length)
    known = found.certificate
    spent = known.seconds + time.monotonic() - began
    proved = length <= bound * (1 + 1e-9)
    return Synthesis(schedule, Certificate(length, bound, proved, known.solver, spent))


def insert_recompute(problem: ScheduleProblem, schedule: Schedule) -> Schedule:
    """``schedule`` with R where its devices are idle and have room."""
    lines = [_Line(problem, device, order) for device, order in enumerate(schedule.order)]
    found = replace(schedule, order=tuple(tuple(line.items) for line in lines))
    for _ in range(4):  # each looks for idle time that the last has left
        timeline = simulate(problem, found)
        if not any([line.move(timeline) for line in lines]):
            break
        found = replace(schedule, order=tuple(tuple(line.items) for line in lines))
    return found


class _Line:
    """Order of a device, and positions of its R operations.

    ``held[k]`` is the memory in use at operation k, including recomputed activations.
    """

    def __init__(self, problem: ScheduleProblem, device: int, order: tuple[Operation, ...]) -> None:
        assert problem.recompute_s is not None
        self.problem, self.order, self.seconds = problem, order, problem.recompute_s
        self.bytes = problem.recompute_bytes or (0.0,) * problem.placement.num_stages
        self.cap = math.inf if problem.cap is None else problem.cap[device] * (1 + 1e-9)
        self.held = memory_by_operation(problem, order)
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
        return [item for k, op in enumerate(self.order) for item in (*self.before[k], op)]

    def move(self, timeline: Timeline) -> bool:
        """Move recomputations of delayed backwards to long enough waits; true if any was moved."""
        idle = self._idle(timeline)
        least = 1e-9 * timeline.makespan
        waits = [k for k, seconds in enumerate(idle) if seconds > least]
        moved = False
        for k, op in enumerate(self.order):
            if op.kind not in BACKWARDS or self.seconds[op.stage] <= 0 or idle[k] > least:
                continue
            if self.place.get(op, k) < k or timeline.start[op] <= self._ready(op, timeline) + least:
                continue
            first = self.position[op._replace(kind=OpType.FORWARD)]
            for wait in reversed(waits):
                if first < wait < k and idle[wait] >= self.seconds[op.stage]:
                    if self._put(op, wait):
                        idle[wait] -= self.seconds[op.stage]
                        moved = True
                        break
        return moved

    def _ready(self, op: Operation, timeline: Timeline) -> float:
        """Time at which the input of a backward arrives, apart from its own recomputation."""
        source = dependency(op, self.problem.placement)
        assert source is not None
        return timeline.end[source] + self.problem.lag(source.stage, op.stage)

    def _put(self, op: Operation, where: int) -> bool:
        """Place the R of backward ``op`` before operation ``where``; false if memory does not
        suffice."""
        k, again = self.position[op], op._replace(kind=OpType.RECOMPUTE)
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
        """Time that the device waits right before each operation."""
        idle, now = [], 0.0
        for k, op in enumerate(self.order):
            now = timeline.end[self.before[k][-1]] if self.before[k] else now
            idle.append(timeline.start[op] - now)
            now = timeline.end[op]
        return idle
