"""Event simulation of a step in which messages contend for links.

``simulate`` lets every message travel at once, as schedules are made for. Here a device sends one
message at a time and receives one at a time, in the order of their production. Routed skips take
their turn among the boundaries. Slow links then limit a step as computation does. Messages between
two devices keep their order, as on a channel. The cost of posted receives is not simulated; it is
nil when times are as planned (``tests/benchmarks/waiting.py``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.crossing import Crossing, crossings
from megatron_pulse.planner.layout.placement import Partition, Placement, fold
from megatron_pulse.planner.schedule.check.simulate import (
    CODES,
    DeadlockError,
    StepSimulator,
    Timeline,
    simulate,
)
from megatron_pulse.planner.schedule.classic.catalog import CLASSICS
from megatron_pulse.planner.schedule.jit import compiling
from megatron_pulse.planner.schedule.operations import Operation, OpType, Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.simulate_kernel import Messages, line_starts, play_contended


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
    simulator = StepSimulator(schedule)
    start, end, duration, sent = play_messages(simulator, problem, edges)
    left = [
        f"device {d} is at {schedule.order[d][int(np.isnan(end[a:b]).argmax())]}"
        for d, (a, b) in enumerate(pairwise(simulator.first.tolist()))
        if np.isnan(end[a:b]).any()
    ]
    if left:
        raise DeadlockError(f"{schedule.name}: deadlock: {'; '.join(left)}")
    source, _, _, seconds, _, order = sent
    sending_s: Any = np.bincount(
        source[order], seconds[order], minlength=schedule.placement.num_devices
    )
    return SimulatedStep(
        simulator.timeline(start, end, duration),
        tuple(sending_s.tolist()),
        tuple(each.tolist() for each in sent),
    )


def play_messages(
    simulator: StepSimulator, problem: ScheduleProblem, edges: Sequence[StageMessage]
) -> tuple[Any, Any, Any, tuple[Any, ...]]:
    """Starts, ends and durations of operations, and the messages (see ``play_contended``).

    The start and end of an operation that waits for ever are NaN.
    """
    number, num_stages = simulator.number, simulator.num_stages
    backward = OpType.INPUT_GRAD if problem.weight_grad is not None else OpType.BACKWARD
    sends: list[list[tuple[int, float]]] = [[] for _ in range(len(number) * num_stages)]
    received: Any = np.zeros(len(sends), dtype=np.int64)
    for edge in edges:
        ways = [(OpType.FORWARD, edge.source, edge.destination)]
        if edge.needs_grad:
            ways.append((backward, edge.destination, edge.source))
        for kind, source, destination in ways:
            target = CODES[kind] * num_stages + destination
            sends[CODES[kind] * num_stages + source].append((target, edge.seconds))
            received[target] += 1
    messages = Messages(
        simulator.kind * num_stages + simulator.stage,
        simulator.microbatch,
        number.reshape(len(sends), -1),
        line_starts(sends),
        np.array([target for row in sends for target, _ in row], dtype=np.int64),
        np.array([seconds for row in sends for _, seconds in row], dtype=np.float64),
        received,
    )
    duration = simulator.durations(problem)
    start, end, sent = play_contended(
        len(simulator.first) - 1, simulator.line_starts, simulator.slice_waits, duration, messages
    )
    num = len(simulator.every)
    return start[:num], end[:num], duration[:num], sent


@cache
def compile_simulator() -> None:
    """Compile the simulator, or read it from disk, so that compilation takes no search time."""
    problem = ScheduleProblem(fold(1), 1, (1.0, 1.0), (1.0, 1.0))
    schedule = CLASSICS["gpipe"](fold(1), 1)
    with compiling():
        simulate(problem, schedule)
        simulate_step(problem, schedule, ())
