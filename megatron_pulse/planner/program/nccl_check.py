"""Static check of communication under NCCL's rules, before any process starts.

Each ordered pair of devices has a channel, a communicator of its own. Messages carry no tags, so
the n-th send of a channel meets the n-th receive. A transfer begins when both ends have issued it,
earlier computation of the device has ended, and the channel is free.

NCCL requires that all devices issue the operations of concurrent communicators in one total order.
Kernels can share a hardware queue, and then the first kernel that waits for its peer holds up the
others. The check therefore lets each device move one message at a time, in issue order, whichever
channel the message takes::

    device 0: send on 0>1, then receive on 2>0       device 1: receive on 0>1 ...      passes
    device 2: receive on 1>2, then send on 2>0       device 1: ... send on 1>2 first   refused:
                                                     0 waits for 1, 1 for 2, 2 for 0

A program that completes here also completes with independent channels, which only remove waits.
Before two peers are connected, their first operation on a channel also blocks the host until the
other host arrives (``connected``). Collectives of the pipeline's devices have a place in the order.

Collectives of data-parallel replicas need no check. Replicas run the same programs, so each state
that one replica reaches, all reach, and all replicas issue the same next collective.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from megatron_pulse.planner.program.device_program import (
    CollectiveEvent,
    Event,
    Receive,
    Release,
    Run,
    Send,
    Wait,
)
from megatron_pulse.planner.schedule.message import STEP_END, Message
from megatron_pulse.planner.schedule.operations import Operation

type Channel = tuple[int, int]
"""(source, destination)"""


def check_events(events: Sequence[Sequence[Event]], connected: bool = True) -> list[str]:
    """Return the faults of programs; ``events[d]`` are the events of device d, in order.

    ``Send`` and ``Receive`` do not block; ``Wait``, ``Release`` and ``CollectiveEvent`` do; ``Run``
    takes no time. Two rules beside NCCL's: a send is issued only after its producer ran, and an
    operation runs only after the device waited for its messages. Unless peers are ``connected``,
    channels connect at their first use.
    """
    machine = _Machine(events, connected)
    return [*_causality_faults(events), *_channel_faults(events), *machine.check()]


def _causality_faults(events: Sequence[Sequence[Event]]) -> list[str]:
    faults = []
    for device, mine in enumerate(events):
        inputs: defaultdict[Operation, list[Message]] = defaultdict(list)
        for event in mine:
            if isinstance(event, Receive):
                inputs[event.message.consumer].append(event.message)
            if isinstance(event, Send | Receive) and device != _own_end(event):
                role = "sends" if isinstance(event, Send) else "receives"
                faults.append(f"device {device} {role} {event.message}, which is not its own")
        ran: set[Operation] = set()
        waited: set[Message] = set()
        issued: set[Message] = set()
        sent: set[Message] = set()
        for event in mine:
            match event:
                case Send(message):
                    sent.add(message)
                    if message.producer not in ran:
                        faults.append(
                            f"device {device} sends {message} before {message.producer} ran"
                        )
                case Receive(message):
                    issued.add(message)
                case Wait(message, lets_go):
                    waited.add(message)
                    if message not in issued:
                        faults.append(f"device {device} waits for {message} before issuing it")
                    faults.extend(
                        f"device {device} lets {early} go before sending it"
                        for early in lets_go
                        if early not in sent
                    )
                case Release(lets_go):
                    faults.extend(
                        f"device {device} lets {early} go before sending it"
                        for early in lets_go
                        if early not in sent
                    )
                case Run(operation):
                    ran.add(operation)
                    faults.extend(
                        f"device {device} runs {operation} without waiting for {message}"
                        for message in inputs[operation]
                        if message not in waited
                    )
        faults.extend(
            f"device {device} ends its step without waiting for {message}"
            for message in inputs[STEP_END]
            if message not in waited
        )
    return faults


def _own_end(event: Send | Receive) -> int:
    return event.message.source if isinstance(event, Send) else event.message.destination


def _channel_faults(events: Sequence[Sequence[Event]]) -> list[str]:
    sent: defaultdict[Channel, list[Message]] = defaultdict(list)
    received: defaultdict[Channel, list[Message]] = defaultdict(list)
    for device, mine in enumerate(events):
        for event in mine:
            if isinstance(event, Send) and event.message.source == device:
                sent[_channel(event.message)].append(event.message)
            elif isinstance(event, Receive) and event.message.destination == device:
                received[_channel(event.message)].append(event.message)
    faults = []
    for channel in sorted(sent.keys() | received.keys()):
        source, destination = channel
        there, here = sent[channel], received[channel]
        way = f"from device {source} to device {destination}"
        faults += [
            f"first in, first out mismatch: message number {n} {way} is sent as {a}, received as "
            f"{b}"
            for n, (a, b) in enumerate(zip(there, here, strict=False))
            if a != b
        ]
        both = min(len(there), len(here))
        faults += [
            f"device {source} sends {message}, but device {destination} never receives a message "
            f"number {n} {way}"
            for n, message in enumerate(there[both:], both)
        ]
        faults += [
            f"device {destination} receives {message}, but device {source} never sends a message "
            f"number {n} {way}"
            for n, message in enumerate(here[both:], both)
        ]
    return faults


def _channel(message: Message) -> Channel:
    return message.source, message.destination


type _Issued = tuple[bool, Channel, int, Message] | CollectiveEvent
"""An issued message (is a send, channel, number on its channel, message) or an issued
collective."""


class _Machine:
    """Interpreter of all devices' programs; each device moves one message at a time."""

    def __init__(self, events: Sequence[Sequence[Event]], connected: bool) -> None:
        self.events = [list(mine) for mine in events]
        self.at = [0] * len(self.events)
        self.queue: list[list[_Issued]] = [[] for _ in self.events]
        self.arrived: list[set[Message]] = [set() for _ in self.events]
        self.count: Counter[tuple[bool, Channel]] = Counter()
        self.met = {
            _channel(event.message)
            for mine in (self.events if connected else ())
            for event in mine
            if isinstance(event, Send | Receive)
        }

    def check(self) -> list[str]:
        while self._advance() | self._move():
            pass
        return self._stuck_faults()

    def _advance(self) -> bool:
        """Let every device go on to its next blocking event."""
        moved = False
        for device, mine in enumerate(self.events):
            while self.at[device] < len(mine) and self._passes(device, mine[self.at[device]]):
                self.at[device] += 1
                moved = True
        return moved

    def _passes(self, device: int, event: Event) -> bool:
        match event:
            case Wait(message):
                return message in self.arrived[device]
            case Release(sent):
                return all(message in self.arrived[message.destination] for message in sent)
            case CollectiveEvent():
                if event not in self.queue[device]:
                    self.queue[device].append(event)
                return False  # until all devices have moved past it
            case Send(message) | Receive(message):
                channel, sends = _channel(message), isinstance(event, Send)
                if not self._meets(device, channel):
                    return False
                number = self.count[sends, channel]
                self.count[sends, channel] += 1
                self.queue[device].append((sends, channel, number, message))
        return True

    def _meets(self, device: int, channel: Channel) -> bool:
        if channel not in self.met and all(self._is_at(end, channel) for end in channel):
            self.met.add(channel)
        return channel in self.met

    def _is_at(self, device: int, channel: Channel) -> bool:
        at = self.at[device]
        event = self.events[device][at] if at < len(self.events[device]) else None
        return isinstance(event, Send | Receive) and _channel(event.message) == channel

    def _move(self) -> bool:
        """Deliver messages that both ends have reached; end collectives that all devices have
        reached."""
        moved = False
        for device, queue in enumerate(self.queue):
            if not queue:
                continue
            if isinstance(head := queue[0], CollectiveEvent):
                if all(other and other[0] == head for other in self.queue):
                    for number, other in enumerate(self.queue):
                        other.pop(0)
                        self.at[number] += 1
                    moved = True
                continue
            sends, channel, number, _ = head
            peer = channel[1] if sends else channel[0]
            theirs = self.queue[peer] if 0 <= peer < len(self.queue) and peer != device else []
            if not theirs or isinstance(met := theirs[0], CollectiveEvent):
                continue
            if met[:3] == (not sends, channel, number):
                queue.pop(0)
                theirs.pop(0)
                source, destination = channel
                self.arrived[destination].add(met[3] if sends else head[3])
                moved = True
        return moved

    def _stuck_faults(self) -> list[str]:
        lines = []
        for device, queue in enumerate(self.queue):
            if self.at[device] < len(self.events[device]):
                match self.events[device][self.at[device]]:
                    case Wait(message):
                        lines.append(f"device {device} waits for {message}")
                    case Release(sent):
                        told = " and ".join(map(str, sent))
                        lines.append(f"device {device} waits until {told} arrived")
                    case CollectiveEvent(what):
                        lines.append(f"device {device} is at the collective of {what.value}")
                    case Send(message) | Receive(message):
                        lines.append(f"device {device} connects for {message}")
            if queue and not isinstance(head := queue[0], CollectiveEvent):
                lines.append(
                    f"device {device} is at the {'send' if head[0] else 'receive'} of {head[3]}"
                )
        return ["deadlock: " + "; ".join(lines)] if lines else []
