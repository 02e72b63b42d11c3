"""Transport of skips between stages, and the bytes that cross between devices.

A skip whose ends share a stage is an ordinary autograd edge. A skip from the last layer of a stage
to the next stage is the boundary tensor itself and is not sent twice. A skip whose ends share a
device stays there (collocated). Every other skip goes from its source device straight to its
destination device (routed).
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple, Protocol

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.layout.placement import Partition


class SkipEnds(Protocol):
    """A skip, identified by the layers that it connects."""

    @property
    def source(self) -> int:
        """Index of the layer that pushes the skip."""
        ...

    @property
    def destination(self) -> int:
        """Index of the layer that pops the skip."""
        ...


class SkipCarrier(StrEnum):
    """Means of transport of a skip from its source stage to its destination stage."""

    AUTOGRAD = "autograd"
    BOUNDARY = "boundary"
    LOCAL = "local"
    DIRECT = "direct"


def skip_carrier(skip: SkipEnds, partition: Partition) -> tuple[int, int, SkipCarrier]:
    """Source stage and destination stage of a skip, and its carrier."""
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
    """Tensor that a forward of stage ``source`` sends to stage ``destination`` on another device.

    ``skip`` tells a skip from a boundary. A ``merged`` skip is the boundary tensor itself and is
    not sent again. A gradient travels back if ``needs_grad``.
    """

    source: int
    destination: int
    num_bytes: int
    skip: bool = False
    merged: bool = False
    needs_grad: bool = True

    @property
    def times(self) -> int:
        """Number of transfers: one forward, and one back if a gradient is wanted."""
        return 1 + self.needs_grad


def crossings(costs: ChainCosts, partition: Partition) -> Iterator[Crossing]:
    """Boundaries, then skips, between stages on different devices.

    For relayed skips pass ``relayed(costs)``.
    """
    home, befores = partition.placement.device_of_stage, partition.placement.before
    for stage in range(1, len(home)):
        before = befores[stage]
        if before is not None and home[before] != home[stage]:
            cut = partition.cuts[stage]
            needs_grad = costs.boundary_needs_grad(cut)
            yield Crossing(before, stage, costs.boundary_bytes[cut], needs_grad=needs_grad)
    for skip in costs.skips:
        source, destination, carrier = skip_carrier(skip, partition)
        if home[source] != home[destination]:
            merged = carrier is SkipCarrier.BOUNDARY
            yield Crossing(source, destination, skip.num_bytes, True, merged, skip.needs_grad)
