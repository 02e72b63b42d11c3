"""What travels between devices, and in which order, compiled from a partition and a schedule.

Every device compiles the same plan, so both ends of a message know when it is sent, and shapes
never travel. A *round* is the set of messages produced at one logical time; every device issues
its rounds in order, and within a round its messages in canonical order. That is what NCCL needs
(no tags; first in, first out per pair and direction) and what gloo accepts.

What stages give to others is in ``layout/routes``: a message is what goes to another device.
Where backwards are split, input gradients I take the place of B; weight gradients W stay at home.

A slice of a frozen component leaves states for the slices that need it, and its component's results
for devices that read them in the next step. Results travel when all else is done::

    rounds   1  2  3  ...  last operation  |  results of slices
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_pulse.planner.layout.routes import Payload, Routes
from megatron_pulse.planner.schedule.check.simulate import logical_times
from megatron_pulse.planner.schedule.message import STEP_END, Message
from megatron_pulse.planner.schedule.operations import Kind, Operation, Schedule


@dataclass(frozen=True)
class CommunicationPlan:
    """All messages of one step, in rounds."""

    rounds: tuple[tuple[Message, ...], ...]

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages in the order in which they are issued."""
        return tuple(message for round_ in self.rounds for message in round_)


def messages_of(routes: Routes, operation: Operation) -> tuple[Message, ...]:
    """The messages of stages that are ready when ``operation`` has run."""
    kind, stage = operation.kind, operation.stage
    if kind in (Kind.WEIGHT_GRAD, Kind.FILLER):
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


def round_times(schedule: Schedule) -> Callable[[Message], int]:
    """The logical time at which a message is issued."""
    times = logical_times(schedule)
    last = 1 + max(times.values(), default=0)
    return lambda message: last if message.consumer == STEP_END else times[message.producer]


def compile_communication(routes: Routes, schedule: Schedule) -> CommunicationPlan:
    """All messages of one step of ``schedule``, grouped into rounds by logical time."""
    time_of = round_times(schedule)
    rounds: dict[int, list[Message]] = {}
    of_stages = (m for line in schedule.order for op in line for m in messages_of(routes, op))
    for message in (*of_stages, *messages_of_slices(schedule)):
        rounds.setdefault(time_of(message), []).append(message)
    return CommunicationPlan(tuple(tuple(sorted(rounds[time])) for time in sorted(rounds)))
