"""What goes from stage to stage: what carries a skip, and the bytes between devices.

A skip whose ends share a stage is an ordinary autograd edge; one that leaves the last layer of a
stage for the next stage is the boundary tensor itself and is not sent twice; one whose ends share
a device stays there; every other goes from its source device straight to its destination.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple, Protocol

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.layout.placement import Partition


class SkipEnds(Protocol):
    """A skip, by the layers that it connects."""

    @property
    def source(self) -> int:
        """The layer that pushes it."""
        ...

    @property
    def destination(self) -> int:
        """The layer that pops it."""
        ...


class SkipCarrier(StrEnum):
    """What carries a skip from its source stage to its destination stage."""

    AUTOGRAD = "autograd"
    BOUNDARY = "boundary"
    LOCAL = "local"
    DIRECT = "direct"


def carried(skip: SkipEnds, partition: Partition) -> tuple[int, int, SkipCarrier]:
    """The stages of the skip's ends, and what carries it from one to the other."""
    source = partition.stage_of_layer(skip.source)
    destination = partition.stage_of_layer(skip.destination)
    home = partition.placement.device_of_stage
    if source == destination:
        return source, destination, SkipCarrier.AUTOGRAD
    if destination == source + 1 and skip.source + 1 == partition.cuts[destination]:
        return source, destination, SkipCarrier.BOUNDARY
    same = home[source] == home[destination]
    return source, destination, SkipCarrier.LOCAL if same else SkipCarrier.DIRECT


class Crossing(NamedTuple):
    """What a forward of stage ``source`` has for stage ``destination`` on another device.

    ``skip`` says that it is a skip, not the boundary; one that is ``merged`` is the boundary tensor
    itself, and is not sent again. A gradient goes back where it ``wants`` one.
    """

    source: int
    destination: int
    num_bytes: int
    skip: bool = False
    merged: bool = False
    wants: bool = True

    @property
    def times(self) -> int:
        """How often so many bytes travel: there, and back where a gradient is wanted."""
        return 1 + self.wants


def crossings(costs: ChainCosts, partition: Partition) -> Iterator[Crossing]:
    """The boundaries, then the skips, between stages on different devices.

    For relayed skips give ``relayed(costs)``.
    """
    home, befores = partition.placement.device_of_stage, partition.placement.before
    for stage in range(1, len(home)):
        before = befores[stage]
        if before is not None and home[before] != home[stage]:
            cut = partition.cuts[stage]
            wants = costs.wants_gradient(cut)
            yield Crossing(before, stage, costs.boundary_bytes[cut], wants=wants)
    for skip in costs.skips:
        source, destination, carrier = carried(skip, partition)
        if home[source] != home[destination]:
            merged = carrier is SkipCarrier.BOUNDARY
            yield Crossing(source, destination, skip.num_bytes, True, merged, skip.wants)
