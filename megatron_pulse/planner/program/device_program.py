"""Program of one device in one step: the events that the executor carries out, in order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

from megatron_pulse.planner.program.communication import CommunicationPlan
from megatron_pulse.planner.schedule.message import STEP_END, Message
from megatron_pulse.planner.schedule.operations import Operation, OpType, Schedule


@dataclass(frozen=True)
class Send:
    """Start sending a message whose producer has run. Does not block."""

    message: Message


@dataclass(frozen=True)
class Receive:
    """Post the receive of a message. Does not block."""

    message: Message


@dataclass(frozen=True)
class Wait:
    """Wait for the arrival of a message whose receive was posted.

    ``sent`` are messages of this device that have certainly arrived by then; their buffers are
    freed.
    """

    message: Message
    sent: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Release:
    """Free the buffers of ``sent``, which have arrived by the plan's times.

    Where waits block a stream and not the host, the stream first waits for these messages. The wait
    takes no time if they have arrived.
    """

    sent: tuple[Message, ...]


@dataclass(frozen=True)
class Run:
    """Run an operation."""

    operation: Operation


AHEAD = 1
"""Number of operations by which a receive is posted before the operation at whose time the message
is produced."""


class EmbedderCollective(Enum):
    """Collective of all devices of the pipeline for replicated embedders."""

    REFRESH = "their parameters"
    RETURN = "their gradients"


@dataclass(frozen=True)
class CollectiveEvent:
    """Join all devices of the pipeline in a collective."""

    what: EmbedderCollective


Event = Send | Receive | Wait | Release | Run | CollectiveEvent


def compile_program(
    schedule: Schedule, plan: CommunicationPlan, device: int, replicated: bool = False
) -> tuple[Event, ...]:
    """Compile the events of ``device`` for one step; ``replicated``: there are replicated
    embedders.

    By the plan's times some operation runs when a message is produced. The receive is posted
    ``AHEAD`` operations before that operation, unless a send comes before it in the order::

        device 0   [  F0:0  ][  F0:1  ] ...                  F0:0 sends at its end, a;
        device 1     R [ F1:.. ][ ...  ] W [ F1:0 ]          R an operation before a, W before F1:0

    Messages can therefore travel while both ends compute, and do not wait for a device that lags
    behind the plan.

    All devices issue their messages in the plan's order. Before a device waits for a message, it
    has issued all earlier messages of the order. So the first message that has not arrived has been
    issued at its destination, and its producer waits for none: there is no deadlock. The argument
    holds even where a device moves one message at a time, and ``nccl_check`` proves it for each
    plan.

    A sent message takes memory until its buffer is freed. The buffer is freed when a later message
    of the destination proves its use, or, on a stream, one operation after the planned arrival. The
    wait for an arrival needs the other end to have issued the receive. The other end issues it
    before all messages that come later in the plan's order.
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
    events: list[Event] = [CollectiveEvent(EmbedderCollective.REFRESH)] if replicated else []
    for number, (issued, operation) in enumerate(zip(before, order, strict=False)):
        if left := tuple(m for m in passed[number] if m not in waits.proven):
            events.append(Release(left))
        events += issued
        events += (waits.wait(message) for message in inputs[operation])
        events.append(Run(operation))
    events += before[-1]
    events += (waits.wait(message) for message in inputs[STEP_END])
    if replicated and schedule.kinds != (OpType.FORWARD,):
        events.append(CollectiveEvent(EmbedderCollective.RETURN))
    return tuple(events)


def _places(mine: Sequence[Message], plan: CommunicationPlan, device: int) -> list[int]:
    """Positions of the operations before which ``device`` issues its messages, in the messages'
    order.

    A send is issued when its message is produced. A receive is issued ``AHEAD`` operations earlier,
    or as early as later messages require, but not before earlier sends.
    """
    made = [plan.moments.place(device, plan.moments.made(message)) for message in mine]
    least = list(accumulate(reversed(made), min))
    places, reached = list[int](), 0
    for message, place, most in zip(mine, made, reversed(least), strict=True):
        if message.destination == device:
            place = max(reached, min(place - AHEAD, most))
        places.append(reached := place)
    return places


class _Waits:
    """Buffers that a wait frees: messages consumed before the sender produced the arrived
    message."""

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
