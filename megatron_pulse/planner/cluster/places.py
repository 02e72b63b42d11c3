"""Places of a pipeline on unlike devices: kinds of devices, and usable memory.

A place is one pipeline device of all replicas. If replicas are on unlike devices, the place counts
with the slowest of them for each layer, and with the smallest memory: all replicas have the same
cuts and as many microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_pulse.planner.cluster.rank_order import RankOrder


@dataclass(frozen=True)
class Place:
    """One place of a pipeline: names of its ``kinds`` (none if all devices are alike), and bytes
    that planning may use on each device."""

    kinds: tuple[str, ...]
    usable_bytes: float

    @property
    def name(self) -> str:
        """Display name; empty where all devices are alike."""
        return " and ".join(self.kinds)


def places_of(ranks: RankOrder) -> tuple[Place, ...]:
    """Places of a pipeline with these ranks."""
    cluster = ranks.cluster
    if not cluster.mixed:
        return (Place((), cluster.usable_bytes),) * ranks.pipeline
    found = []
    for device in range(ranks.pipeline):
        kinds = {cluster.kind_of(rank) for rank in ranks.of_place(device)}
        names = tuple(sorted(kind.name for kind in kinds))
        found.append(Place(names, min(kind.usable_bytes for kind in kinds)))
    return tuple(found)


def splits_a_kind(ranks: RankOrder) -> bool:
    """True if the ranks of a tensor-parallel group are on unlike devices."""
    kind = ranks.cluster.kind_of
    return ranks.cluster.mixed and any(
        len({kind(ranks.rank(device, replica, shard)) for shard in range(ranks.tensor)}) > 1
        for device in range(ranks.pipeline)
        for replica in range(ranks.data)
    )
