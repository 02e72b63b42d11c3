"""Bytes that a partition moves between devices, depending on how its layout moves skips.

If a stage ends with the layer that pushes a skip, the skip is itself the boundary tensor and is
relayed only once. All bytes are those of one microbatch, forward and gradients together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.layout.crossing import crossings
from megatron_pulse.planner.layout.placement import Partition


@dataclass(frozen=True)
class Volume:
    """Forward and gradient bytes of one microbatch.

    ``links[a, b]`` are the bytes from device a to device b.
    """

    boundary: int
    skip: int
    links: dict[tuple[int, int], int]

    @property
    def total(self) -> int:
        """Total bytes."""
        return self.boundary + self.skip

    def of_device(self, device: int) -> int:
        """Bytes that ``device`` sends and receives."""
        return sum(size for link, size in self.links.items() if device in link)

    @property
    def hottest(self) -> int:
        """Bytes that the busiest device sends and receives."""
        return max((self.of_device(d) for d in {d for link in self.links for d in link}), default=0)


def relayed(costs: ChainCosts, merged: bool = True) -> ChainCosts:
    """Costs of the same chain with every skip relayed at each cut that it crosses.

    Unless ``merged``, a skip that is itself the boundary tensor is sent twice, as in the paper.
    """
    sizes = []
    for cut, boundary in enumerate(costs.boundary_bytes):
        crossing = (s.num_bytes for s in costs.skips if s.source + merged < cut <= s.destination)
        sizes.append(boundary + sum(crossing))
    return replace(costs, boundary_bytes=tuple(sizes), skips=())


def volume(costs: ChainCosts, partition: Partition) -> Volume:
    """Bytes that ``partition`` moves if skips between devices travel directly.

    For relayed skips pass ``relayed(costs)``.
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
