"""Messages between devices and their order, compiled from a partition and a schedule.

Every device compiles the same plan. Both ends of a message therefore know when it is sent, and
shapes never travel. From one device to another there is a *channel*, which is first in, first out.
All messages of a step have one total order: the order of their production times in the plan's
simulation. Messages with slack let messages without slack go first (``MessageTimes.turns``).
Messages that one operation produces go in the order in which their consumers run. Every device
issues its sends and receives in that order. NCCL requires such an order of concurrent
communicators, and gloo accepts it.

``layout/routes`` lists the deliveries between stages; a delivery to another device is a message.
Where backwards are split, input gradients I take the place of B; weight gradients W send nothing.

A slice of a frozen component sends its states to the slices that depend on it. The last slice sends
the component's results to the devices that read them in the next step. Results travel after
everything else.

A self-conditioned backbone runs a forward-only pass before the training step. In that pass the last
stage sends its prediction of each microbatch to the first stage's device as soon as it is ready.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_pulse.backbone.chain import COMPUTE, TensorSpec
from megatron_pulse.planner.layout.routes import Payload, Routes
from megatron_pulse.planner.program.message_order import MessageTimes, Travel, moments
from megatron_pulse.planner.schedule.message import STEP_END, Message
from megatron_pulse.planner.schedule.operations import Operation, OpType, Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem

_COMPUTE_BYTES = 2
"""Bytes per element; only ratios of message sizes matter, so any compute dtype will do."""


@dataclass(frozen=True)
class CommunicationPlan:
    """All messages of one step, in the total order in which devices issue them."""

    messages: tuple[Message, ...]
    moments: MessageTimes

    @property
    def channels(self) -> tuple[tuple[int, int], ...]:
        """Pairs (source, destination) of devices that exchange at least one message."""
        return tuple(sorted({(m.source, m.destination) for m in self.messages}))


def messages_of(routes: Routes, operation: Operation) -> tuple[Message, ...]:
    """Messages between stages that are ready to send after ``operation``."""
    kind, stage = operation.kind, operation.stage
    if not kind.passes:
        return ()
    if kind is OpType.FORWARD:
        given = [(delivery, delivery.destination) for delivery in routes.given_by(stage)]
    else:
        given = [
            (delivery, delivery.source)
            for delivery in routes.given_to(stage)
            if delivery.needs_grad
        ]
    home = routes.partition.placement.device_of_stage
    return tuple(
        sorted(
            Message(
                operation,
                Operation(kind, to_stage, operation.microbatch),
                delivery.payload,
                delivery.name,
                home[stage],
                home[to_stage],
            )
            for delivery, to_stage in given
            if home[to_stage] != home[stage]
        )
    )


def messages_of_slices(schedule: Schedule) -> Iterator[Message]:
    """Messages of bubble tasks: states for slices on other devices, results for the next step."""
    home = {op: d for d, line in enumerate(schedule.order) for op in line}
    for operation, device in home.items():
        if operation.kind is not OpType.BUBBLE_TASK:
            continue
        task = schedule.bubble_tasks[operation.stage]
        if not task.slices:
            continue
        for source, _ in schedule.slices_before(operation):
            if home[source] != device:
                yield Message(source, operation, Payload.ENCODED, "", home[source], device)
        if task.finishes(operation.microbatch):
            for consumer in task.consumers:
                if consumer != device:
                    yield Message(operation, STEP_END, Payload.ENCODED, "", device, consumer)


def messages_of_predictions(schedule: Schedule) -> Iterator[Message]:
    """Predictions of each chain's last stage for every microbatch, if the first stage is on another
    device."""
    placement = schedule.placement
    home = placement.device_of_stage
    for first, last in zip(placement.starts, placement.ends, strict=True):
        for microbatch in range(schedule.num_microbatches) if home[first] != home[last] else ():
            made = Operation(OpType.FORWARD, last, microbatch)
            yield Message(made, STEP_END, Payload.PREDICTION, "", home[last], home[first])


def message_spec(routes: Routes, message: Message) -> TensorSpec:
    """Shape and dtype of the tensor that ``message`` carries.

    A gradient has the shape and dtype of its tensor. Gradients of conditioning are fp64 sums (see
    Stage) unless the conditioning is not a floating-point tensor.
    """
    match message.payload:
        case Payload.BOUNDARY:
            later = max(message.producer.stage, message.consumer.stage)
            return routes.boundaries[later][int(message.name)]
        case Payload.SKIP:
            return next(r.spec for r in routes.skips if r.name == message.name)
        case Payload.CONDITIONING:
            spec = next(c.spec for c in routes.conditioning if c.name == message.name)
            is_gradient = message.producer.kind is not OpType.FORWARD
            is_sum = spec.dtype == COMPUTE or "float" in spec.dtype
            return replace(spec, dtype="float64") if is_gradient and is_sum else spec
        case _:
            raise ValueError(f"{message} is no part of the chain: its carrier knows its size")


def compile_communication(
    routes: Routes,
    schedule: Schedule,
    problem: ScheduleProblem | None = None,
    predicts: bool = False,
) -> CommunicationPlan:
    """Compile all messages of one step of ``schedule``, ordered by the times of ``problem``.

    Without a ``problem`` each operation takes one unit. ``predicts`` marks a forward-only pass
    whose predictions the next pass reads.
    """
    of_stages = [m for line in schedule.order for op in line for m in messages_of(routes, op)]
    rate = 0.0 if problem is None else _seconds_per_byte(routes, problem)
    travels = (Travel(m, rate * _bytes(routes, m)) for m in of_stages)
    times = moments(schedule, problem, travels)
    predictions = messages_of_predictions(schedule) if predicts else ()
    messages = (*of_stages, *messages_of_slices(schedule), *predictions)
    turns = times.turns(messages)
    order = sorted(messages, key=lambda m: (turns[m], times.made(m), times.needed(m), m))
    return CommunicationPlan(tuple(order), times.with_turns(turns))


def _bytes(routes: Routes, message: Message) -> int:
    return message_spec(routes, message).bytes_per_sample(_COMPUTE_BYTES)


def _seconds_per_byte(routes: Routes, problem: ScheduleProblem) -> float:
    """Seconds per byte of a sample, from the link times that ``problem`` has for the boundaries."""
    stages = [s for s in range(problem.placement.num_stages - 1) if problem.lag(s, s + 1)]
    sizes = [
        spec.bytes_per_sample(_COMPUTE_BYTES) for s in stages for spec in routes.boundaries[s + 1]
    ]
    return sum(problem.lag(s, s + 1) for s in stages) / sum(sizes) if sizes else 0.0
