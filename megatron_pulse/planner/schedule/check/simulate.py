"""Event simulation: start and end of every operation of a schedule, and idle time of devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from megatron_pulse.planner.layout.placement import Placement
from megatron_pulse.planner.schedule.check.offload_copies import copy_lines
from megatron_pulse.planner.schedule.operations import BACKWARDS, Operation, OpType, Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.simulate_kernel import Waits, line_starts, play, waits_of

CODES = {kind: code for code, kind in enumerate(OpType)}
"""Integer code of each operation type."""


class DeadlockError(RuntimeError):
    """A schedule that cannot be executed; the message names the circular waits, and shows the
    grid."""


@dataclass(frozen=True)
class Timeline:
    """A schedule with times, in the unit of the durations it was simulated with.

    ``busy[d]`` is the time that device d computes; ``bubble[d]`` is the rest of the makespan.
    """

    schedule: Schedule
    start: Mapping[Operation, float]
    end: Mapping[Operation, float]
    makespan: float
    busy: tuple[float, ...]
    bubble: tuple[float, ...]

    @property
    def idle_share(self) -> float:
        """Idle share of all devices' time."""
        return sum(self.bubble) / (len(self.bubble) * self.makespan) if self.makespan else 0.0


def dependency(operation: Operation, placement: Placement) -> Operation | None:
    """Operation whose result ``operation`` takes, along the chain forward and then back; None if
    none.

    A weight gradient takes its stage's input gradient. An input gradient passes gradients on as a
    whole backward does. A recomputation and an offload take their stage's forward, and a reload
    takes its offload. Dependencies of bubble tasks are in the schedule
    (``Schedule.slices_before``).
    """
    kind, stage, microbatch = operation.kind, operation.stage, operation.microbatch
    if kind is OpType.BUBBLE_TASK:
        return None
    if kind is OpType.WEIGHT_GRAD:
        return Operation(OpType.INPUT_GRAD, stage, microbatch)
    if kind is OpType.RELOAD:
        return Operation(OpType.OFFLOAD, stage, microbatch)
    if kind in (OpType.RECOMPUTE, OpType.OFFLOAD):
        return Operation(OpType.FORWARD, stage, microbatch)
    if kind is OpType.FORWARD:
        before = placement.before.get(stage)  # none for an unknown stage
        return None if before is None else Operation(kind, before, microbatch)
    after = placement.after.get(stage)
    if after is None:
        return Operation(OpType.FORWARD, stage, microbatch)
    return Operation(kind, after, microbatch)


@dataclass(frozen=True)
class BlockedDevice:
    """Device ``device`` is at ``operation``, which waits for operations that never finish."""

    device: int
    operation: Operation
    waits_for: tuple[Operation, ...]

    def __str__(self) -> str:
        missing = ", ".join(map(str, self.waits_for))
        return f"device {self.device} is at {self.operation}, which waits for {missing}"


def blocked_devices(
    schedule: Schedule, needs: Callable[[Operation], Iterable[Operation]]
) -> list[BlockedDevice]:
    """Devices that wait for ever; ``needs(op)`` are the operations whose results ``op`` takes."""
    every = [op for line in schedule.order for op in line]
    number = {op: i for i, op in reversed(list(enumerate(every)))}
    required = [tuple(needs(op)) for op in every]
    # What is not there never ends, as if it waited for itself.
    edges = [number.get(op, i) for i, ops in enumerate(required) for op in ops]
    waits = waits_of([i for i, ops in enumerate(required) for _ in ops], edges, len(every))
    firsts = line_starts(schedule.order)
    done = play(np.arange(len(every)), firsts, waits, np.ones(len(every), np.int64))[1]
    ended = {op for op, has_ended in zip(every, done, strict=True) if has_ended}
    stuck = (
        (d, first + int(done[first:last].argmin()))
        for d, (first, last) in enumerate(pairwise(firsts.tolist()))
        if not done[first:last].all()
    )
    return [
        BlockedDevice(d, every[i], tuple(op for op in required[i] if op not in ended))
        for d, i in stuck
    ]


def duration_of(problem: ScheduleProblem, schedule: Schedule) -> Callable[[Operation], float]:
    """Function from an operation of ``schedule`` to its duration.

    The durations are those of ``problem``, or for a bubble task those in the schedule.
    """
    apart = schedule.recomputed_apart

    def duration(operation: Operation) -> float:
        kind, stage, microbatch = operation
        if kind is OpType.BUBBLE_TASK:
            return schedule.bubble_tasks[stage].slice_seconds[microbatch]
        seconds = problem.duration(kind, stage)
        if apart and kind in BACKWARDS and (stage, microbatch) in apart:
            seconds -= problem.duration(OpType.RECOMPUTE, stage)
        return seconds

    return duration


class StepSimulator:
    """Simulator of one schedule for changing durations; the tables of its order are built once.

    Operations are numbered as in ``every``: device after device, those of d from ``first[d]`` on;
    the last entry of ``first`` is the end. Items of ``side_lines`` follow: copies between devices
    and host, and ``channels``, each given as the operation it follows and the one that waits for
    it.
    """

    def __init__(
        self,
        schedule: Schedule,
        channels: Sequence[Sequence[tuple[Operation, Operation]]] = (),
    ) -> None:
        self.schedule = schedule
        self.every = every = [op for line in schedule.order for op in line]
        self.first = line_starts(schedule.order)
        self._copies = copy_lines(schedule)
        self.side_lines = [*self._copies, *channels]
        self.line_starts = line_starts([*schedule.order, *self.side_lines])
        self.num_items = int(self.line_starts[-1])
        self.kind = np.array([CODES[op.kind] for op in every], dtype=np.int64)
        self.stage = np.array([op.stage for op in every], dtype=np.int64)
        self.microbatch = np.array([op.microbatch for op in every], dtype=np.int64)
        shape = [int(each.max(initial=0)) + 1 for each in (self.stage, self.microbatch)]
        self.num_stages = max(schedule.placement.num_stages, shape[0])
        self.number = np.full((len(CODES), self.num_stages, shape[1]), -1)
        self.number[self.kind, self.stage, self.microbatch] = np.arange(len(every))
        self._waits()

    def _waits(self) -> None:
        """Build the predecessors of all items: of the chain, of slices, of copies and channels."""
        schedule, every = self.schedule, self.every
        needed: Any = np.full((len(CODES), self.num_stages, 2), -1)
        self._classes = {
            (kind, stage): dependency(Operation(kind, stage, 0), schedule.placement)
            for kind in {op.kind for op in every} - {OpType.BUBBLE_TASK}
            for stage in range(schedule.placement.num_stages)
        }
        for (kind, stage), source in self._classes.items():
            if source is not None:
                needed[CODES[kind], stage] = CODES[source.kind], source.stage
        kinds, stages = needed[self.kind, self.stage].T
        own: Any = np.flatnonzero(kinds >= 0)
        edges: Any = self.number[kinds[own], stages[own], self.microbatch[own]]
        edges = np.where(edges < 0, own, edges)  # what is not there never ends
        more: list[tuple[int, int, float]] = []
        if schedule.bubble_tasks or self.side_lines:
            index = self.index
            for i, op in enumerate(every):
                if op.kind is OpType.BUBBLE_TASK:
                    slices = schedule.slices_before(op)
                    more += [(i, index.get(source, i), lag) for source, lag in slices]
                elif op.kind in BACKWARDS and op[1:] in schedule.offloaded:
                    if op._replace(kind=OpType.RELOAD) not in index:
                        more.append((i, i, 0.0))
            items = (item for line in self.side_lines for item in line)
            for i, (source, target) in enumerate(items, len(every)):
                more.append((i, index.get(source, i), 0.0))
                if target in index:
                    more.append((index[target], i, 0.0))
        num_chain = len(own)
        own = np.concatenate((own, np.array([i for i, _, _ in more], dtype=np.int64)))
        edges = np.concatenate((edges, np.array([j for _, j, _ in more], dtype=np.int64)))
        lags = np.concatenate((np.zeros(num_chain), [lag for _, _, lag in more]))
        order = np.argsort(own, kind="stable")
        self.slice_waits = waits_of(own, edges, self.num_items, lags)
        self._chain = np.flatnonzero(order < num_chain)
        self._chain_own = own[:num_chain]

    def waits(self, problem: ScheduleProblem) -> Waits:
        """Predecessors of all items, with the lags of ``problem``'s links."""
        table = np.zeros((len(CODES), self.num_stages))
        for (kind, stage), source in self._classes.items():
            if source is not None:
                table[CODES[kind], stage] = problem.lag(source.stage, stage)
        lags = self.slice_waits.lags.copy()
        lags[self._chain] = table[self.kind[self._chain_own], self.stage[self._chain_own]]
        return self.slice_waits._replace(lags=lags)

    def durations(self, problem: ScheduleProblem, channel_s: Sequence[float] = ()) -> Any:
        """Durations of all items."""
        duration = duration_of(problem, self.schedule)
        usual = np.zeros((len(CODES), self.num_stages))
        for kind, stage in self._classes:
            usual[CODES[kind], stage] = problem.duration(kind, stage)
        seconds: Any = usual[self.kind, self.stage]
        for i in self._unusual:
            seconds[i] = duration(self.every[i])
        copies = [problem.offload_s_of(op.stage) for line in self._copies for op, _ in line]
        return np.concatenate((seconds, copies, channel_s))

    @cached_property
    def index(self) -> dict[Operation, int]:
        """Number of each operation."""
        return {op: i for i, op in enumerate(self.every)}

    @property
    def side_items(self) -> list[range]:
        """Numbers of the items of each side line."""
        starts = self.line_starts[len(self.schedule.order) :].tolist()
        return [range(first, last) for first, last in pairwise(starts)]

    @cached_property
    def _unusual(self) -> list[int]:
        """Operations with durations of their own: slices, and backwards without recomputation."""
        apart = self.schedule.recomputed_apart
        if not apart and not self.schedule.bubble_tasks:
            return []
        return [
            i
            for i, op in enumerate(self.every)
            if op.kind is OpType.BUBBLE_TASK or (op.kind in BACKWARDS and op[1:] in apart)
        ]

    def play(self, waits: Waits, duration: Any) -> tuple[Any, Any]:
        """Starts and ends of all items; raises DeadlockError."""
        items: Any = np.arange(self.num_items)
        start, ended = play(items, self.line_starts, waits, duration)
        if not ended.all():
            self._raise_deadlock()
        return start, start + duration

    def by_operation(self, times: Any) -> dict[Operation, float]:
        """Times of items, as a table of operations."""
        return dict(zip(self.every, times.tolist(), strict=False))

    def timeline(self, start: Any, end: Any, duration: Any) -> Timeline:
        """Timeline of these times of items."""
        seconds = duration[: len(self.every)].tolist()
        makespan = float(end[: len(self.every)].max(initial=0.0))
        busy = tuple(sum(seconds[a:b]) for a, b in pairwise(self.first.tolist()))
        bubble = tuple(makespan - b for b in busy)
        tables = self.by_operation(start), self.by_operation(end)
        return Timeline(self.schedule, *tables, makespan, busy, bubble)

    def slots(self) -> dict[Operation, int]:
        """Finish slot (1, 2, ...) of every operation if each takes one slot and links take
        none."""
        duration: Any = np.zeros(self.num_items, dtype=np.int64)
        duration[: len(self.every)] = 1
        none = self.slice_waits._replace(lags=np.zeros_like(self.slice_waits.edges))
        found: dict[Operation, int] = dict(
            zip(self.every, self.play(none, duration)[1].tolist(), strict=False)
        )
        return found

    def _raise_deadlock(self) -> None:
        schedule = self.schedule

        def needs(operation: Operation) -> tuple[Operation, ...]:
            first = dependency(operation, schedule.placement)
            slices = (source for source, _ in schedule.slices_before(operation))
            back = operation.kind in BACKWARDS and operation[1:] in schedule.offloaded
            reload = (operation._replace(kind=OpType.RELOAD),) if back else ()
            return (*(() if first is None else (first,)), *slices, *reload)

        lines = "\n".join(f"  {stays}" for stays in blocked_devices(schedule, needs))
        raise DeadlockError(f"{schedule.name}: deadlock:\n{lines}\n{grid(schedule)}")


def simulate(problem: ScheduleProblem, schedule: Schedule) -> Timeline:
    """Simulate the schedule's orders, as early as data and devices allow, with ``problem``'s times.

    Bubble tasks take the times in the schedule. Raises DeadlockError naming the waiting operations,
    and ValueError if the schedule has weight gradients and ``problem`` has none.
    """
    if OpType.WEIGHT_GRAD in schedule.kinds and problem.weight_grad is None:
        raise ValueError(
            f"a split schedule of {schedule.placement.num_stages} stages needs as many weight "
            f"gradients"
        )
    simulator = StepSimulator(schedule)
    duration = simulator.durations(problem)
    return simulator.timeline(*simulator.play(simulator.waits(problem), duration), duration)


def logical_times(schedule: Schedule) -> dict[Operation, int]:
    """Finish slot (1, 2, ...) of every operation if each takes one slot and links take none.

    The slots break ties between messages of equal times. Raises DeadlockError.
    """
    return StepSimulator(schedule).slots()


def grid(schedule: Schedule | Timeline) -> str:
    """A table with one line per device: orders of a schedule, or slots of a timeline.

    A column of a timeline is one unit of time; ``-`` continues an operation, ``.`` is idle.
    """
    if isinstance(schedule, Timeline):
        rows = [_slots(schedule, order) for order in schedule.schedule.order]
    else:
        rows = [[str(op) for op in order] for order in schedule.order]
    width = max((len(cell) for row in rows for cell in row), default=1)
    return "\n".join(
        f"device {d:>2} | " + " ".join(cell.ljust(width) for cell in row).rstrip()
        for d, row in enumerate(rows)
    )


def _slots(timeline: Timeline, order: Sequence[Operation]) -> list[str]:
    row = ["."] * round(timeline.makespan)
    for operation in order:
        first, last = round(timeline.start[operation]), round(timeline.end[operation])
        row[first:last] = [str(operation), *["-"] * (last - first - 1)][: last - first]
    return row
