"""Independent simulator of channels: times of a step's events, or the deadlock.

Nothing of it is the check's or the replay's: a program's events are played with times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from megatron_pulse.planner.layout.routes import Payload
from megatron_pulse.planner.program.device_program import (
    CollectiveEvent,
    Event,
    Receive,
    Release,
    Run,
    Send,
    Wait,
)
from megatron_pulse.planner.schedule.message import Message
from megatron_pulse.planner.schedule.operations import Operation, OpType


class Rule(Enum):
    """Condition of a message beyond its two ends."""

    FREE = "nothing: it travels when it is made"
    LINK = "the message before it to the same device"
    APART = "that, and its receive"
    ONE = "what its devices issued before it"


@dataclass
class Step:
    """Seconds of a step; ``makespan`` is None where it hangs."""

    makespan: float | None = None
    start: dict[Operation, float] = field(default_factory=dict)
    sent: dict[Message, float] = field(default_factory=dict)
    arrival: dict[Message, float] = field(default_factory=dict)


def without_releases(program: Sequence[Event]) -> list[Event]:
    """Simulation without waits for sent messages."""
    return [event for event in program if not isinstance(event, Release)]


def held_bytes(program: Sequence[Event], size: Callable[[Message], float]) -> float:
    """The most that buffers of messages take at one time on a device whose waits hold up a stream:
    posted receives until they are taken, and what was sent until it is let go. Skips that were sent
    count for nothing: their stage keeps them for its backward."""
    held, most, sent = 0.0, 0.0, dict[Message, float]()
    for event in program:
        match event:
            case Send(message):
                is_kept = (
                    message.payload is Payload.SKIP and message.producer.kind is OpType.FORWARD
                )
                sent[message] = 0.0 if is_kept else size(message)
                held += sent[message]
            case Receive(message):
                held += size(message)
            case Wait(message, gone):
                held -= size(message) + sum(sent.pop(m, 0.0) for m in gone)
            case Release(gone):
                held -= sum(sent.pop(m, 0.0) for m in gone)
        most = max(most, held)
    return most


def play(
    programs: Sequence[Sequence[Event]],
    operation_s: Callable[[Operation], float],
    message_s: Callable[[Message], float],
    rule: Rule,
) -> Step:
    """Play ``programs``, one for each device. A transfer begins when both of its ends have issued
    it (``FREE``, ``LINK``: when it is sent), and what the device did before has ended; by ``ONE`` a
    collective too."""
    step = Step()
    now = [0.0] * len(programs)
    at = [0] * len(programs)
    issued: dict[tuple[Message, bool], float] = {}
    under_way: dict[Message, None] = {}
    last: dict[object, Message] = {}
    before: dict[tuple[Message, bool], Message | None] = {}

    def way(message: Message, sends: bool) -> object:
        end = message.source if sends else message.destination
        return end if rule is Rule.ONE else (message.source, message.destination, sends)

    def behind(message: Message, sends: bool) -> float | None:
        """Time from which the channel is free at one end of a message; None if unknown yet."""
        other = None if rule is Rule.FREE else before[message, sends]
        return 0.0 if other is None else step.arrival.get(other)

    def transfer() -> bool:
        moved = False
        for message in list(under_way):
            ends = (True,) if rule in (Rule.FREE, Rule.LINK) else (True, False)
            times = [issued.get((message, end)) for end in ends]
            if None not in times:
                times += [behind(message, end) for end in ends]
            if None in times:
                continue
            step.arrival[message] = max(t for t in times if t is not None) + message_s(message)
            del under_way[message]
            moved = True
        return moved

    def advance(device: int) -> bool:
        moved = False
        events = programs[device]
        while at[device] < len(events):
            match events[at[device]]:
                case Run(operation):
                    step.start[operation] = now[device]
                    now[device] += operation_s(operation)
                case Send(message) | Receive(message):
                    sends = isinstance(events[at[device]], Send)
                    issued[message, sends] = now[device]
                    if sends:
                        step.sent[message] = now[device]
                        under_way[message] = None
                    before[message, sends] = last.get(way(message, sends))
                    last[way(message, sends)] = message
                case Wait(message):
                    if message not in step.arrival:
                        break
                    now[device] = max(now[device], step.arrival[message])
                case Release(sent):
                    if any(message not in step.arrival for message in sent):
                        break
                    now[device] = max(now[device], *(step.arrival[m] for m in sent))
                case CollectiveEvent():
                    break
            at[device] += 1
            moved = True
        return moved

    def meet() -> bool:
        heads = {
            events[i] if i < len(events) else None for events, i in zip(programs, at, strict=True)
        }
        if len(heads) > 1 or not isinstance(next(iter(heads)), CollectiveEvent):
            return False
        if rule is Rule.ONE and any(message not in step.arrival for message, _ in issued):
            return False
        for device in range(len(programs)):
            now[device] = max(now)
            at[device] += 1
        return True

    while any([*map(advance, range(len(programs))), transfer(), meet()]):
        pass
    sent = all(message in step.arrival for message, _ in issued)
    if sent and all(i == len(events) for events, i in zip(programs, at, strict=True)):
        step.makespan = max(now, default=0.0)
    return step
