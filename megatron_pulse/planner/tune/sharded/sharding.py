"""Parameters divided over devices as FSDP2 divides them: a step's operations, bytes, time, memory.

A model is cut into units, wrapped each by itself. A unit's parameters are gathered from its group's
devices before they are used and let go after; its gradients are reduced and scattered over the
group. With several groups (HSDP) every group has all parameters, and the shards of gradients are
summed over the groups, once a step. Gathers and reductions carry half precision, and overlap with
computing: ``prefetch`` units are gathered ahead. Collectives are ideal: they take what their links
take, follow each other without a pause, and slow no computing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from itertools import repeat

from megatron_pulse.planner.cluster.link import Link

STATE_BYTES = 12
"""Of a parameter, divided over a group: it in fp32, and both moments of Adam."""

SUMMED_BYTES = 4
"""Of a gradient, divided over a group: fp32, there from its first reduction in a step on."""

AVERAGE_BYTES = 4
"""Of a parameter's average, where one is kept, divided as well."""

STEADY = 3
"""Microbatches of a step from which on each further one is like the last but for the very last."""

REDUCING = 2
"""Units whose gradients may be on their way at once; FSDP2's own default is 1."""


class Gathering(StrEnum):
    """How often a unit's parameters are gathered.

    In each pass: FSDP2's ``reshard_after_forward``. Once a microbatch: without. Once a step: nor
    ``reshard_after_backward``. What would be gathered again before it had been let go, as the last
    unit for its backward, is kept.
    """

    PASS = "each pass"
    MICROBATCH = "each microbatch"
    STEP = "once a step"


@dataclass(frozen=True)
class ShardedUnit:
    """Seconds, and bytes as they travel; bytes of the real backbone where these are emulated.

    Its parameters travel as ``moved_bytes`` and take ``parameter_bytes`` where they are gathered,
    as do their gradients, of the share that is ``trained``; ``state_bytes`` are what all of a
    group's devices keep of it together, ``summed_bytes`` what its reduced gradients take of them
    all. ``saved_bytes`` wait from forward to backward, ``again_bytes`` are there only in the
    backward, which computes them again.
    """

    forward_s: float
    backward_s: float
    moved_bytes: int
    parameter_bytes: float
    state_bytes: float
    saved_bytes: float = 0.0
    again_bytes: float = 0.0
    trained: float = 1.0
    summed_bytes: float = 0.0


@dataclass(frozen=True)
class Sharding:
    """A way to train ``units`` on ``num_devices``, ``count`` microbatches on each.

    ``group`` devices share the parameters. Gradients are reduced after every microbatch, or
    ``reduce_once``: then they are summed on every device until the last.
    """

    units: tuple[ShardedUnit, ...]
    num_devices: int
    count: int
    group: int
    gathering: Gathering
    reduce_once: bool
    prefetch: int

    @property
    def replicas(self) -> int:
        """Groups that have all parameters."""
        return self.num_devices // self.group

    def __str__(self) -> str:
        often = "once a step" if self.reduce_once or self.count == 1 else "each microbatch"
        return f"gathered {self.gathering}, reduced {often}, {len(self.units)} units"


@dataclass(frozen=True)
class UnitPass:
    """A unit's forward or backward, and what goes with it.

    Before it the unit is gathered where ``gathers``; after it the unit's parameters go where
    ``frees``, and its gradients are reduced, and where ``last`` summed over groups.
    """

    unit: int
    forward: bool
    gathers: bool
    frees: bool
    reduces: bool = False
    last: bool = False

    def seconds(self, way: Sharding) -> float:
        """Of its computing."""
        unit = way.units[self.unit]
        return unit.forward_s if self.forward else unit.backward_s


def passes(way: Sharding) -> tuple[UnitPass, ...]:
    """Of a step of one device, in order."""
    return _passes(len(way.units), way.count, way.gathering, way.reduce_once, way.prefetch)


@lru_cache(maxsize=256)
def _passes(
    num_units: int, count: int, gathering: Gathering, reduce_once: bool, prefetch: int
) -> tuple[UnitPass, ...]:
    end, found = num_units - 1, []
    for microbatch in range(count):
        last = microbatch + 1 == count
        for u in range(num_units):
            kept = asked_soon(end - u, prefetch)
            gathers = not microbatch or not (gathering is Gathering.STEP or asked_soon(u, prefetch))
            frees = gathering is Gathering.PASS and not kept
            found.append(UnitPass(u, True, gathers, frees))
        for u in reversed(range(num_units)):
            kept = asked_soon(end - u, prefetch)
            gathers = gathering is Gathering.PASS and not kept
            frees = last or not (gathering is Gathering.STEP or asked_soon(u, prefetch))
            found.append(UnitPass(u, False, gathers, frees, last or not reduce_once, last))
    return tuple(found)


def asked_soon(units: int, prefetch: int) -> bool:
    """Whether a unit that is so many from the pass's turn is asked for before it is let go."""
    return 2 * units < prefetch


def gathered(way: Sharding, unit: int) -> int:
    """Bytes that a device sends when a unit is gathered."""
    return way.units[unit].moved_bytes * (way.group - 1) // way.group


def reduced(way: Sharding, unit: int) -> int:
    """Bytes that a device sends when a unit's gradients are reduced."""
    return gradient_bytes(way.units[unit]) * (way.group - 1) // way.group


def summed(way: Sharding, unit: int) -> int:
    """Bytes that a device sends when a unit's shards of gradients are summed over groups."""
    shard = gradient_bytes(way.units[unit]) // way.group
    return 2 * shard * (way.replicas - 1) // way.replicas


def gradient_bytes(unit: ShardedUnit) -> int:
    """Of a unit's gradients, as they travel."""
    return round(unit.moved_bytes * unit.trained)


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
    """Seconds of each unit's collectives: gathering, reducing, and summing over groups, which goes
    over links of its own where ``apart``, else after what else is on the device's."""

    gather: tuple[float, ...]
    reduce: tuple[float, ...]
    sum: tuple[float, ...]
    apart: bool = False


def over(link: Link, way: Sharding) -> Transfers:
    """Where each device has one link like ``link`` for all that it sends."""

    def column(sent: Callable[[Sharding, int], int]) -> tuple[float, ...]:
        return tuple(map(link.time_s, map(sent, repeat(way), range(len(way.units)))))

    return Transfers(column(gathered), column(reduced), column(summed))


def step_s(way: Sharding, transfers: Transfers) -> float:
    """Seconds of a step whose collectives follow each other.

    Of many microbatches ``STEADY`` are played; each further one adds what the last of them adds.
    """
    if way.count <= STEADY:
        return _play(way, transfers)
    fewer, most = (_play(replace(way, count=count), transfers) for count in (STEADY - 1, STEADY))
    return most + (way.count - STEADY) * (most - fewer)


def _play(way: Sharding, transfers: Transfers) -> float:
    program = passes(way)
    there = [0.0] * len(program)  # when an operation's parameters are
    under_way: list[float] = []
    clock = free = sums = 0.0
    asked = 0
    for at, op in enumerate(program):
        for next_one in range(asked, min(len(program), at + 1 + way.prefetch)):
            if program[next_one].gathers:
                free = max(free, clock) + transfers.gather[program[next_one].unit]
                there[next_one] = free
            asked = next_one + 1
        clock = max(clock, there[at]) + op.seconds(way)
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


def least_s(way: Sharding, transfers: Transfers, computed_s: float) -> float:
    """No step of ``way`` is shorter, of which ``computed_s`` are computing: all that its links
    carry, or that and what nothing can hide, the first gathering and the last gradients."""
    early, late = (
        sum(seconds for u, seconds in enumerate(ends) if asked_soon(u, way.prefetch))
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
    busiest = max(carried, summing) if transfers.apart else carried + summing
    shown = transfers.gather[0] + transfers.reduce[0] + transfers.sum[0]
    return max(busiest, computed_s + shown)


def state_bytes(way: Sharding) -> float:
    """Bytes of a device for its shard, whatever it does."""
    return sum(unit.state_bytes for unit in way.units) / way.group


def peak_bytes(way: Sharding) -> float:
    """Bytes of a device beyond its state at most: gathered units, gradients, activations.

    A gather's buffer counts from when it is asked for, gradients until as many reductions as may be
    on their way have followed, and their shards in fp32 from the first reduction to the step's end:
    ``zero_grad`` lets go of them. Of many microbatches all behave as the second, but for the last.
    """
    return max(held for _, held in _held(way))


def held_bytes(way: Sharding) -> tuple[tuple[float, float], ...]:
    """The most of these while each unit's forward runs, and its backward."""
    most = [[0.0, 0.0] for _ in way.units]
    for op, held in _held(way):
        both = most[op.unit]
        both[not op.forward] = max(both[not op.forward], held)
    return tuple((forward, backward) for forward, backward in most)


def _held(way: Sharding) -> Iterator[tuple[UnitPass, float]]:
    """A device's operations, and bytes beyond its state while each runs."""
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
        if op.forward:
            held += unit.saved_bytes
            yield op, held
        else:
            held += 0.0 if op.unit in summing else unit.parameter_bytes * unit.trained
            summing.add(op.unit)
            yield op, held + unit.again_bytes
            held -= unit.saved_bytes
        held -= unit.parameter_bytes if op.frees else 0.0
        if op.reduces:
            summing.discard(op.unit)
            reducing.append(unit.parameter_bytes * unit.trained)
            held -= reducing.pop(0) if len(reducing) > REDUCING else 0.0
            held += 0.0 if op.unit in summed else unit.summed_bytes / way.group
            summed.add(op.unit)


def grouped(parameters: Sequence[int], count: int) -> list[range]:
    """Layers as about ``count`` units of neighbours with about as many parameters each."""
    share, units, begin, held = sum(parameters) / count, [], 0, 0.0
    for i, own in enumerate(parameters):
        held += own
        if held >= share or i + 1 == len(parameters):
            units.append(range(begin, i + 1))
            begin, held = i + 1, 0.0
    return units
