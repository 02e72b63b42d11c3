"""When what of a step happens, by its simulated times, which every device knows."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_pulse.planner.layout.routes import Payload
from megatron_pulse.planner.schedule.check.copies import Copy, copies_before, copy_lines
from megatron_pulse.planner.schedule.check.simulate import (
    dependency,
    duration_of,
    logical_times,
    play,
)
from megatron_pulse.planner.schedule.message import STEP_END, Message
from megatron_pulse.planner.schedule.operations import Kind, Operation, Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem

type Moment = tuple[float, int]
"""A simulated time; among equal ones, which operation must come first."""

_LAST: Moment = (float("inf"), 0)

_LATE = 1
"""Operations by which a message may be late before its sender waits for it."""


@dataclass(frozen=True)
class Moments:
    """When each operation of ``schedule`` begins and ends.

    What depends on an operation, or follows it on its device, begins later than that ends, be its
    time zero: ``end[a] < start[b]``.
    """

    schedule: Schedule
    start: dict[Operation, Moment]
    end: dict[Operation, Moment]
    arrival: dict[Message, Moment]

    def made(self, message: Message) -> Moment:
        """When ``message`` is ready to be sent; after all else what the next step reads of slices,
        which nothing waits for."""
        if message.payload is Payload.ENCODED and message.consumer == STEP_END:
            return _LAST
        return self.end[message.producer]

    def needed(self, message: Message) -> Moment:
        """When its consumer begins."""
        return self.start.get(message.consumer, _LAST)

    def turns(self, messages: Iterable[Message]) -> dict[Message, Moment]:
        """When each is issued in the one order of all: when it is ``made``, or later, by what it
        and those behind it on its way have time for, an operation at most, and not behind what its
        device makes after it. All are issued before they are ``needed``.

        So those that have no time go first, and a receive of theirs need not wait for a send::

            device 0     [  F0:7  ]s              [  I0:3  ]     s may arrive when F1:7 begins
            device 1        [  I1:3  ]g [  W1:2  ][  F1:7  ]     g is needed at once

        By the times at which they are made s comes before g, so device 0 would post the receive of
        g behind s; g comes first, and it is posted before F0:7.
        """
        found: dict[Message, Moment] = {}
        sent_next: dict[int, Moment] = {}
        behind: dict[tuple[int, int], tuple[Message, float]] = {}
        for message in reversed(sorted(messages, key=self._planned)):
            made, arrived = self._travels(message)
            way, latest = (message.source, message.destination), self.needed(message)[0]
            if way in behind:  # what it puts off puts that off
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

    def with_turns(self, turns: Mapping[Message, Moment]) -> Moments:
        """The same, but that messages arrive as they do where they travel at their ``turns``."""
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
        """By which messages travel one after the other in the plan's times."""
        return *self._travels(message), self.needed(message)

    def _travels(self, message: Message) -> tuple[Moment, Moment]:
        """From when to when."""
        made = self.made(message)
        return made, self.arrival.get(message, made)

    def let_go(self, device: int, message: Message) -> int:
        """Before which of its operations ``device``, which has sent it, counts on a message to have
        arrived."""
        arrived = self.arrival.get(message, self.needed(message))
        return bisect_left(self._starts[device], arrived) + _LATE

    def place(self, device: int, made: Moment) -> int:
        """Before which of its operations ``device`` issues a message, one way or the other: the
        first that has not ended when it is ``made``. Their number: behind the last."""
        return bisect_right(self._ends[device], made)

    @cached_property
    def _longest(self) -> float:
        """Of all operations."""
        return max((self.end[op][0] - start[0] for op, start in self.start.items()), default=0.0)

    @cached_property
    def _starts(self) -> list[list[Moment]]:
        return [[self.start[operation] for operation in order] for order in self.schedule.order]

    @cached_property
    def _ends(self) -> list[list[Moment]]:
        return [[self.end[operation] for operation in order] for order in self.schedule.order]


@dataclass(frozen=True)
class Travel:
    """``message`` travels ``seconds``."""

    message: Message
    seconds: float


def moments(
    schedule: Schedule, problem: ScheduleProblem | None = None, travels: Iterable[Travel] = ()
) -> Moments:
    """The times of ``schedule`` by ``problem``'s durations, where what ``travels`` from a device to
    another does so one after the other, as it is made::

        device 0     [  F0:0  ][  F0:1  ]
        0 to 1                 [a][ skip ][b]
        device 1                  [  F1:0  ][  F1:1  ]

    All operations take one unit, and nothing time to travel, where there is no problem, or one that
    knows no weight gradients for a schedule that has them. Raises DeadlockError.
    """
    slots = logical_times(schedule)
    splits = Kind.WEIGHT_GRAD in schedule.kinds
    if problem is None or (splits and problem.weight_grad is None):
        ends = {op: (float(slot), slot) for op, slot in slots.items()}
        starts = {op: (t - 1.0, slot) for op, (t, slot) in ends.items()}
        return Moments(
            schedule, starts, ends, {t.message: ends[t.message.producer] for t in travels}
        )
    travels = list(travels)
    duration = duration_of(problem, schedule)

    def lasts(item: Operation | Travel | Copy) -> float:
        if isinstance(item, Travel):
            return item.seconds
        if isinstance(item, Copy):
            return problem.copying_of(item.operation.stage)
        return duration(item)

    start, end = _played(schedule, lasts, travels)
    return Moments(
        schedule,
        {op: (start[op], slot) for op, slot in slots.items()},
        {op: (end[op], slot) for op, slot in slots.items()},
        {t.message: (end[t], slots[t.message.producer]) for t in travels},
    )


def _played(
    schedule: Schedule,
    lasts: Callable[[Operation | Travel | Copy], float],
    travels: Iterable[Travel],
) -> tuple[dict[Operation | Travel | Copy, float], dict[Operation | Travel | Copy, float]]:
    """Starts and ends of operations, and of what travels, each way a device of its own."""
    position = {op: i for order in schedule.order for i, op in enumerate(order)}
    ways: defaultdict[tuple[int, int], list[Travel]] = defaultdict(list)
    taken: defaultdict[Operation, list[Travel]] = defaultdict(list)
    for travel in travels:
        message = travel.message
        ways[message.source, message.destination].append(travel)
        taken[message.consumer].append(travel)
    for way in ways.values():
        way.sort(key=lambda travel: position[travel.message.producer])

    def before(
        item: Operation | Travel | Copy,
    ) -> Iterator[tuple[Operation | Travel | Copy, float]]:
        if isinstance(item, Travel):
            yield item.message.producer, 0.0
            return
        if schedule.offloaded:
            yield from ((source, 0.0) for source in copies_before(item, schedule))
        if isinstance(item, Copy):
            return
        if (required := dependency(item, schedule.placement)) is not None:
            yield required, 0.0
        yield from schedule.slices_before(item)
        yield from ((travel, 0.0) for travel in taken[item])

    lines: list[Sequence[Operation | Travel | Copy]] = [*schedule.order, *ways.values()]
    lines += copy_lines(schedule)
    start, end, _ = play(lines, before, lasts)
    return start, end
