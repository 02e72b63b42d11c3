"""Bytes that a partition moves between devices, as its layout moves skips.

Where a stage ends with the layer that pushes a skip, the skip is the boundary tensor and is
relayed once, not twice. All bytes are of one microbatch, forward and gradients together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.layout.crossing import crossings
from megatron_pulse.planner.layout.placement import Partition


@dataclass(frozen=True)
class Volume:
    """Forward and gradient bytes of one microbatch.

    ``links[a, b]`` are those from device a to device b; ``sent[d]`` and ``received[d]`` a
    device's.
    """

    boundary: int
    skip: int
    links: dict[tuple[int, int], int]

    @property
    def total(self) -> int:
        """All bytes."""
        return self.boundary + self.skip

    def of_device(self, device: int) -> int:
        """What a device sends and receives."""
        return sum(size for link, size in self.links.items() if device in link)

    @property
    def hottest(self) -> int:
        """The most that one device sends and receives."""
        return max((self.of_device(d) for d in {d for link in self.links for d in link}), default=0)


def relayed(costs: ChainCosts, merged: bool = True) -> ChainCosts:
    """The same chain where every skip is handed on at each cut that it crosses.

    Unless ``merged``, a skip that is the boundary tensor is sent beside it, as in the paper.
    """
    sizes = []
    for cut, boundary in enumerate(costs.boundary_bytes):
        crossing = (s.num_bytes for s in costs.skips if s.source + merged < cut <= s.destination)
        sizes.append(boundary + sum(crossing))
    return replace(costs, boundary_bytes=tuple(sizes), skips=())


def volume(costs: ChainCosts, partition: Partition) -> Volume:
    """What ``partition`` moves when skips between devices travel directly.

    For relayed skips give ``relayed(costs)``.
    """
    home = partition.placement.device_of_stage
    links: dict[tuple[int, int], int] = {}
    boundary = skipped = 0
    for crossing in crossings(costs, partition):
        if crossing.merged:
            continue
        source, destination = home[crossing.source], home[crossing.destination]
        ways = ((source, destination), (destination, source))[: crossing.times]
        for link in ways:
            links[link] = links.get(link, 0) + crossing.num_bytes
        boundary += 0 if crossing.skip else crossing.times * crossing.num_bytes
        skipped += crossing.times * crossing.num_bytes if crossing.skip else 0
    return Volume(boundary, skipped, links)
