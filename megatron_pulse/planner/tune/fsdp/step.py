"""One FSDP2 or HSDP configuration: a step's operations, bytes, seconds and memory.

The model is cut into units that are wrapped one by one. A unit's parameters are all-gathered within
a group before use and freed after; its gradients are reduce-scattered over the group. With several
groups (HSDP) every group has all parameters, and gradient shards are all-reduced over the groups
once a step. Collectives carry half precision and overlap with computation: ``prefetch`` units are
gathered ahead. Collectives are ideal: they run at link speed without pauses, and do not slow down
computation. Exchanges of context-parallel ranks share a link with them, each at half of its speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import repeat

from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.fsdp_layout import (
    REDUCING,
    Gathering,
    prefetched_before_freed,
)

MAIN_BYTES = 4
"""Bytes per parameter, divided over a group, beside the optimizer's state: fp32 main parameter."""

SUMMED_BYTES = 4
"""Bytes per gradient, divided over a group: fp32, allocated from the first reduction of a step
on."""

AVERAGE_BYTES = 4
"""Bytes per parameter of the EMA if there is one, divided over a group."""

STEADY = 3
"""Microbatches after which each further one adds the same time, except the very last."""


@dataclass(frozen=True)
class ShardedUnit:
    """Seconds and bytes of one unit. With emulated bandwidth, memory is that of the real backbone.

    Parameters travel as ``moved_bytes`` and occupy ``parameter_bytes`` once gathered. The gradients
    of the ``trained`` share take the same. ``state_bytes`` is the state summed over a group's
    devices, ``summed_bytes`` the same of reduced gradients. ``saved_bytes`` are held from forward
    to backward, ``recompute_bytes`` are recomputed and exist in the backward only. Context-parallel
    ranks exchange tokens for ``forward_exchange_s`` of the forward and ``backward_exchange_s`` of
    the backward.
    """

    forward_s: float
    backward_s: float
    moved_bytes: int
    parameter_bytes: float
    state_bytes: float
    saved_bytes: float = 0.0
    recompute_bytes: float = 0.0
    trained: float = 1.0
    summed_bytes: float = 0.0
    forward_exchange_s: float = 0.0
    backward_exchange_s: float = 0.0


@dataclass(frozen=True)
class Sharding:
    """FSDP configuration: ``units`` on ``num_devices`` with ``count`` microbatches each.

    ``group`` devices share the parameters. Gradients are reduced after every microbatch, or
    accumulated locally and reduced after the last one (``reduce_once``). A gradient in reduction
    has ``widened`` times the bytes of its parameter once gathered: 2 for fp32 beside bf16.
    """

    units: tuple[ShardedUnit, ...]
    num_devices: int
    count: int
    group: int
    gathering: Gathering
    reduce_once: bool
    prefetch: int
    widened: float = 1.0

    @property
    def replicas(self) -> int:
        """Number of groups, each with all parameters."""
        return self.num_devices // self.group

    def __str__(self) -> str:
        often = "once a step" if self.reduce_once or self.count == 1 else "each microbatch"
        return f"gathered {self.gathering}, reduced {often}, {len(self.units)} units"


@dataclass(frozen=True)
class UnitPass:
    """Forward or backward of a unit with its collectives.

    ``gathers``: parameters are gathered before. ``frees``: parameters are freed after. ``reduces``:
    gradients are reduced after. ``last``: gradients are summed over groups too.
    """

    unit: int
    forward: bool
    gathers: bool
    frees: bool
    reduces: bool = False
    last: bool = False

    def seconds(self, way: Sharding) -> float:
        """Compute time."""
        unit = way.units[self.unit]
        return unit.forward_s if self.forward else unit.backward_s

    def exchange_s(self, way: Sharding) -> float:
        """Part of ``seconds`` in which tokens are exchanged."""
        unit = way.units[self.unit]
        return unit.forward_exchange_s if self.forward else unit.backward_exchange_s


def passes(way: Sharding) -> tuple[UnitPass, ...]:
    """Operations of one device in a step, in order."""
    return _passes(len(way.units), way.count, way.gathering, way.reduce_once, way.prefetch)


@lru_cache(maxsize=256)
def _passes(
    num_units: int, count: int, gathering: Gathering, reduce_once: bool, prefetch: int
) -> tuple[UnitPass, ...]:
    end, found = num_units - 1, []
    for microbatch in range(count):
        last = microbatch + 1 == count
        for u in range(num_units):
            kept = prefetched_before_freed(end - u, prefetch)
            gathers = not microbatch or not (
                gathering is Gathering.STEP or prefetched_before_freed(u, prefetch)
            )
            frees = gathering is Gathering.PASS and not kept
            found.append(UnitPass(u, True, gathers, frees))
        for u in reversed(range(num_units)):
            kept = prefetched_before_freed(end - u, prefetch)
            gathers = gathering is Gathering.PASS and not kept
            frees = last or not (
                gathering is Gathering.STEP or prefetched_before_freed(u, prefetch)
            )
            found.append(UnitPass(u, False, gathers, frees, last or not reduce_once, last))
    return tuple(found)


def gathered(way: Sharding, unit: int) -> int:
    """Bytes that a device sends to gather a unit."""
    return way.units[unit].moved_bytes * (way.group - 1) // way.group


def reduced(way: Sharding, unit: int) -> int:
    """Bytes that a device sends to reduce-scatter a unit's gradients."""
    return gradient_bytes(way, unit) * (way.group - 1) // way.group


def summed(way: Sharding, unit: int) -> int:
    """Bytes that a device sends to all-reduce a unit's gradient shards over groups."""
    shard = gradient_bytes(way, unit) // way.group
    return 2 * shard * (way.replicas - 1) // way.replicas


def gradient_bytes(way: Sharding, unit: int) -> int:
    """Bytes of a unit's gradients in transit."""
    return round(way.widened * way.units[unit].moved_bytes * way.units[unit].trained)


def step_bytes(way: Sharding) -> int:
    """Bytes that one device sends in a step."""
    return sum(
        gathered(way, op.unit) * op.gathers
        + reduced(way, op.unit) * op.reduces
        + summed(way, op.unit) * op.last
        for op in passes(way)
    )


@dataclass(frozen=True)
class Transfers:
    """Seconds of each unit's collectives: gather, reduce, and the sum over groups.

    The sum has links of its own if ``apart``; else it queues behind the other collectives. Unless
    ``overlaps``, collectives run between computations, as torch's ``fully_shard`` does on CPUs.
    ``beside_exchanges``: gathers and reductions take the links on which tokens are exchanged.
    """

    gather: tuple[float, ...]
    reduce: tuple[float, ...]
    sum: tuple[float, ...]
    apart: bool = False
    overlaps: bool = True
    beside_exchanges: bool = False


def over(link: Link, way: Sharding) -> Transfers:
    """Transfers for devices with one link each, shared by all collectives."""

    def column(sent: Callable[[Sharding, int], int]) -> tuple[float, ...]:
        return tuple(map(link.time_s, map(sent, repeat(way), range(len(way.units)))))

    return Transfers(column(gathered), column(reduced), column(summed), beside_exchanges=True)


def step_s(way: Sharding, transfers: Transfers) -> float:
    """Seconds of a step whose collectives queue in order, without the optimizer.

    For many microbatches ``STEADY`` of them are simulated, and the last increment is repeated.
    """
    if way.count <= STEADY:
        return _play(way, transfers)
    fewer, most = (_play(replace(way, count=count), transfers) for count in (STEADY - 1, STEADY))
    return most + (way.count - STEADY) * (most - fewer)


def _play(way: Sharding, transfers: Transfers) -> float:
    program = passes(way)
    if not transfers.overlaps:
        return sum(op.seconds(way) + _collectives_s(op, transfers) for op in program)
    there = [0.0] * len(program)  # time at which an operation's parameters have arrived
    under_way: list[float] = []
    clock = free = sums = 0.0
    asked = 0
    for at, op in enumerate(program):
        for next_one in range(asked, min(len(program), at + 1 + way.prefetch)):
            if program[next_one].gathers:
                free = max(free, clock) + transfers.gather[program[next_one].unit]
                there[next_one] = free
            asked = next_one + 1
        clock = max(clock, there[at])
        seconds = op.seconds(way)
        if transfers.beside_exchanges and (exchange_s := op.exchange_s(way)):
            delay_s = partial(_delay_s, exchange_s, clock, seconds)
            for later in range(at + 1, asked):
                there[later] += delay_s(there[later])
            under_way[-REDUCING:] = [end + delay_s(end) for end in under_way[-REDUCING:]]
            clock, free = clock + delay_s(free), free + delay_s(free)
        clock += seconds
        if op.reduces:
            if len(under_way) >= REDUCING:
                clock = max(clock, under_way[-REDUCING])
            free = max(free, clock) + transfers.reduce[op.unit]
            under_way.append(free)
            if op.last and transfers.apart:
                sums = max(sums, free) + transfers.sum[op.unit]
            elif op.last:
                free += transfers.sum[op.unit]
    return max(clock, free, sums)


def _delay_s(exchange_s: float, begin: float, seconds: float, end: float) -> float:
    """Delay of a collective that would end at ``end``, and of the operation beside it.

    The operation has ``seconds`` from ``begin``, over which ``exchange_s`` are spread evenly. While
    both are under way, each has half of the link.
    """
    return exchange_s * min(1.0, max(0.0, end - begin) / seconds)


def _collectives_s(op: UnitPass, transfers: Transfers) -> float:
    """Seconds of the collectives of one unit's forward or backward."""
    return (
        transfers.gather[op.unit] * op.gathers
        + transfers.reduce[op.unit] * op.reduces
        + transfers.sum[op.unit] * op.last
    )


def least_s(way: Sharding, transfers: Transfers, computed_s: float) -> float:
    """Lower bound on the step time, where ``computed_s`` is a lower bound on computation.

    It is the larger of two: the busiest link's total, and computation with the first gather and the
    last gradients, which nothing can hide. Without overlap it is the sum of all.
    """
    early, late = (
        sum(seconds for u, seconds in enumerate(ends) if prefetched_before_freed(u, way.prefetch))
        for ends in (transfers.gather[: way.prefetch], transfers.gather[: -1 - way.prefetch : -1])
    )
    whole, again = sum(transfers.gather), (way.count - 1) * early
    carried = {
        Gathering.PASS: way.count * (2 * whole - late) - again,
        Gathering.MICROBATCH: way.count * whole - again,
        Gathering.STEP: whole,
    }[way.gathering]
    carried += sum(transfers.reduce) * (1 if way.reduce_once else way.count)
    summing = sum(transfers.sum)
    if not transfers.overlaps:
        return computed_s + carried + summing
    busiest = max(carried, summing) if transfers.apart else carried + summing
    shown = transfers.gather[0] + transfers.reduce[0] + transfers.sum[0]
    return max(busiest, computed_s + shown)


def state_bytes(way: Sharding) -> float:
    """Bytes of a device's shard of the state."""
    return sum(unit.state_bytes for unit in way.units) / way.group


def peak_bytes(way: Sharding) -> float:
    """Peak bytes of a device beyond its state: gathered units, gradients and activations.

    A gather's buffer counts from the request. Gradients count until as many further reductions as
    may be under way have followed. Their fp32 shards count from the first reduction to the end of
    the step, where ``zero_grad`` frees them. Among many microbatches all but the last behave like
    the second.
    """
    return max(held for _, held in _held(way))


def held_bytes(way: Sharding) -> tuple[tuple[float, float], ...]:
    """Peak bytes beyond the state during each unit's forward, and during its backward."""
    most = [[0.0, 0.0] for _ in way.units]
    for op, held in _held(way):
        both = most[op.unit]
        both[not op.forward] = max(both[not op.forward], held)
    return tuple((forward, backward) for forward, backward in most)


def _held(way: Sharding) -> Iterator[tuple[UnitPass, float]]:
    """Operations of a device with the bytes beyond its state during each."""
    way = replace(way, count=min(way.count, STEADY))
    program, units = passes(way), way.units
    held = 0.0
    asked = 0
    summing: set[int] = set()
    summed: set[int] = set()
    reducing: list[float] = []
    for at, op in enumerate(program):
        for next_one in program[asked : at + 1 + way.prefetch]:
            held += units[next_one.unit].parameter_bytes if next_one.gathers else 0.0
        asked = at + 1 + way.prefetch
        unit = units[op.unit]
        gradient = unit.parameter_bytes * unit.trained
        own = gradient * way.widened if way.reduce_once and way.count > 1 else gradient
        if op.forward:
            held += unit.saved_bytes
            yield op, held
        else:
            held += 0.0 if op.unit in summing else own
            summing.add(op.unit)
            yield op, held + unit.recompute_bytes
            held -= unit.saved_bytes
        held -= unit.parameter_bytes if op.frees else 0.0
        if op.reduces:
            summing.discard(op.unit)
            reducing.append(gradient * way.widened)
            held += reducing[-1] - own
            held -= reducing.pop(0) if len(reducing) > REDUCING else 0.0
            held += 0.0 if op.unit in summed else unit.summed_bytes / way.group
            summed.add(op.unit)


def grouped(parameters: Sequence[int], count: int) -> list[range]:
    """Split layers into about ``count`` units of neighbours with about equal parameters."""
    share, units, begin, held = sum(parameters) / count, [], 0, 0.0
    for i, own in enumerate(parameters):
        held += own
        if held >= share or i + 1 == len(parameters):
            units.append(range(begin, i + 1))
            begin, held = i + 1, 0.0
    return units
