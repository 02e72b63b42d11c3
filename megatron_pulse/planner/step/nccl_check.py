"""Static check of communication under NCCL's rules, before any process starts.

The rules: messages carry no tags, so the n-th send of a pair and direction meets the n-th receive
(first in, first out); a device starts its groups in order, and the next one only after the last
has finished; a group finishes when every one of its operations has met its peer, and two
operations meet only while both their groups are started.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from megatron_pulse.planner.schedule.message import STEP_END, Message
from megatron_pulse.planner.schedule.operations import Operation
from megatron_pulse.planner.step.program import Event, Issue, Run, Wait

type Slot = tuple[int, int, int]
"""The n-th message of a channel: (source, destination, n)."""


def check_events(events: Sequence[Sequence[Event]]) -> list[str]:
    """Faults of programs; ``events[d]`` is what device d does, in order.

    ``Issue`` starts a group and does not block, ``Wait`` blocks until the message's group has
    finished, ``Run`` takes no time. Besides NCCL's rules: a send is issued only after its producer
    ran, and an operation runs only after its messages were waited for.
    """
    machine = _Machine(events)
    return [*_causality_faults(events), *machine.check()]


def _causality_faults(events: Sequence[Sequence[Event]]) -> list[str]:
    faults = []
    inputs: dict[tuple[int, Operation], list[Message]] = defaultdict(list)
    for device, mine in enumerate(events):
        for event in mine:
            for is_send, message in event.ops if isinstance(event, Issue) else ():
                if not is_send:
                    inputs[device, message.consumer].append(message)
                named = message.source if is_send else message.destination
                if named != device:
                    role = "sends" if is_send else "receives"
                    faults.append(f"device {device} {role} {message}, which is not its own")
    for device, mine in enumerate(events):
        ran: set[Operation] = set()
        waited: set[Message] = set()
        issued: set[Message] = set()
        for event in mine:
            match event:
                case Issue(ops):
                    issued.update(message for _, message in ops)
                    faults.extend(
                        f"device {device} sends {message} before {message.producer} ran"
                        for is_send, message in ops
                        if is_send and message.producer not in ran
                    )
                case Wait(message):
                    waited.add(message)
                    if message not in issued:
                        faults.append(f"device {device} waits for {message} before issuing it")
                case Run(operation):
                    ran.add(operation)
                    faults.extend(
                        f"device {device} runs {operation} without waiting for {message}"
                        for message in inputs[device, operation]
                        if message not in waited
                    )
        faults.extend(
            f"device {device} ends its step without waiting for {message}"
            for message in inputs[device, STEP_END]
            if message not in waited
        )
    return faults


class _Machine:
    """Runs the programs of all devices under NCCL's rules until nothing moves."""

    def __init__(self, events: Sequence[Sequence[Event]]) -> None:
        self.events = [list(mine) for mine in events]
        self.at = [0] * len(self.events)
        self.queue: list[list[dict[tuple[bool, Slot], Message]]] = [[] for _ in self.events]
        self.finished: list[set[Message]] = [set() for _ in self.events]
        self.ends: list[dict[tuple[bool, Slot], Message]] = [{} for _ in self.events]
        self.count: Counter[tuple[int, bool, int]] = Counter()
        self.groups = [
            {i: self._slots(d, event) for i, event in enumerate(mine) if isinstance(event, Issue)}
            for d, mine in enumerate(self.events)
        ]

    def _slots(self, device: int, issue: Issue) -> dict[tuple[bool, Slot], Message]:
        """Positions in their channels of a group's operations, by program order."""
        slots = {}
        for is_send, message in issue.ops:
            peer = message.destination if is_send else message.source
            n = self.count[device, is_send, peer]
            self.count[device, is_send, peer] += 1
            slot = (device, peer, n) if is_send else (peer, device, n)
            slots[is_send, slot] = message
        self.ends[device].update(slots)
        return slots

    def check(self) -> list[str]:
        while self._advance() | self._match():
            pass
        return [*self._fifo_faults(), *self._stuck_faults()]

    def _advance(self) -> bool:
        """Let every device go on to the next event that blocks it."""
        moved = False
        for device, mine in enumerate(self.events):
            while self.at[device] < len(mine):
                event = mine[self.at[device]]
                if isinstance(event, Wait) and event.message not in self.finished[device]:
                    break
                if isinstance(event, Issue):
                    self.queue[device].append(dict(self.groups[device][self.at[device]]))
                self.at[device] += 1
                moved = True
        return moved

    def _match(self) -> bool:
        """Let the operations at the heads of the queues meet, and finished groups leave."""
        moved = False
        for device, queue in enumerate(self.queue):
            for is_send, slot in list(queue[0]) if queue else ():
                peer = slot[1] if is_send else slot[0]
                head = (
                    self.queue[peer][0] if 0 <= peer < len(self.queue) and self.queue[peer] else {}
                )
                if (not is_send, slot) in head and peer != device:
                    del queue[0][is_send, slot], head[not is_send, slot]
                    moved = True
        for device, queue in enumerate(self.queue):
            while queue and not queue[0]:
                queue.pop(0)
                self._finish(device)
                moved = True
        return moved

    def _finish(self, device: int) -> None:
        """Mark the messages of the device's earliest unfinished group as arrived."""
        first = next(iter(self.groups[device]))
        self.finished[device].update(self.groups[device].pop(first).values())

    def _fifo_faults(self) -> list[str]:
        faults = []
        for device, ends in enumerate(self.ends):
            for (is_send, slot), message in ends.items():
                source, destination, n = slot
                peer = destination if is_send else source
                others = self.ends[peer] if 0 <= peer < len(self.ends) else {}
                other = others.get((not is_send, slot))
                verb = "sends" if is_send else "receives"
                if other is None:
                    missing = "receives" if is_send else "sends"
                    faults.append(
                        f"device {device} {verb} {message}, but device {peer} never {missing} a "
                        f"message number {n} from device {source} to device {destination}"
                    )
                elif is_send and other != message:
                    faults.append(
                        f"first in, first out mismatch: message number {n} from device {source} "
                        f"to device {destination} is sent as {message}, received as {other}"
                    )
        return faults

    def _stuck_faults(self) -> list[str]:
        lines = []
        for device, queue in enumerate(self.queue):
            if self.at[device] < len(self.events[device]):
                event = self.events[device][self.at[device]]
                if isinstance(event, Wait):
                    lines.append(f"device {device} waits for {event.message}")
            if queue:
                ops = ", ".join(
                    f"{'send' if is_send else 'receive'} of {message}"
                    for (is_send, _), message in queue[0].items()
                )
                lines.append(f"device {device} has an unfinished group: {ops}")
        return ["deadlock: " + "; ".join(lines)] if lines else []
