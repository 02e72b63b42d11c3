"""When everything of a step happens where messages share links: what a run will take.

``simulate`` lets every message travel at once, which is what a schedule is made for. Here a device
sends one message at a time and receives one at a time, in the order in which they are ready; skips
that travel take their turn among the boundaries. Slow links then limit a step as computing does.
Between two devices messages keep their order, as on a channel. That receives are posted costs
nothing where times are as planned (``tests/benchmarks/waiting.py``), and is not played.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.cluster.link import Link
from megatron_pulse.planner.layout.crossing import Crossing, crossings
from megatron_pulse.planner.layout.placement import Partition, Placement
from megatron_pulse.planner.schedule.check.simulate import (
    DeadlockError,
    Timeline,
    dependency,
    duration_of,
)
from megatron_pulse.planner.schedule.operations import Kind, Operation, Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem


@dataclass(frozen=True)
class Edge:
    """What a forward of stage ``source`` sends to stage ``destination`` on another device.

    The gradient goes back where it ``wants`` one; each message takes ``seconds``.
    """

    source: int
    destination: int
    seconds: float
    wants: bool = True


@dataclass(frozen=True)
class Transfer:
    """A message on its way from device ``source`` to ``destination``, for ``consumer``."""

    source: int
    destination: int
    consumer: Operation
    start: float
    end: float


@dataclass(frozen=True)
class Replay:
    """When operations run and messages travel, and how long each device is sending."""

    timeline: Timeline
    sending_s: tuple[float, ...]
    transfers: tuple[Transfer, ...]


def edges_of(
    costs: ChainCosts, partition: Partition, link: Callable[[int, int], Link]
) -> tuple[Edge, ...]:
    """What ``partition`` sends; ``link(d, e)`` joins two devices.

    For relayed skips give ``relayed(costs)``.
    """
    return edges_along(crossings(costs, partition), partition.placement, link)


def edges_along(
    crossed: Iterable[Crossing], placement: Placement, link: Callable[[int, int], Link]
) -> tuple[Edge, ...]:
    """The messages of what crosses between stages."""
    home = placement.device_of_stage
    return tuple(
        Edge(
            c.source,
            c.destination,
            link(home[c.source], home[c.destination]).time_s(c.num_bytes),
            c.wants,
        )
        for c in crossed
        if c.num_bytes and not c.merged
    )


def lags(edges: Sequence[Edge], num_stages: int) -> tuple[float, ...]:
    """Seconds from every stage to the next, as a ``ScheduleProblem`` has them: of all messages."""
    known: defaultdict[tuple[int, int], float] = defaultdict(float)
    for edge in edges:
        known[edge.source, edge.destination] += edge.seconds
    return tuple(known[s, s + 1] for s in range(num_stages - 1))


def link_bound(problem: ScheduleProblem, edges: Sequence[Edge]) -> float:
    """No step is shorter: the longest that one device must send, or receive."""
    home = problem.placement.device_of_stage
    sends, receives = ([0.0] * problem.placement.num_devices for _ in range(2))
    for edge in edges:
        there, back = home[edge.source], home[edge.destination]
        for source, destination in ((there, back), (back, there))[: 1 + edge.wants]:
            sends[source] += edge.seconds
            receives[destination] += edge.seconds
    return problem.num_microbatches * max(*sends, *receives)


def replay(problem: ScheduleProblem, schedule: Schedule, edges: Sequence[Edge]) -> Replay:
    """Run ``schedule`` with ``problem``'s durations and these messages (not its link times).

    Fillers take the times that the schedule gives; what they send to each other takes its lag and
    holds up nothing. Raises DeadlockError when devices wait for
    each other.
    """
    return _Run(problem, schedule, edges).run()


@dataclass(frozen=True, eq=False)
class _Message:
    number: int  # as they are ready
    source: int
    destination: int
    consumer: Operation
    seconds: float


class _Run:
    def __init__(self, problem: ScheduleProblem, schedule: Schedule, edges: Sequence[Edge]) -> None:
        self.schedule = schedule
        self.home = problem.placement.device_of_stage
        self.duration = duration_of(problem, schedule)
        self.device_of = {op: d for d, order in enumerate(schedule.order) for op in order}
        self.forward: dict[int, list[Edge]] = {}
        self.backward: dict[int, list[Edge]] = {}
        for edge in edges:
            self.forward.setdefault(edge.source, []).append(edge)
            if edge.wants:
                self.backward.setdefault(edge.destination, []).append(edge)
        self.gradients = Counter(edge.source for edge in edges if edge.wants)
        self.linked = {(edge.source, edge.destination) for edge in edges}
        self.received = Counter(edge.destination for edge in edges)
        devices = range(problem.placement.num_devices)
        self.position = [0 for _ in devices]
        self.computing = [False for _ in devices]
        self.sending = [False for _ in devices]
        self.receiving = [False for _ in devices]
        self.queue: list[list[_Message]] = [[] for _ in devices]
        self.made = 0
        self.sending_s = [0.0 for _ in devices]
        self.transfers: list[Transfer] = []
        self.start: dict[Operation, float] = {}
        self.end: dict[Operation, float] = {}
        self.awaited = {op: self._inputs(op) for order in schedule.order for op in order}
        self.events: list[tuple[float, int, Operation | _Message | int]] = []
        self.count = 0

    def _inputs(self, op: Operation) -> int:
        """How many messages ``op`` waits for; results on its own device are waited for apart."""
        if op.kind is Kind.FORWARD:
            return self.received[op.stage]
        if not op.kind.passes:
            return 0
        return self.gradients[op.stage]

    def run(self) -> Replay:
        for device in range(len(self.position)):
            self._advance(device, 0.0)
        while self.events:
            now, _, event = heapq.heappop(self.events)
            if isinstance(event, int):
                self._advance(event, now)
            elif isinstance(event, _Message):
                self._arrive(event, now)
            else:
                self._finish(event, now)
        left = [
            f"device {d} is at {order[p]}"
            for d, (order, p) in enumerate(zip(self.schedule.order, self.position, strict=True))
            if p < len(order)
        ]
        if left:
            raise DeadlockError(f"{self.schedule.name}: deadlock: {'; '.join(left)}")
        makespan = max(self.end.values(), default=0.0)
        busy = tuple(sum(map(self.duration, order)) for order in self.schedule.order)
        bubble = tuple(makespan - b for b in busy)
        timeline = Timeline(self.schedule, self.start, self.end, makespan, busy, bubble)
        return Replay(timeline, tuple(self.sending_s), tuple(self.transfers))

    def _push(self, time: float, event: Operation | _Message | int) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, event))

    def _advance(self, device: int, now: float) -> None:
        """Start the device's next operation if it is free and the inputs are there."""
        order = self.schedule.order[device]
        if self.computing[device] or self.position[device] == len(order):
            return
        op = order[self.position[device]]
        if self.awaited[op]:
            return
        if op.kind is Kind.FILLER:
            slices = list(self.schedule.slices_before(op))
            if any(source not in self.end for source, _ in slices):
                return
            ready = max((self.end[source] + lag for source, lag in slices), default=now)
            if ready > now:
                self._push(ready, device)
                return
        needed = dependency(op, self.schedule.placement)
        if needed is not None and self.home[needed.stage] == device and needed not in self.end:
            return
        if needed is not None and self.home[needed.stage] != device:
            low, high = sorted((needed.stage, op.stage))
            if (low, high) not in self.linked and needed not in self.end:
                return  # nothing to send between the two, but the one must have run
        self.computing[device] = True
        self.start[op] = now
        self._push(now + self.duration(op), op)

    def _finish(self, op: Operation, now: float) -> None:
        device = self.device_of[op]
        self.end[op] = now
        self.computing[device] = False
        self.position[device] += 1
        if op.kind is Kind.FORWARD:
            sent = [(e.destination, e.seconds) for e in self.forward.get(op.stage, ())]
        elif not op.kind.passes:
            sent = []
        else:
            sent = [(e.source, e.seconds) for e in self.backward.get(op.stage, ())]
        for stage, seconds in sent:
            consumer = Operation(op.kind, stage, op.microbatch)
            self.made += 1
            message = _Message(self.made, device, self.home[stage], consumer, seconds)
            self.queue[device].append(message)
        if self.queue[device] and (first := self._next(device)) is not None:
            self._send(first, now)
        self._advance(device, now)
        if op.kind is Kind.FILLER:
            for other in range(len(self.position)):
                self._advance(other, now)
        placement = self.schedule.placement
        if op.kind is Kind.FORWARD:
            following = placement.after[op.stage]
        elif not op.kind.passes:
            return
        else:
            following = placement.before[op.stage]
        if following is not None and self.home[following] != device:
            self._advance(self.home[following], now)  # where nothing travels between the two

    def _next(self, device: int) -> _Message | None:
        """The first message of the device's queue that can begin."""
        if not self.sending[device]:
            for message in self.queue[device]:
                if not self.receiving[message.destination]:
                    return message
        return None

    def _send(self, message: _Message, now: float) -> None:
        device = message.source
        self.queue[device].remove(message)
        self.sending[device] = self.receiving[message.destination] = True
        self.sending_s[device] += message.seconds
        arrival = now + message.seconds
        self._push(arrival, message)
        self.transfers.append(Transfer(device, message.destination, message.consumer, now, arrival))

    def _arrive(self, message: _Message, now: float) -> None:
        self.sending[message.source] = self.receiving[message.destination] = False
        self.awaited[message.consumer] -= 1
        devices = range(len(self.queue))
        while able := [first for d in devices if self.queue[d] and (first := self._next(d))]:
            self._send(min(able, key=lambda each: each.number), now)
        self._advance(message.destination, now)
