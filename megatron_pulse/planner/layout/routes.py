"""How each skip and each conditioning tensor gets from its producer to its consumers.

A skip whose ends share a stage is an ordinary autograd edge; one that leaves the last layer of a
stage for the next stage is the boundary tensor itself and is not sent twice; one whose ends share
a device stays there; every other goes from its source device straight to its destination.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megatron_pulse.backbone.chain import Backbone, TensorSpec
from megatron_pulse.planner.layout.placement import Partition


class Carrier(StrEnum):
    """What carries a skip from its source stage to its destination stage."""

    AUTOGRAD = "autograd"
    BOUNDARY = "boundary"
    LOCAL = "local"
    DIRECT = "direct"


@dataclass(frozen=True)
class SkipRoute:
    """One skip between stages; ``output_index`` is its index among its layer's outputs."""

    name: str
    spec: TensorSpec
    source_stage: int
    destination_stage: int
    output_index: int
    carrier: Carrier


@dataclass(frozen=True)
class ConditioningRoute:
    """A tensor of stage ``source_stage`` that the stages ``consumer_stages`` use."""

    name: str
    spec: TensorSpec
    source_stage: int
    consumer_stages: tuple[int, ...]

    def first_stage_on(self, partition: Partition, device: int) -> int | None:
        """The first stage on ``device`` that uses it; None where none does."""
        placed = partition.placement.device_of_stage
        return next((s for s in self.consumer_stages if placed[s] == device), None)


@dataclass(frozen=True)
class Routes:
    """All edges of a partitioned backbone, stage by stage."""

    partition: Partition
    boundaries: tuple[tuple[TensorSpec, ...], ...]
    """``boundaries[s]`` are the tensors that enter stage s."""
    skips: tuple[SkipRoute, ...]
    conditioning: tuple[ConditioningRoute, ...]
    replicated: frozenset[str] = frozenset()
    """Embedders (layer names) that run on every device: what they provide never travels."""

    def skips_into(self, stage: int) -> tuple[SkipRoute, ...]:
        """Skips popped in ``stage`` that were pushed in another stage."""
        return tuple(
            r
            for r in self.skips
            if r.destination_stage == stage and r.carrier is not Carrier.AUTOGRAD
        )

    def skips_out_of(self, stage: int) -> tuple[SkipRoute, ...]:
        """Skips pushed in ``stage`` that travel on their own (not as the boundary)."""
        return tuple(
            r
            for r in self.skips
            if r.source_stage == stage and r.carrier in (Carrier.LOCAL, Carrier.DIRECT)
        )

    def conditioning_into(self, stage: int) -> tuple[ConditioningRoute, ...]:
        """Conditioning used in ``stage`` and computed in another stage."""
        return tuple(c for c in self.conditioning if stage in c.consumer_stages)

    def conditioning_out_of(self, stage: int) -> tuple[ConditioningRoute, ...]:
        """Conditioning computed in ``stage`` and used in other stages."""
        return tuple(c for c in self.conditioning if c.source_stage == stage and c.consumer_stages)


def trace_routes(
    backbone: Backbone, partition: Partition, replicated: frozenset[str] = frozenset()
) -> Routes:
    """The routes of ``backbone`` under ``partition`` with these embedders on every device."""
    placed = partition.placement.device_of_stage
    skips = []
    for skip in backbone.skips:
        source = partition.stage_of_layer(skip.source)
        destination = partition.stage_of_layer(skip.destination)
        if source == destination:
            carrier = Carrier.AUTOGRAD
        elif destination == source + 1 and skip.source == partition.cuts[destination] - 1:
            carrier = Carrier.BOUNDARY
        elif placed[source] == placed[destination]:
            carrier = Carrier.LOCAL
        else:
            carrier = Carrier.DIRECT
        skips.append(
            SkipRoute(skip.name, skip.spec, source, destination, skip.output_index, carrier)
        )
    conditioning = []
    for edge in backbone.conditioning:
        if backbone.layers[edge.source].name in replicated:
            continue
        source = partition.stage_of_layer(edge.source)
        stages = {partition.stage_of_layer(j) for j in edge.consumers} - {source}
        conditioning.append(ConditioningRoute(edge.name, edge.spec, source, tuple(sorted(stages))))
    boundaries = tuple(backbone.layers[first].inputs for first in partition.cuts[:-1])
    return Routes(partition, boundaries, tuple(skips), tuple(conditioning), replicated)


def embedders_of(backbone: Backbone, routes: Routes, stage: int) -> tuple[int, ...]:
    """Layers of the replicated embedders whose conditioning ``stage`` uses, in chain order."""
    used = {
        name for i in routes.partition.layers_of_stage(stage) for name in backbone.layers[i].uses
    }
    return tuple(
        i
        for i, layer in enumerate(backbone.layers)
        if layer.name in routes.replicated and used & layer.provides.keys()
    )


def batch_fields_of(backbone: Backbone, routes: Routes, stage: int) -> frozenset[str]:
    """The batch fields that ``stage`` reads, for its layers and for replicated embedders."""
    readers = [
        i
        for i in routes.partition.layers_of_stage(stage)
        if backbone.layers[i].name not in routes.replicated
    ]
    readers += embedders_of(backbone, routes, stage)
    read = {name for i in readers for name in backbone.layers[i].uses}
    return frozenset(read & backbone.batch_fields.keys())
