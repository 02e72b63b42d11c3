"""What travels between devices, and in which order, compiled from a partition and a schedule.

Every device compiles the same plan, so both ends of a message know when it is sent, and shapes
never travel. From one device to another there is a *channel*, which is first in, first out. All
messages of a step have one order, that of the times at which the plan's simulation has them made,
but that those with time to spare let those without go first (``Moments.turns``); what one operation
makes goes in the order in which it is needed. Every device issues its sends and
receives in that order, which is what NCCL wants of communicators that are used at one time, and
what gloo accepts.

What stages give to others is in ``layout/routes``: a message is what goes to another device.
Where backwards are split, input gradients I take the place of B; weight gradients W stay at home.

A slice of a frozen component leaves states for the slices that need it, and its component's results
for devices that read them in the next step. Results travel when all else is done.

The forward pass of a backbone that conditions itself sends what the last stage made of each
microbatch to the first stage's device, as soon as it is made: the step of training is what follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_pulse.backbone.chain import COMPUTE, TensorSpec
from megatron_pulse.planner.layout.routes import Payload, Routes
from megatron_pulse.planner.schedule.message import STEP_END, Message
from megatron_pulse.planner.schedule.operations import Kind, Operation, Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.step.order import Moments, Travel, moments

_COMPUTE_BYTES = 2
"""Of an element that is computed with: sizes are only set beside each other."""


@dataclass(frozen=True)
class CommunicationPlan:
    """All messages of one step in the one order in which devices issue them."""

    messages: tuple[Message, ...]
    moments: Moments

    @property
    def channels(self) -> tuple[tuple[int, int], ...]:
        """The pairs (source, destination) of devices between which something travels."""
        return tuple(sorted({(m.source, m.destination) for m in self.messages}))


def messages_of(routes: Routes, operation: Operation) -> tuple[Message, ...]:
    """The messages of stages that are ready when ``operation`` has run."""
    kind, stage = operation.kind, operation.stage
    if not kind.passes:
        return ()
    if kind is Kind.FORWARD:
        given = [(delivery, delivery.destination) for delivery in routes.given_by(stage)]
    else:
        given = [
            (delivery, delivery.source) for delivery in routes.given_to(stage) if delivery.wants
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
    """What slices of frozen components leave for those on other devices, and for the next step."""
    home = {op: d for d, line in enumerate(schedule.order) for op in line}
    for operation, device in home.items():
        if operation.kind is not Kind.FILLER:
            continue
        filler = schedule.fillers[operation.stage]
        if not filler.pieces:
            continue
        for source, _ in schedule.slices_before(operation):
            if home[source] != device:
                yield Message(source, operation, Payload.ENCODED, "", home[source], device)
        if filler.finishes(operation.microbatch):
            for reader in filler.readers:
                if reader != device:
                    yield Message(operation, STEP_END, Payload.ENCODED, "", device, reader)


def messages_of_predictions(schedule: Schedule) -> Iterator[Message]:
    """What the last stage of a chain makes of each microbatch, where the first is on another
    device."""
    placement = schedule.placement
    home = placement.device_of_stage
    for first, last in zip(placement.starts, placement.ends, strict=True):
        for microbatch in range(schedule.num_microbatches) if home[first] != home[last] else ():
            made = Operation(Kind.FORWARD, last, microbatch)
            yield Message(made, STEP_END, Payload.PREDICTION, "", home[last], home[first])


def message_spec(routes: Routes, message: Message) -> TensorSpec:
    """Shape and dtype of what ``message`` carries.

    A gradient has its tensor's, except conditioning's, a sum in fp64 (see Stage) where it is one.
    """
    match message.payload:
        case Payload.BOUNDARY:
            later = max(message.producer.stage, message.consumer.stage)
            return routes.boundaries[later][int(message.name)]
        case Payload.SKIP:
            return next(r.spec for r in routes.skips if r.name == message.name)
        case Payload.CONDITIONING:
            spec = next(c.spec for c in routes.conditioning if c.name == message.name)
            is_gradient = message.producer.kind is not Kind.FORWARD
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
    """All messages of one step of ``schedule``, ordered by ``problem``'s times (None: operations
    take one unit each).

    A pass that ``predicts`` is one of forwards alone, whose predictions the next one reads.
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
    """Of a sample, by what ``problem`` says of the boundaries between devices."""
    stages = [s for s in range(problem.placement.num_stages - 1) if problem.lag(s, s + 1)]
    sizes = [
        spec.bytes_per_sample(_COMPUTE_BYTES) for s in stages for spec in routes.boundaries[s + 1]
    ]
    return sum(problem.lag(s, s + 1) for s in stages) / sum(sizes) if sizes else 0.0
