"""Times of a step's operations and messages in a simulation that every device can repeat."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_pulse.planner.layout.routes import Payload
from megatron_pulse.planner.schedule.check.simulate import StepSimulator, logical_times
from megatron_pulse.planner.schedule.message import STEP_END, Message
from megatron_pulse.planner.schedule.operations import Operation, OpType, Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem

type Moment = tuple[float, int]
"""A simulated time, and a tie-breaker: the logical slot of the operation."""

_LAST: Moment = (float("inf"), 0)

_LATE = 1
"""Number of operations by which a message may be late before its sender waits for it."""


@dataclass(frozen=True)
class MessageTimes:
    """Start and end of each operation of ``schedule``, and arrival of each message.

    An operation that depends on another, or follows it on its device, starts strictly later than
    the other ends, even if it takes no time: ``end[a] < start[b]``.
    """

    schedule: Schedule
    start: dict[Operation, Moment]
    end: dict[Operation, Moment]
    arrival: dict[Message, Moment]

    def made(self, message: Message) -> Moment:
        """Time at which ``message`` is ready to be sent.

        Results of bubble tasks for the next step come last, because nothing waits for them.
        """
        if message.payload is Payload.ENCODED and message.consumer == STEP_END:
            return _LAST
        return self.end[message.producer]

    def needed(self, message: Message) -> Moment:
        """Start of the consumer of ``message``."""
        return self.start.get(message.consumer, _LAST)

    def turns(self, messages: Iterable[Message]) -> dict[Message, Moment]:
        """Compute the issue time of each message, by which all messages have one total order.

        A message is issued when it is ``made``, or later if it has slack. Its slack is limited by
        its own deadline and by the deadlines of later messages on its channel. It is at most one
        operation, and a message never comes after a later message of its device. All messages are
        issued before they are ``needed``.

        Messages without slack therefore go first, and their receives need not wait for a send::

            device 0     [  F0:7  ]s              [  I0:3  ]     s may arrive when F1:7 begins
            device 1        [  I1:3  ]g [  W1:2  ][  F1:7  ]     g is needed at once

        By production times s comes before g, so device 0 would post the receive of g behind s. With
        slack g comes first, and its receive is posted before F0:7.
        """
        found: dict[Message, Moment] = {}
        sent_next: dict[int, Moment] = {}
        behind: dict[tuple[int, int], tuple[Message, float]] = {}
        for message in reversed(sorted(messages, key=self._planned)):
            made, arrived = self._travels(message)
            way, latest = (message.source, message.destination), self.needed(message)[0]
            if way in behind:  # a delay of this message delays the later one on its channel
                other, its_latest = behind[way]
                other_made, other_arrived = self._travels(other)
                took = other_arrived[0] - max(other_made[0], arrived[0])
                latest = min(latest, its_latest - took)
            behind[way] = message, latest
            turn = made
            if made != _LAST:
                later = min(max(0.0, latest - arrived[0]), self._longest)
                turn = min((made[0] + later, made[1]), sent_next.get(message.source, _LAST))
            found[message] = sent_next[message.source] = turn
        return found

    def with_turns(self, turns: Mapping[Message, Moment]) -> MessageTimes:
        """Return a copy whose messages arrive as late as their ``turns`` imply."""
        took: dict[Message, float] = {}
        reached: dict[tuple[int, int], float] = {}
        for message in sorted(self.arrival, key=self._planned):
            way, (made, arrived) = (message.source, message.destination), self._travels(message)
            took[message] = arrived[0] - max(made[0], reached.get(way, made[0]))
            reached[way] = arrived[0]
        reached.clear()
        arrival: dict[Message, Moment] = {}
        for message in sorted(took, key=lambda m: (turns[m], self.made(m), self.needed(m), m)):
            way, (_, arrived) = (message.source, message.destination), self._travels(message)
            begins = max(turns[message][0], reached.get(way, turns[message][0]))
            reached[way] = begins + took[message]
            arrival[message] = (max(reached[way], arrived[0]), arrived[1])
        return replace(self, arrival=arrival)

    def _planned(self, message: Message) -> tuple[Moment, Moment, Moment]:
        """Sort key: the order in which messages travel in the plan's times."""
        return *self._travels(message), self.needed(message)

    def _travels(self, message: Message) -> tuple[Moment, Moment]:
        """Departure and arrival."""
        made = self.made(message)
        return made, self.arrival.get(message, made)

    def let_go(self, device: int, message: Message) -> int:
        """Position of the first operation of the sender ``device`` that may count on the message's
        arrival."""
        arrived = self.arrival.get(message, self.needed(message))
        return bisect_left(self._starts[device], arrived) + _LATE

    def place(self, device: int, made: Moment) -> int:
        """Position of the operation of ``device`` before which it issues a message.

        The position is that of the first operation that has not ended when the message is ``made``;
        the number of operations stands for the end.
        """
        return bisect_right(self._ends[device], made)

    @cached_property
    def _longest(self) -> float:
        """Duration of the longest operation."""
        return max((self.end[op][0] - start[0] for op, start in self.start.items()), default=0.0)

    @cached_property
    def _starts(self) -> list[list[Moment]]:
        return [[self.start[operation] for operation in order] for order in self.schedule.order]

    @cached_property
    def _ends(self) -> list[list[Moment]]:
        return [[self.end[operation] for operation in order] for order in self.schedule.order]


@dataclass(frozen=True)
class Travel:
    """A message and the ``seconds`` it takes to travel."""

    message: Message
    seconds: float


def moments(
    schedule: Schedule, problem: ScheduleProblem | None = None, travels: Iterable[Travel] = ()
) -> MessageTimes:
    """Simulate ``schedule`` with the durations of ``problem``.

    Messages from one device to another travel one after the other, in the order of their
    production; each channel is simulated as a device::

        device 0     [  F0:0  ][  F0:1  ]
        0 to 1                 [a][ skip ][b]
        device 1                  [  F1:0  ][  F1:1  ]

    Without a problem all operations take one unit and messages no time. The same holds for a
    problem without weight gradients and a schedule with weight gradients. Raises DeadlockError.
    """
    slots = logical_times(schedule)
    splits = OpType.WEIGHT_GRAD in schedule.kinds
    if problem is None or (splits and problem.weight_grad is None):
        ends = {op: (float(slot), slot) for op, slot in slots.items()}
        starts = {op: (t - 1.0, slot) for op, (t, slot) in ends.items()}
        return MessageTimes(
            schedule, starts, ends, {t.message: ends[t.message.producer] for t in travels}
        )
    travels = list(travels)
    position = {op: i for order in schedule.order for i, op in enumerate(order)}
    ways: defaultdict[tuple[int, int], list[Travel]] = defaultdict(list)
    for travel in travels:
        ways[travel.message.source, travel.message.destination].append(travel)
    for way in ways.values():
        way.sort(key=lambda travel: position[travel.message.producer])
    every = [travel for way in ways.values() for travel in way]
    channels = [[(t.message.producer, t.message.consumer) for t in way] for way in ways.values()]
    simulator = StepSimulator(schedule, channels)
    duration = simulator.durations(problem, [travel.seconds for travel in every])
    start, end = simulator.play(simulator.slice_waits, duration)
    arrived = dict(zip(every, end[simulator.num_items - len(every) :].tolist(), strict=True))
    return MessageTimes(
        schedule,
        {op: (t, slots[op]) for op, t in simulator.by_operation(start).items()},
        {op: (t, slots[op]) for op, t in simulator.by_operation(end).items()},
        {t.message: (arrived[t], slots[t.message.producer]) for t in travels},
    )
