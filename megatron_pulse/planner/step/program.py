"""The events of one device in one step: what the executor does, in order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

from megatron_pulse.planner.schedule.message import STEP_END, Message
from megatron_pulse.planner.schedule.operations import Kind, Operation, Schedule
from megatron_pulse.planner.step.communication import CommunicationPlan


@dataclass(frozen=True)
class Send:
    """Start sending a message, whose producer has run; nothing waits here."""

    message: Message


@dataclass(frozen=True)
class Receive:
    """Have a buffer ready for a message; nothing waits here."""

    message: Message


@dataclass(frozen=True)
class Wait:
    """Wait until a message for which a buffer is ready has arrived.

    ``sent`` are messages of this device that have certainly arrived then: they are let go.
    """

    message: Message
    sent: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Release:
    """By the plan's times ``sent`` have arrived: where a wait holds up a stream, and not the host,
    the stream waits for them, for no time if they have, and they are let go."""

    sent: tuple[Message, ...]


@dataclass(frozen=True)
class Run:
    """Run an operation."""

    operation: Operation


AHEAD = 1
"""Operations by which a receive is posted before the one in which the plan has its message made."""


class Collective(Enum):
    """What all devices of the pipeline do together for replicated embedders."""

    REFRESH = "their parameters"
    RETURN = "their gradients"


@dataclass(frozen=True)
class Together:
    """Join all devices of the pipeline in a collective."""

    what: Collective


Event = Send | Receive | Wait | Release | Run | Together


def compile_program(
    schedule: Schedule, plan: CommunicationPlan, device: int, replicated: bool = False
) -> tuple[Event, ...]:
    """What ``device`` does, event by event, in one step; with ``replicated`` embedders.

    A receive is posted ``AHEAD`` operations before the one that runs, by the plan's times, when its
    message is made, if no send is before it in the order::

        device 0   [  F0:0  ][  F0:1  ] ...                  F0:0 sends at its end, a;
        device 1     R [ F1:.. ][ ...  ] W [ F1:0 ]          R an operation before a, W before F1:0

    so what is sent can travel while both ends compute, and does not wait for a device that lags
    behind these times. All devices issue their messages in the
    plan's order, and before a device waits for a message, by that order, it has issued all that
    came before it. Of the messages that have not arrived the first has therefore been issued at
    its destination, and its producer waits for none: nothing can wait for ever, not even where a
    device moves one message at a time (``nccl_check`` proves it for each plan).

    What was sent takes memory until it is let go: when a message of its destination proves that it
    was used, or, on a stream, an operation later than the plan has it there. Whoever waits for that
    needs the other end to have issued it, which it does before all that comes later by the plan.
    """
    order = schedule.order[device]
    before: list[list[Event]] = [[] for _ in range(len(order) + 1)]
    inputs: defaultdict[Operation, list[Message]] = defaultdict(list)
    passed: defaultdict[int, list[Message]] = defaultdict(list)
    mine = [m for m in plan.messages if device in (m.source, m.destination)]
    for message in mine:
        if message.destination == device:
            inputs[message.consumer].append(message)
        else:
            passed[plan.moments.let_go(device, message)].append(message)
    for message, place in zip(mine, _places(mine, plan, device), strict=True):
        before[place].append(Send(message) if message.source == device else Receive(message))
    waits = _Waits(schedule, plan, device)
    events: list[Event] = [Together(Collective.REFRESH)] if replicated else []
    for number, (issued, operation) in enumerate(zip(before, order, strict=False)):
        if left := tuple(m for m in passed[number] if m not in waits.proven):
            events.append(Release(left))
        events += issued
        events += (waits.wait(message) for message in inputs[operation])
        events.append(Run(operation))
    events += before[-1]
    events += (waits.wait(message) for message in inputs[STEP_END])
    if replicated and schedule.kinds != (Kind.FORWARD,):
        events.append(Together(Collective.RETURN))
    return tuple(events)


def _places(mine: Sequence[Message], plan: CommunicationPlan, device: int) -> list[int]:
    """Before which of its operations ``device`` issues its messages, in their order: what it sends
    when that is made; receives ``AHEAD``, or as what comes after them wants it, but behind sends
    that come before."""
    made = [plan.moments.place(device, plan.moments.made(message)) for message in mine]
    least = list(accumulate(reversed(made), min))
    places, reached = list[int](), 0
    for message, place, most in zip(mine, made, reversed(least), strict=True):
        if message.destination == device:
            place = max(reached, min(place - AHEAD, most))
        places.append(reached := place)
    return places


class _Waits:
    """What waits of a device let go: what its sender had before it made what has arrived."""

    def __init__(self, schedule: Schedule, plan: CommunicationPlan, device: int) -> None:
        self.at = {op: i for line in schedule.order for i, op in enumerate(line)}
        self.proven: set[Message] = set()
        self.kept: defaultdict[int, list[Message]] = defaultdict(list)
        for message in plan.messages:
            if message.source == device and message.consumer in self.at:
                self.kept[message.destination].append(message)

    def wait(self, message: Message) -> Wait:
        reached, kept = self.at[message.producer], self.kept[message.source]
        sent = tuple(m for m in kept if self.at[m.consumer] <= reached)
        self.kept[message.source] = [m for m in kept if self.at[m.consumer] > reached]
        self.proven.update(sent)
        return Wait(message, sent)
