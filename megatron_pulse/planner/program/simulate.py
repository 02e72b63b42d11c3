"""Event simulation of a step in which messages contend for links.

``simulate`` lets every message travel at once, as schedules are made for. Here a device sends one
message at a time and receives one at a time, in the order of their production. Routed skips take
their turn among the boundaries. Slow links then limit a step as computation does. Messages between
two devices keep their order, as on a channel. The cost of posted receives is not simulated; it is
nil when times are as planned (``tests/benchmarks/waiting.py``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.crossing import Crossing, crossings
from megatron_pulse.planner.layout.placement import Partition, Placement, fold
from megatron_pulse.planner.program.simulate_kernel import CODES, RaggedTable, StepArrays, play_step
from megatron_pulse.planner.schedule.check.simulate import (
    DeadlockError,
    Timeline,
    duration_of,
)
from megatron_pulse.planner.schedule.classic.catalog import CLASSICS
from megatron_pulse.planner.schedule.jit import compiling
from megatron_pulse.planner.schedule.operations import BACKWARDS, Operation, OpType, Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem


@dataclass(frozen=True)
class StageMessage:
    """Message of a forward of stage ``source`` to stage ``destination`` on another device.

    The gradient travels back if ``needs_grad``. Each message takes ``seconds``.
    """

    source: int
    destination: int
    seconds: float
    needs_grad: bool = True


@dataclass(frozen=True)
class Transfer:
    """A message that travelled from device ``source`` to ``destination``, for ``consumer``."""

    source: int
    destination: int
    consumer: Operation
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class SimulatedStep:
    """Timeline of operations, seconds that each device sends, and all transfers."""

    timeline: Timeline
    sending_s: tuple[float, ...]
    _sent: tuple[list[Any], ...]

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """Messages in the order of their departure."""
        every = [op for line in self.timeline.schedule.order for op in line]
        source, destination, consumer, seconds, begun, order = self._sent
        return tuple(
            Transfer(source[i], destination[i], every[consumer[i]], begun[i], begun[i] + seconds[i])
            for i in order
        )


def edges_of(
    costs: ChainCosts, partition: Partition, link: Callable[[int, int], Link]
) -> tuple[StageMessage, ...]:
    """Edges of ``partition``; ``link(d, e)`` joins two devices.

    For relayed skips pass ``relayed(costs)``.
    """
    return edges_along(crossings(costs, partition), partition.placement, link)


def edges_along(
    crossed: Iterable[Crossing], placement: Placement, link: Callable[[int, int], Link]
) -> tuple[StageMessage, ...]:
    """Edges of the tensors that cross between stages."""
    home = placement.device_of_stage
    return tuple(
        StageMessage(
            c.source,
            c.destination,
            link(home[c.source], home[c.destination]).time_s(c.num_bytes),
            c.needs_grad,
        )
        for c in crossed
        if c.num_bytes and not c.merged
    )


def lags(edges: Sequence[StageMessage], num_stages: int) -> tuple[float, ...]:
    """Link seconds between each stage and the next, each way, as in ``ScheduleProblem``.

    Only messages whose gradients are sent back count, because bounds rely on both directions.
    """
    known: defaultdict[tuple[int, int], float] = defaultdict(float)
    for edge in edges:
        if edge.needs_grad:
            known[edge.source, edge.destination] += edge.seconds
    return tuple(known[s, s + 1] for s in range(num_stages - 1))


def link_bound(problem: ScheduleProblem, edges: Sequence[StageMessage]) -> float:
    """Lower bound on the step time: the most seconds that one device must send, or receive."""
    home = problem.placement.device_of_stage
    sends, receives = ([0.0] * problem.placement.num_devices for _ in range(2))
    for edge in edges:
        there, back = home[edge.source], home[edge.destination]
        for source, destination in ((there, back), (back, there))[: 1 + edge.needs_grad]:
            sends[source] += edge.seconds
            receives[destination] += edge.seconds
    return problem.num_microbatches * max(*sends, *receives)


def simulate_step(
    problem: ScheduleProblem, schedule: Schedule, edges: Sequence[StageMessage]
) -> SimulatedStep:
    """Simulate a valid ``schedule`` with the durations of ``problem`` and the messages of
    ``edges``.

    Link times of ``problem`` are ignored. Bubble tasks take the durations in the schedule. Messages
    between their slices take the schedule's lags and do not contend. Raises DeadlockError.
    """
    player = StepSimulator(schedule)
    played, took = player.play(problem, edges)
    start, end, position, sending_s, sent = played
    left = [
        f"device {d} is at {order[p]}"
        for d, (order, p) in enumerate(zip(schedule.order, position, strict=True))
        if p < len(order)
    ]
    if left:
        raise DeadlockError(f"{schedule.name}: deadlock: {'; '.join(left)}")
    starts, ends = dict(zip(player.every, start.tolist(), strict=True)), end.tolist()
    makespan = max(ends, default=0.0)
    seconds = took.tolist()
    busy = tuple(sum(seconds[a:b]) for a, b in pairwise(player.first.tolist()))
    bubble = tuple(makespan - b for b in busy)
    end_of = dict(zip(player.every, ends, strict=True))
    timeline = Timeline(schedule, starts, end_of, makespan, busy, bubble)
    return SimulatedStep(timeline, tuple(sending_s.tolist()), tuple(each.tolist() for each in sent))


class StepSimulator:
    """Simulator of one schedule for changing durations; the tables of its order are built once.

    Operations are numbered as in ``every``: device after device, those of d from ``first[d]`` on;
    the last entry of ``first`` is the end.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.every = every = [op for line in schedule.order for op in line]
        self.first: Any = np.cumsum([0, *map(len, schedule.order)])
        self.kind = kind = np.array([CODES[op.kind] for op in every], dtype=np.int64)
        self.stage = stage = np.array([op.stage for op in every], dtype=np.int64)
        self.microbatch = microbatch = np.array([op.microbatch for op in every], dtype=np.int64)
        shape = [int(each.max(initial=0)) + 1 for each in (stage, microbatch)]
        stages = max(schedule.placement.num_stages, shape[0])
        self.number = np.full((len(CODES), stages, shape[1]), -1)
        self.number[kind, stage, microbatch] = np.arange(len(every))
        waits: list[list[tuple[int, float]]] = [[] for _ in every]
        if schedule.bubble_tasks:
            index = {op: i for i, op in enumerate(every)}
            for i, op in enumerate(every):
                waits[i] = [(index[source], lag) for source, lag in schedule.slices_before(op)]
        self._waits = RaggedTable.of(waits)

    def play(self, problem: ScheduleProblem, edges: Sequence[StageMessage]) -> tuple[Any, Any]:
        """Result of ``play_step``, and the seconds of each operation."""
        placement, duration = problem.placement, self._durations(problem)
        stages = placement.num_stages
        forward: list[list[tuple[int, float]]] = [[] for _ in range(stages)]
        back: list[list[tuple[int, float]]] = [[] for _ in range(stages)]
        linked: Any = np.zeros((stages, stages), dtype=np.bool_)
        received: Any = np.zeros(stages, dtype=np.int64)
        returned: Any = np.zeros(stages, dtype=np.int64)
        for edge in edges:
            forward[edge.source].append((edge.destination, edge.seconds))
            linked[edge.source, edge.destination] = True
            received[edge.destination] += 1
            if edge.needs_grad:
                linked[edge.destination, edge.source] = True
                back[edge.destination].append((edge.source, edge.seconds))
                returned[edge.source] += 1
        step = StepArrays(
            self.first,
            self.kind,
            self.stage,
            self.microbatch,
            duration,
            self.number,
            np.array(placement.device_of_stage, dtype=np.int64),
            _beside(placement.before),
            _beside(placement.after),
            RaggedTable.of(forward),
            RaggedTable.of(back),
            linked,
            received,
            returned,
            self._waits,
            np.array([problem.offload_s_of(s) for s in range(stages)]),
        )
        return play_step(step), duration

    def _durations(self, problem: ScheduleProblem) -> Any:
        schedule, num = self.schedule, problem.placement.num_stages
        duration, apart = duration_of(problem, schedule), schedule.recomputed_apart
        usual = np.zeros((len(CODES), num))
        for used in self._kinds - {OpType.BUBBLE_TASK}:
            usual[CODES[used], :] = [problem.duration(used, s) for s in range(num)]
        seconds = np.zeros(len(self.every))
        known = self.kind != CODES[OpType.BUBBLE_TASK]
        seconds[known] = usual[self.kind[known], self.stage[known]]
        if apart or schedule.bubble_tasks:
            for i, op in enumerate(self.every):
                if op.kind is OpType.BUBBLE_TASK or (apart and op.kind in BACKWARDS):
                    seconds[i] = duration(op)
        return seconds

    @cached_property
    def _kinds(self) -> set[OpType]:
        return {op.kind for op in self.every}


@cache
def compile_simulator() -> None:
    """Compile the simulator, or read it from disk, so that compilation takes no search time."""
    problem = ScheduleProblem(fold(1), 1, (1.0, 1.0), (1.0, 1.0))
    with compiling():
        simulate_step(problem, CLASSICS["gpipe"](fold(1), 1), ())


def _beside(stages: Mapping[int, int | None]) -> Any:
    return np.array([-1 if s is None else s for s in stages.values()], dtype=np.int64)
