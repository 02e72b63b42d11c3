"""What travels between devices, and in which order, compiled from a partition and a schedule.

Every device compiles the same plan, so both ends of a message know when it is sent, and shapes
never travel. A *round* is the set of messages produced at one logical time; every device issues
its rounds in order, and within a round its messages in canonical order. That is what NCCL needs
(no tags; first in, first out per pair and direction) and what gloo accepts.

What stages give to others is in ``layout/routes``: a message is what goes to another device.
Where backwards are split, input gradients I take the place of B; weight gradients W stay at home.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_pulse.planner.layout.routes import Routes
from megatron_pulse.planner.schedule.check.simulate import logical_times
from megatron_pulse.planner.schedule.message import Message
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
    """The messages that are ready when ``operation`` has run."""
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


def compile_communication(routes: Routes, schedule: Schedule) -> CommunicationPlan:
    """All messages of one step of ``schedule``, grouped into rounds by logical time."""
    times = logical_times(schedule)
    rounds: dict[int, list[Message]] = {}
    for operation, time in times.items():
        for message in messages_of(routes, operation):
            rounds.setdefault(time, []).append(message)
    return CommunicationPlan(tuple(tuple(sorted(rounds[time])) for time in sorted(rounds)))
