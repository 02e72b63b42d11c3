"""Static checks of a schedule: every fault at once, with its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from megatron_pulse.planner.communication import Message
from megatron_pulse.planner.partition import Partition
from megatron_pulse.planner.schedule.operations import Kind, Operation, Schedule
from megatron_pulse.planner.schedule.simulate import dependency, grid, play


def validate(
    schedule: Schedule,
    partition: Partition | None = None,
    messages: Iterable[Message] | None = None,
    cap: int | None = None,
) -> list[str]:
    """All faults of ``schedule``; empty when it can run.

    Checks that every operation is there once and on its stage's device, that every stage works
    through the microbatches in order (gradients accumulate in that order), that backwards follow
    forwards, that nothing waits in a circle (data flow of the chain and, if given, of
    ``messages``), that no device holds more than ``cap`` live stage activations, and that the ends
    of every message are in the schedule where the message says. A schedule without any backward
    is taken as an evaluation: only forwards are expected, and no activation is kept.
    """
    known = [] if messages is None else list(messages)
    faults = [
        *_placement_faults(schedule, partition),
        *_set_faults(schedule),
        *_order_faults(schedule),
        *_message_faults(schedule, known),
    ]
    faults.extend(_deadlock_faults(schedule, known))
    if cap is not None and not _is_evaluation(schedule):
        faults.extend(
            f"device {d} holds {peak} live stage activations at its peak; the cap is {cap}"
            for d, peak in enumerate(peak_activations(schedule))
            if peak > cap
        )
    return faults


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Per device, the most stage activations alive at once; one lives from its F to its B."""
    peaks = []
    for order in schedule.order:
        live: set[tuple[int, int]] = set()
        peak = 0
        for operation in order:
            activation = (operation.stage, operation.microbatch)
            if operation.kind is Kind.FORWARD:
                live.add(activation)
                peak = max(peak, len(live))
            else:
                live.discard(activation)
        peaks.append(peak)
    return tuple(peaks)


def _is_evaluation(schedule: Schedule) -> bool:
    return not any(op.kind is Kind.BACKWARD for order in schedule.order for op in order)


def _placement_faults(schedule: Schedule, partition: Partition | None) -> Iterator[str]:
    placement = schedule.placement
    if len(schedule.order) != placement.num_devices:
        yield (
            f"the schedule has orders for {len(schedule.order)} devices; "
            f"its placement has {placement.num_devices}"
        )
    if partition is None:
        return
    if partition.placement != placement:
        yield (
            f"the schedule is for placement {placement.device_of_stage}, "
            f"the partition for {partition.placement.device_of_stage}"
        )
    if len(partition.cuts) != partition.placement.num_stages + 1:
        yield (
            f"the partition has {len(partition.cuts)} cuts; its "
            f"{partition.placement.num_stages} stages need {partition.placement.num_stages + 1}"
        )
    for stage, (first, last) in enumerate(zip(partition.cuts, partition.cuts[1:], strict=False)):
        if first >= last:
            yield f"stage {stage} of the partition is empty: layers {first} to {last}"


def _set_faults(schedule: Schedule) -> Iterator[str]:
    """Operations that are missing, there twice, unknown, or on the wrong device."""
    home, count = schedule.placement.device_of_stage, schedule.num_microbatches
    seen: Counter[Operation] = Counter()
    for device, order in enumerate(schedule.order):
        for operation in order:
            seen[operation] += 1
            if not 0 <= operation.stage < len(home):
                yield f"{operation} on device {device}: there is no stage {operation.stage}"
            elif not 0 <= operation.microbatch < count:
                yield (
                    f"{operation} on device {device}: there is no microbatch {operation.microbatch}"
                )
            elif home[operation.stage] != device:
                yield (
                    f"{operation} is on device {device}; stage {operation.stage} is on device "
                    f"{home[operation.stage]}"
                )
    kinds = (Kind.FORWARD,) if _is_evaluation(schedule) else tuple(Kind)
    for operation, times in seen.items():
        if times > 1:
            yield f"{operation} is in the schedule {times} times"
    for kind in kinds:
        for stage in range(len(home)):
            for m in range(count):
                if Operation(kind, stage, m) not in seen:
                    yield f"{Operation(kind, stage, m)} is missing on device {home[stage]}"


def _order_faults(schedule: Schedule) -> Iterator[str]:
    """A backward before its forward, or microbatches of a stage out of order."""
    for device, order in enumerate(schedule.order):
        position = {operation: i for i, operation in reversed(list(enumerate(order)))}
        last: dict[tuple[Kind, int], Operation] = {}
        for i, operation in enumerate(order):
            if operation.kind is Kind.BACKWARD:
                forward = Operation(Kind.FORWARD, operation.stage, operation.microbatch)
                if position.get(forward, -1) > i:
                    yield f"device {device} runs {operation} before {forward}"
            line = (operation.kind, operation.stage)
            previous = last.get(line)
            if previous is not None and previous.microbatch > operation.microbatch:
                yield (
                    f"device {device} runs {previous} before {operation}; the microbatches of a "
                    f"stage must run in order"
                )
            last[line] = operation


def _message_faults(schedule: Schedule, messages: list[Message]) -> Iterator[str]:
    where = {op: d for d, order in enumerate(schedule.order) for op in order}
    for message in messages:
        if message.source == message.destination:
            yield f"{message}: both ends are on one device, nothing needs to travel"
        for role, operation, device in (
            ("producer", message.producer, message.source),
            ("consumer", message.consumer, message.destination),
        ):
            if operation not in where:
                yield f"{message}: its {role} {operation} is not in the schedule"
            elif where[operation] != device:
                yield (
                    f"{message}: its {role} {operation} runs on device {where[operation]}, "
                    f"not on device {device}"
                )


def _deadlock_faults(schedule: Schedule, messages: list[Message]) -> Iterator[str]:
    """Circular waits among the operations that are there; what is missing is another fault."""
    present = {op for order in schedule.order for op in order}
    arrivals: dict[Operation, set[Operation]] = {}
    for message in messages:
        arrivals.setdefault(message.consumer, set()).add(message.producer)

    def needs(operation: Operation) -> list[Operation]:
        first = dependency(operation, schedule.placement.num_stages)
        required = arrivals.get(operation, set()) | ({first} if first is not None else set())
        return sorted(required & present)

    stuck = play(schedule, needs, lambda _: 1.0)[2]
    if stuck:
        waits = "; ".join(map(str, stuck))
        yield f"deadlock: {waits}\n{grid(schedule)}"
