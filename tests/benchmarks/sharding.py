"""Parameters divided over devices as FSDP2 divides them: a step's operations, bytes, time, memory.

A model is cut into units, wrapped each by itself. A unit's parameters are gathered from its group's
devices before they are used and let go after; its gradients are reduced and scattered over the
group. With several groups (HSDP) every group has all parameters, and the shards of gradients are
summed over the groups, once a step. Gathers and reductions carry half precision, and overlap with
computing: ``prefetch`` units are gathered ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from megatron_pulse.planner.cluster.link import Link

STATE_BYTES = 16
"""Of a parameter, divided over a group: fp32 parameter and gradient, and both moments of Adam."""

REDUCING = 2
"""Units whose gradients may be on their way at once; FSDP2's own default is 1."""

ELEMENT_BYTES = 4


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
class Unit:
    """Emulated seconds and fp32 elements; bytes of the real backbone.

    Its parameters in half precision take ``parameter_bytes``, as do their gradients.
    ``saved_bytes`` wait from forward to backward, ``again_bytes`` are there only in the backward,
    which computes them again.
    """

    forward_s: float
    backward_s: float
    elements: int
    parameter_bytes: float
    saved_bytes: float
    again_bytes: float = 0.0


@dataclass(frozen=True)
class Sharding:
    """A way to train ``units`` on ``num_devices``, ``count`` microbatches on each.

    ``group`` devices share the parameters. Gradients are reduced after every microbatch, or
    ``reduce_once``: then they are summed on every device until the last.
    """

    units: tuple[Unit, ...]
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
class Operation:
    """A unit's forward or backward, and what goes with it.

    Before it the unit is gathered where ``gathers``; after it the unit's parameters go where
    ``frees``, and its gradients are reduced, and where ``last`` summed over groups.
    """

    unit: int
    forward: bool
    seconds: float
    gathers: bool
    frees: bool
    reduces: bool = False
    last: bool = False


def operations(way: Sharding) -> Iterator[Operation]:
    """Of a step of one device, in order."""
    end = len(way.units) - 1
    for microbatch in range(way.count):
        last = microbatch + 1 == way.count
        for u, unit in enumerate(way.units):
            kept = asked_soon(end - u, way)
            gathers = not microbatch or not (way.gathering is Gathering.STEP or asked_soon(u, way))
            frees = way.gathering is Gathering.PASS and not kept
            yield Operation(u, True, unit.forward_s, gathers, frees)
        for u, unit in reversed(list(enumerate(way.units))):
            kept = asked_soon(end - u, way)
            gathers = way.gathering is Gathering.PASS and not kept
            frees = last or not (way.gathering is Gathering.STEP or asked_soon(u, way))
            reduces = last or not way.reduce_once
            yield Operation(u, False, unit.backward_s, gathers, frees, reduces, last)


def asked_soon(units: int, way: Sharding) -> bool:
    """Whether a unit that is so many from the pass's turn is asked for before it is let go."""
    return 2 * units < way.prefetch


def gathered(way: Sharding, unit: int) -> int:
    """Bytes that a device sends when a unit is gathered, or its gradients reduced."""
    return ELEMENT_BYTES * way.units[unit].elements * (way.group - 1) // way.group


def summed(way: Sharding, unit: int) -> int:
    """Bytes that a device sends when a unit's shards of gradients are summed over groups."""
    shard = ELEMENT_BYTES * way.units[unit].elements // way.group
    return 2 * shard * (way.replicas - 1) // way.replicas


def step_bytes(way: Sharding) -> int:
    """Emulated bytes that one device sends in a step."""
    return sum(
        gathered(way, op.unit) * (op.gathers + op.reduces)
        + (summed(way, op.unit) if op.last else 0)
        for op in operations(way)
    )


def step_s(way: Sharding, link: Link) -> float:
    """Emulated seconds of a step whose collectives follow each other on the device's link.

    Of many microbatches three are played, and the third's share is taken for each further one.
    """
    if way.count <= 3:
        return _play(way, link)
    two, three = (_play(replace(way, count=count), link) for count in (2, 3))
    return three + (way.count - 3) * (three - two)


def _play(way: Sharding, link: Link) -> float:
    program = list(operations(way))
    there = [0.0] * len(program)  # when an operation's parameters are
    reduced: list[float] = []
    clock = free = 0.0
    asked = 0
    for at, op in enumerate(program):
        for next_one in range(asked, min(len(program), at + 1 + way.prefetch)):
            if program[next_one].gathers:
                free = max(free, clock) + link.time_s(gathered(way, program[next_one].unit))
                there[next_one] = free
            asked = next_one + 1
        clock = max(clock, there[at]) + op.seconds
        if op.reduces:
            if len(reduced) >= REDUCING:
                clock = max(clock, reduced[-REDUCING])
            free = max(free, clock) + link.time_s(gathered(way, op.unit))
            reduced.append(free)
            free += link.time_s(summed(way, op.unit)) if op.last else 0.0
    return max(clock, free)


def state_bytes(way: Sharding) -> float:
    """Real bytes of a device for its shard, whatever it does."""
    parameters = sum(unit.parameter_bytes for unit in way.units) / 2
    return STATE_BYTES * parameters / way.group


def peak_bytes(way: Sharding) -> float:
    """Real bytes of a device beyond its state at most: gathered units, gradients, activations.

    A gather's buffer counts from when it is asked for, gradients until as many reductions as may be
    on their way have followed. Of many microbatches all behave as the second.
    """
    way = replace(way, count=min(way.count, 2))
    program, units = list(operations(way)), way.units
    held = most = 0.0
    asked = 0
    summing: set[int] = set()
    reducing: list[float] = []
    for at, op in enumerate(program):
        for next_one in program[asked : at + 1 + way.prefetch]:
            held += units[next_one.unit].parameter_bytes if next_one.gathers else 0.0
        asked = at + 1 + way.prefetch
        unit = units[op.unit]
        if op.forward:
            held += unit.saved_bytes
            most = max(most, held)
        else:
            held += 0.0 if op.unit in summing else unit.parameter_bytes
            summing.add(op.unit)
            most = max(most, held + unit.again_bytes)
            held -= unit.saved_bytes
        held -= unit.parameter_bytes if op.frees else 0.0
        if op.reduces:
            summing.discard(op.unit)
            reducing.append(unit.parameter_bytes)
            held -= reducing.pop(0) if len(reducing) > REDUCING else 0.0
    return most


def grouped(parameters: Sequence[int], count: int) -> list[range]:
    """Layers as about ``count`` units of neighbours with about as many parameters each."""
    share, units, begin, held = sum(parameters) / count, [], 0, 0.0
    for i, own in enumerate(parameters):
        held += own
        if held >= share or i + 1 == len(parameters):
            units.append(range(begin, i + 1))
            begin, held = i + 1, 0.0
    return units
