"""The events of one device in one step: what the executor does, in order."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_pulse.planner.schedule.check.simulate import logical_times
from megatron_pulse.planner.schedule.message import STEP_END, Message
from megatron_pulse.planner.schedule.operations import Operation, Schedule
from megatron_pulse.planner.step.communication import CommunicationPlan, round_times


@dataclass(frozen=True)
class Issue:
    """Start these messages as one group: ``(is_send, message)`` in canonical order."""

    ops: tuple[tuple[bool, Message], ...]


@dataclass(frozen=True)
class Wait:
    """Wait until a message that was issued before has arrived."""

    message: Message


@dataclass(frozen=True)
class Run:
    """Run an operation."""

    operation: Operation


Event = Issue | Wait | Run


def compile_program(schedule: Schedule, plan: CommunicationPlan, device: int) -> tuple[Event, ...]:
    """What ``device`` does, event by event, in one step.

    Before an operation, the device issues every round of its own that is produced elsewhere
    earlier in logical time, so receives are posted before a long computation and transfers hide
    behind it; after it, the round that carries its results. By induction over logical time this
    cannot deadlock, and ``nccl_check`` proves it per plan. What is only read in the next step is
    waited for at the end.
    """
    times, time_of = logical_times(schedule), round_times(schedule)
    mine = [
        (time_of(round_[0]), issue)
        for round_ in plan.rounds
        if (issue := _issue(round_, device)).ops
    ]
    inputs: dict[Operation, list[Message]] = {}
    for message in plan.messages:
        if message.destination == device:
            inputs.setdefault(message.consumer, []).append(message)
    events: list[Event] = []
    issued = 0
    for operation in schedule.order[device]:
        while issued < len(mine) and mine[issued][0] < times[operation]:
            events.append(mine[issued][1])
            issued += 1
        events.extend(Wait(message) for message in inputs.get(operation, ()))
        events.append(Run(operation))
        while issued < len(mine) and mine[issued][0] == times[operation]:
            events.append(mine[issued][1])
            issued += 1
    events.extend(issue for _, issue in mine[issued:])
    events.extend(Wait(message) for message in inputs.get(STEP_END, ()))
    return tuple(events)


def _issue(round_: tuple[Message, ...], device: int) -> Issue:
    return Issue(
        tuple(
            (message.source == device, message)
            for message in round_
            if device in (message.source, message.destination)
        )
    )
