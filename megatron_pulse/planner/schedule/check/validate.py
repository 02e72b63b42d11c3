"""Static checks of a schedule that report every fault at once, with its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.schedule.check.simulate import blocked_devices, dependency, grid
from megatron_pulse.planner.schedule.message import STEP_END, Message
from megatron_pulse.planner.schedule.operations import BACKWARDS, Operation, OpType, Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem


def validate(
    schedule: Schedule,
    partition: Partition | None = None,
    messages: Iterable[Message] | None = None,
    cap: float | Sequence[float] | None = None,
    activation: Sequence[float] | None = None,
    recomputed: Sequence[float] | None = None,
    wgrad_bytes: Sequence[float] | None = None,
    offloaded: Sequence[float] | None = None,
) -> list[str]:
    """Return all faults of ``schedule``; empty if it can run.

    The checks are:

    * every operation is there once, on its stage's device (a slice of a bubble task: on an allowed
      device);
    * every stage takes the microbatches in order (gradients accumulate in that order);
    * backwards follow forwards, and weight gradients follow input gradients;
    * recomputation is between forward and backward, and reload before the backward;
    * backwards are either all whole or all split;
    * nothing waits in a circle (data flow of the chain and, if given, of ``messages``);
    * no device holds more than ``cap`` (one value for all, or one each);
    * both ends of every message are in the schedule, where the message says.

    A live activation counts as ``activation`` of its stage (default 1). ``recomputed`` (default 0)
    is added from its R to its backward, and ``offloaded`` (default 0) is taken off while it is on
    the host. After a split backward's input gradient it counts as ``wgrad_bytes`` (default: the
    same). A schedule without any backward is an evaluation: only forwards are expected, and no
    activation is kept.
    """
    known = [] if messages is None else list(messages)
    faults = [
        *_placement_faults(schedule, partition),
        *_kind_faults(schedule),
        *_set_faults(schedule),
        *_order_faults(schedule),
        *_message_faults(schedule, known),
    ]
    faults.extend(_deadlock_faults(schedule, known))
    if cap is not None:
        faults.extend(cap_faults(schedule, cap, activation, recomputed, wgrad_bytes, offloaded))
    return faults


def cap_faults(
    schedule: Schedule,
    cap: float | Sequence[float],
    activation: Sequence[float] | None = None,
    recomputed: Sequence[float] | None = None,
    wgrad_bytes: Sequence[float] | None = None,
    offloaded: Sequence[float] | None = None,
) -> list[str]:
    """Devices that hold more live activations than their cap (see ``validate``)."""
    if len(schedule.kinds) == 1:
        return []
    peaks = peak_activations(schedule, activation, recomputed, wgrad_bytes, offloaded)
    caps = cap if isinstance(cap, Sequence) else (cap,) * len(peaks)
    return [
        f"device {d} holds {_told(peak)} at its peak; the cap is {_told(limit).split()[0]}"
        for d, (peak, limit) in enumerate(zip(peaks, caps, strict=False))
        if peak > limit * (1 + 1e-9)
    ]


def _told(held: float) -> str:
    return (
        f"{held / 1e9:.4g} GB of activations" if held > 1e6 else f"{held:g} live stage activations"
    )


def faults_for(problem: ScheduleProblem, schedule: Schedule) -> list[str]:
    """Return all faults of ``schedule`` as a solution of ``problem``; empty if it is one."""
    faults = []
    numbers = {
        op.microbatch for o in schedule.order for op in o if op.kind is not OpType.BUBBLE_TASK
    }
    beyond = max(numbers, default=0) >= problem.num_microbatches
    if beyond and len(numbers) < schedule.num_microbatches:  # reported below
        schedule = replace(schedule, num_microbatches=problem.num_microbatches)
    if schedule.placement != problem.placement:
        faults.append(
            f"the schedule is for placement {schedule.placement.device_of_stage}, the problem for "
            f"{problem.placement.device_of_stage}"
        )
    if schedule.num_microbatches != problem.num_microbatches:
        faults.append(
            f"the schedule has {schedule.num_microbatches} microbatches, the problem "
            f"{problem.num_microbatches}"
        )
    if schedule.kinds != problem.kinds:
        kinds = ["".join(kind.value for kind in kinds) for kinds in (schedule.kinds, problem.kinds)]
        faults.append(f"the schedule has operations {kinds[0]}, the problem {kinds[1]}")
    if faults:
        return faults
    if schedule.recomputed_apart and problem.recompute_s is None:
        return ["the schedule has separate recomputation (R), the problem has none"]
    if schedule.offloaded and problem.offload_bytes is None:
        return ["the schedule offloads activations (O), the problem has no offload"]
    return validate(schedule, None, None, problem.cap, *_held(problem))


def peak_memory(problem: ScheduleProblem, schedule: Schedule) -> tuple[float, ...]:
    """Peak memory of activations of ``schedule`` per device (see ``peak_activations``)."""
    return peak_activations(schedule, *_held(problem))


def _held(problem: ScheduleProblem) -> tuple[tuple[float, ...] | None, ...]:
    return problem.activation, problem.recompute_bytes, problem.wgrad_bytes, problem.offload_bytes


def peak_activations(
    schedule: Schedule,
    activation: Sequence[float] | None = None,
    recomputed: Sequence[float] | None = None,
    wgrad_bytes: Sequence[float] | None = None,
    offloaded: Sequence[float] | None = None,
) -> tuple[float, ...]:
    """Peak of live stage activations per device; an activation lives from its F to its B or W.

    ``activation`` is the size by stage (default 1). ``wgrad_bytes`` is its size from I to W
    (default: the same). ``recomputed`` is the additional size from its R to its B or I (default 0).
    ``offloaded`` is the part that is absent from its O to its L (default 0).
    """
    weights = None if activation is None else dict(enumerate(activation))
    again = dict(enumerate(recomputed or ()))
    peaks = []
    for order in schedule.order:
        live: dict[tuple[int, int], float] = {}
        twice: dict[tuple[int, int], float] = {}
        peak = 0.0
        for operation in order:
            key = (operation.stage, operation.microbatch)
            if operation.kind is OpType.FORWARD:
                live[key] = 1.0 if weights is None else weights.get(operation.stage, 1.0)
            elif operation.kind is OpType.RECOMPUTE:
                twice[key] = again.get(operation.stage, 0.0)
            elif operation.kind.copies and key in live:
                out = 0.0 if offloaded is None else offloaded[operation.stage]
                live[key] += out if operation.kind is OpType.RELOAD else -out
            rest = None
            if operation.kind is OpType.INPUT_GRAD and wgrad_bytes is not None and key in live:
                rest = wgrad_bytes[operation.stage]
                live[key] = max(live[key], rest)
            if operation.kind in (
                OpType.FORWARD,
                OpType.RECOMPUTE,
                OpType.RELOAD,
                OpType.INPUT_GRAD,
            ):
                peak = max(peak, sum(live.values()) + sum(twice.values()))
            if operation.kind in BACKWARDS:
                twice.pop(key, None)
            if rest is not None:
                live[key] = rest
            elif operation.kind.live < 0:
                live.pop(key, None)
        peaks.append(peak)
    return tuple(peaks)


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


def _kind_faults(schedule: Schedule) -> Iterator[str]:
    """Whole and split backwards in one schedule: gradients would go to operations that do not
    exist."""
    if len(schedule.kinds) == 3:
        whole = sorted(op for order in schedule.order for op in order if op.kind is OpType.BACKWARD)
        if whole:
            yield (
                f"the schedule mixes whole backwards (B) with split ones (I and W): "
                f"{', '.join(map(str, whole[:3]))}{', ...' if len(whole) > 3 else ''}"
            )


def _set_faults(schedule: Schedule) -> Iterator[str]:
    """Missing, duplicate and unknown operations, and operations on the wrong device."""
    placement, count = schedule.placement, schedule.num_microbatches
    seen: Counter[Operation] = Counter()
    for device, order in enumerate(schedule.order):
        for operation in order:
            seen[operation] += 1
            if operation.kind is OpType.BUBBLE_TASK:
                yield from _slice_faults(schedule, device, operation)
            elif not 0 <= operation.stage < placement.num_stages:
                yield f"{operation} on device {device}: there is no stage {operation.stage}"
            elif not 0 <= operation.microbatch < count:
                yield (
                    f"{operation} on device {device}: there is no microbatch {operation.microbatch}"
                )
            elif (home := placement.device_of_stage[operation.stage]) != device:
                yield (
                    f"{operation} is on device {device}; stage {operation.stage} is on device "
                    f"{home}"
                )
    for operation, times in seen.items():
        if times > 1:
            yield f"{operation} is in the schedule {times} times"
    for kind in schedule.kinds:
        for stage in range(placement.num_stages):
            for m in range(count):
                if Operation(kind, stage, m) not in seen:
                    home = placement.device_of_stage[stage]
                    yield f"{Operation(kind, stage, m)} is missing on device {home}"
    for index, task in enumerate(schedule.bubble_tasks):
        for number in range(len(task.slice_seconds)):
            if Operation(OpType.BUBBLE_TASK, index, number) not in seen:
                operation = Operation(OpType.BUBBLE_TASK, index, number)
                yield f"{operation} of bubble task {task.name!r} is missing"
        for number in range(len(task.slice_seconds)):
            operation = Operation(OpType.BUBBLE_TASK, index, number)
            for source, _ in schedule.slices_before(operation):
                if source not in seen:
                    yield f"{operation} waits for {source}, which is not in the schedule"


def _slice_faults(schedule: Schedule, device: int, operation: Operation) -> Iterator[str]:
    """Unknown bubble tasks and slices, and slices on a device that is not allowed."""
    if not 0 <= operation.stage < len(schedule.bubble_tasks):
        yield f"{operation} on device {device}: there is no bubble task {operation.stage}"
        return
    task = schedule.bubble_tasks[operation.stage]
    if not 0 <= operation.microbatch < len(task.slice_seconds):
        yield (
            f"{operation} on device {device}: bubble task {task.name!r} has "
            f"{len(task.slice_seconds)} slices"
        )
    if not task.may_run_on(device):
        yield (
            f"{operation} is on device {device}; bubble task {task.name!r} may run on "
            f"{', '.join(map(str, task.devices or ()))}"
        )


def _order_faults(schedule: Schedule) -> Iterator[str]:
    """Backwards before their forwards, weight gradients before their input gradients, microbatches
    of a stage out of order."""
    for device, order in enumerate(schedule.order):
        position = {operation: i for i, operation in reversed(list(enumerate(order)))}
        last: dict[tuple[OpType, int], Operation] = {}
        for i, operation in enumerate(order):
            if operation.kind is OpType.BUBBLE_TASK:
                continue
            if operation.kind in BACKWARDS:
                for kind in (OpType.RECOMPUTE, OpType.RELOAD):
                    again = operation._replace(kind=kind)
                    if position.get(again, -1) > i:
                        yield f"device {device} runs {operation} before {again}"
            if operation.kind.copies:
                yield from _copy_faults(device, operation, i, position)
            if operation.kind is not OpType.FORWARD:
                after_input = operation.kind is OpType.WEIGHT_GRAD
                first = operation._replace(
                    kind=OpType.INPUT_GRAD if after_input else OpType.FORWARD
                )
                if position.get(first, -1) > i:
                    yield f"device {device} runs {operation} before {first}"
            if operation.kind.is_optional:
                continue
            line = (operation.kind, operation.stage)
            previous = last.get(line)
            if previous is not None and previous.microbatch > operation.microbatch:
                yield (
                    f"device {device} runs {previous} before {operation}; the microbatches of a "
                    f"stage must run in order"
                )
            last[line] = operation


def _copy_faults(
    device: int, operation: Operation, i: int, position: Mapping[Operation, int]
) -> Iterator[str]:
    """An O without an L, an L without an O, or an L before its O."""
    other = OpType.RELOAD if operation.kind is OpType.OFFLOAD else OpType.OFFLOAD
    partner = operation._replace(kind=other)
    if partner not in position:
        yield f"device {device} runs {operation}, but not {partner}"
    elif other is OpType.RELOAD and position[partner] < i:
        yield f"device {device} runs {partner} before {operation}"


def _message_faults(schedule: Schedule, messages: list[Message]) -> Iterator[str]:
    where = {op: d for d, order in enumerate(schedule.order) for op in order}
    for message in messages:
        if message.source == message.destination:
            yield f"{message}: both ends are on one device, so no message is needed"
        if not 0 <= message.destination < len(schedule.order):
            yield f"{message}: there is no device {message.destination}"
        for role, operation, device in (
            ("producer", message.producer, message.source),
            ("consumer", message.consumer, message.destination),
        ):
            if operation == STEP_END and role == "consumer":
                continue
            if operation not in where:
                yield f"{message}: its {role} {operation} is not in the schedule"
            elif where[operation] != device:
                yield (
                    f"{message}: its {role} {operation} runs on device {where[operation]}, "
                    f"not on device {device}"
                )


def _deadlock_faults(schedule: Schedule, messages: list[Message]) -> Iterator[str]:
    """Circular waits among the operations present; missing operations are another fault."""
    present = {op for order in schedule.order for op in order}
    arrivals: dict[Operation, set[Operation]] = {}
    for message in messages:
        if message.consumer != STEP_END:
            arrivals.setdefault(message.consumer, set()).add(message.producer)

    def needs(operation: Operation) -> list[Operation]:
        first = dependency(operation, schedule.placement)
        required = arrivals.get(operation, set()) | ({first} if first is not None else set())
        required |= {source for source, _ in schedule.slices_before(operation)}
        return sorted(required & present)

    stuck = blocked_devices(schedule, needs)
    if stuck:
        waits = "; ".join(map(str, stuck))
        yield f"deadlock: {waits}\n{grid(schedule)}"
