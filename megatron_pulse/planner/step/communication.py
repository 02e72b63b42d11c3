"""What travels between devices, and in which order, compiled from a partition and a schedule.

Every device compiles the same plan, so both ends of a message know when it is sent, and shapes
never travel. A *round* is the set of messages produced at one logical time; every device issues
its rounds in order, and within a round its messages in canonical order. That is what NCCL needs
(no tags; first in, first out per pair and direction) and what gloo accepts.

What crosses between stage s and stage t:

==============  ============================  =====================================
payload         forward, produced by F(s)     gradient, produced by B(t)
==============  ============================  =====================================
boundary        to F(s+1)                     to B(s)
skip            to F(t), source to            to B(s), directly
                destination directly
conditioning    to the first F on every       one sum per device, from the last B
                device that uses it           on the device that uses it, to B(s)
==============  ============================  =====================================

Where backwards are split, input gradients I take the place of B; weight gradients W stay at home.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megatron_pulse.planner.layout.routes import Carrier, Routes
from megatron_pulse.planner.schedule.check.simulate import logical_times
from megatron_pulse.planner.schedule.operations import Kind, Operation, Schedule


class Payload(StrEnum):
    """What a message carries."""

    BOUNDARY = "boundary"
    SKIP = "skip"
    CONDITIONING = "conditioning"


@dataclass(frozen=True, order=True)
class Message:
    """One tensor from ``source`` to ``destination`` (pipeline devices).

    ``producer`` is the operation on the source device whose end makes it ready; ``consumer`` the
    first operation on the destination device that needs it. ``name`` is the skip's or the
    conditioning's name, or the index of the boundary tensor. The order of the fields is the
    canonical order inside a round.
    """

    producer: Operation
    consumer: Operation
    payload: Payload
    name: str
    source: int
    destination: int

    def __str__(self) -> str:
        return (
            f"{self.payload.value} {self.name} of {self.producer} for {self.consumer}, "
            f"device {self.source} to device {self.destination}"
        )


@dataclass(frozen=True)
class CommunicationPlan:
    """All messages of one step, in rounds."""

    rounds: tuple[tuple[Message, ...], ...]

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages in the order in which they are issued."""
        return tuple(message for round_ in self.rounds for message in round_)


def messages_of(routes: Routes, operation: Operation) -> tuple[Message, ...]:
    """The messages that are ready when ``operation`` has run."""
    if operation.kind is Kind.FORWARD:
        return _forward_messages(routes, operation)
    if operation.kind in (Kind.WEIGHT_GRAD, Kind.FILLER):
        return ()
    return _gradient_messages(routes, operation)


def _forward_messages(routes: Routes, producer: Operation) -> tuple[Message, ...]:
    placed = routes.partition.placement.device_of_stage
    stage, source = producer.stage, placed[producer.stage]
    messages = []

    def send(payload: Payload, name: str, to_stage: int) -> None:
        if placed[to_stage] != source:
            consumer = Operation(Kind.FORWARD, to_stage, producer.microbatch)
            messages.append(Message(producer, consumer, payload, name, source, placed[to_stage]))

    if stage + 1 < len(placed):
        for index in range(len(routes.boundaries[stage + 1])):
            send(Payload.BOUNDARY, str(index), stage + 1)
    for skip in routes.skips_out_of(stage):
        send(Payload.SKIP, skip.name, skip.destination_stage)
    for edge in routes.conditioning_out_of(stage):
        for device in range(routes.partition.placement.num_devices):
            first = edge.first_stage_on(routes.partition, device)
            if first is not None:
                send(Payload.CONDITIONING, edge.name, first)
    return tuple(sorted(messages))


def _gradient_messages(routes: Routes, producer: Operation) -> tuple[Message, ...]:
    placed = routes.partition.placement.device_of_stage
    stage, source = producer.stage, placed[producer.stage]
    messages = []

    def send(payload: Payload, name: str, to_stage: int) -> None:
        if placed[to_stage] != source:
            consumer = Operation(producer.kind, to_stage, producer.microbatch)
            messages.append(Message(producer, consumer, payload, name, source, placed[to_stage]))

    if stage > 0:
        for index in range(len(routes.boundaries[stage])):
            send(Payload.BOUNDARY, str(index), stage - 1)
    for skip in routes.skips_into(stage):
        if skip.carrier is Carrier.DIRECT:
            send(Payload.SKIP, skip.name, skip.source_stage)
    for edge in routes.conditioning_into(stage):
        # Backwards run from the last stage to the first, so the device's sum is complete here.
        if edge.first_stage_on(routes.partition, source) == stage:
            send(Payload.CONDITIONING, edge.name, edge.source_stage)
    return tuple(sorted(messages))


def compile_communication(routes: Routes, schedule: Schedule) -> CommunicationPlan:
    """All messages of one step of ``schedule``, grouped into rounds by logical time."""
    times = logical_times(schedule)
    rounds: dict[int, list[Message]] = {}
    for operation, time in times.items():
        for message in messages_of(routes, operation):
            rounds.setdefault(time, []).append(message)
    return CommunicationPlan(tuple(tuple(sorted(rounds[time])) for time in sorted(rounds)))
