"""Event simulation: start and end of every operation of a schedule, and idle time of devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_pulse.planner.layout.placement import Placement
from megatron_pulse.planner.schedule.check.offload_copies import (
    OffloadCopy,
    copies_before,
    copy_lines,
)
from megatron_pulse.planner.schedule.operations import BACKWARDS, Operation, OpType, Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem


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


def play[T](
    lines: Sequence[Sequence[T]],
    before: Callable[[T], Iterable[tuple[T, float]]],
    duration: Callable[[T], float],
) -> tuple[dict[T, float], dict[T, float], list[tuple[int, T]]]:
    """Execute the orders of all devices, each operation as early as the others allow.

    ``before(i)`` are pairs of an operation that must have ended and the lag until i can start.
    Returns starts, ends, and pairs of a device and the operation at which it waits for ever.
    """
    start: dict[T, float] = {}
    end: dict[T, float] = {}
    position = [0] * len(lines)
    clock: list[float] = [0] * len(lines)
    progress = True
    while progress:
        progress = False
        for device, line in enumerate(lines):
            now, at = clock[device], position[device]
            while at < len(line):
                operation = line[at]
                begin = now
                for required, lag in before(operation):
                    if required not in end:
                        break
                    begin = max(begin, end[required] + lag)
                else:
                    start[operation] = begin
                    now = end[operation] = begin + duration(operation)
                    at += 1
                    progress = True
                    continue
                break
            clock[device], position[device] = now, at
    stuck = [
        (d, line[p])
        for d, (line, p) in enumerate(zip(lines, position, strict=True))
        if p < len(line)
    ]
    return start, end, stuck


def blocked_devices(
    schedule: Schedule, needs: Callable[[Operation], Iterable[Operation]]
) -> list[BlockedDevice]:
    """Devices that wait for ever; ``needs(op)`` are the operations whose results ``op`` takes."""
    _, end, stuck = play(schedule.order, lambda op: ((r, 0.0) for r in needs(op)), lambda _: 1.0)
    return [BlockedDevice(d, op, tuple(r for r in needs(op) if r not in end)) for d, op in stuck]


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

    duration = duration_of(problem, schedule)

    def lag(source: Operation, operation: Operation) -> float:
        return problem.lag(source.stage, operation.stage)

    def lasts(item: Operation | OffloadCopy) -> float:
        if isinstance(item, OffloadCopy):
            return problem.offload_s_of(item.operation.stage)
        return duration(item)

    start, end = _play_all(schedule, lasts, lag, lambda seconds: seconds)
    makespan = max(end.values(), default=0.0)
    busy = tuple(sum(duration(op) for op in order) for order in schedule.order)
    return Timeline(schedule, start, end, makespan, busy, tuple(makespan - b for b in busy))


def logical_times(schedule: Schedule) -> dict[Operation, int]:
    """Finish slot (1, 2, ...) of every operation if each takes one slot and links take none.

    The slots break ties between messages of equal times. Raises DeadlockError.
    """

    def lasts(item: Operation | OffloadCopy) -> float:
        return 0.0 if isinstance(item, OffloadCopy) else 1.0

    end = _play_all(schedule, lasts, lambda _, __: 0.0, lambda _: 0.0)[1]
    return {operation: round(time) for operation, time in end.items()}


def _play_all(
    schedule: Schedule,
    lasts: Callable[[Operation | OffloadCopy], float],
    lag: Callable[[Operation, Operation], float],
    slice_lag: Callable[[float], float],
) -> tuple[dict[Operation, float], dict[Operation, float]]:
    """Starts and ends with the dependencies of chain, slices and copies; raises DeadlockError."""

    def first(operation: Operation) -> Iterator[tuple[Operation, float]]:
        if operation.kind is OpType.BUBBLE_TASK:
            for source, seconds in schedule.slices_before(operation):
                yield source, slice_lag(seconds)
        else:
            required = dependency(operation, schedule.placement)
            if required is not None:
                yield required, lag(required, operation)

    def before(item: Operation | OffloadCopy) -> Iterator[tuple[Operation | OffloadCopy, float]]:
        if not isinstance(item, OffloadCopy):
            yield from first(item)
        if schedule.offloaded:
            yield from ((source, 0.0) for source in copies_before(item, schedule))

    def needs(operation: Operation) -> tuple[Operation, ...]:
        back = operation.kind in BACKWARDS and operation._replace(kind=OpType.RELOAD)
        own = (back,) if back and back[1:] in schedule.offloaded else ()
        return (*(required for required, _ in first(operation)), *own)

    all_lines: list[Sequence[Operation | OffloadCopy]] = [*schedule.order, *copy_lines(schedule)]
    started, ended, stuck = play(all_lines, before, lasts)
    start = {op: t for op, t in started.items() if isinstance(op, Operation)}
    end = {op: t for op, t in ended.items() if isinstance(op, Operation)}
    if stuck:
        lines = "\n".join(f"  {stays}" for stays in blocked_devices(schedule, needs))
        raise DeadlockError(f"{schedule.name}: deadlock:\n{lines}\n{grid(schedule)}")
    return start, end


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
