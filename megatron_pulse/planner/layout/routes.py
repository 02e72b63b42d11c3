"""How boundaries, skips and conditioning get from their producers to their consumers.

================  =============================  ================================================
what stage s has  is given by a forward to       and its gradient by a backward
================  =============================  ================================================
boundary          stage s+1                      to stage s
skip              the stage t that pops it       from t to s, directly
conditioning      the first stage on every       of a device's stages, summed, from the first of
                  device that uses it            them (backwards run from the last to it)
================  =============================  ================================================

Only gradients that something wants go back (see ``backbone/gradients.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from megatron_pulse.backbone.chain import Backbone, TensorSpec
from megatron_pulse.backbone.gradients import wanted_gradients
from megatron_pulse.planner.layout.crossing import SkipCarrier, carried
from megatron_pulse.planner.layout.placement import Partition


class Payload(StrEnum):
    """What is handed on."""

    BOUNDARY = "boundary"
    SKIP = "skip"
    CONDITIONING = "conditioning"
    ENCODED = "encoded"
    """What slices of a frozen component leave for each other, and what the next step reads."""
    PREDICTION = "prediction"
    """What a forward pass makes of a microbatch, for the input of the pass that follows."""

    __hash__ = str.__hash__  # as of operations' kinds: looked up for every message

    @property
    def is_carried(self) -> bool:
        """Whether no stage gives or takes it: the executor's carrier does."""
        return self in (Payload.ENCODED, Payload.PREDICTION)


class Delivery(NamedTuple):
    """A tensor that a forward of stage ``source`` gives to stage ``destination``.

    Its gradient goes back, where it ``wants`` one. ``name`` is the skip's or the conditioning's, or
    the index of the boundary tensor.
    """

    payload: Payload
    name: str
    source: int
    destination: int
    wants: bool = True


@dataclass(frozen=True)
class SkipRoute:
    """One skip between stages; ``output_index`` is its index among its layer's outputs.

    ``wants`` says, here and in ``ConditioningRoute``, whether it wants a gradient.
    """

    name: str
    spec: TensorSpec
    source_stage: int
    destination_stage: int
    output_index: int
    carrier: SkipCarrier
    wants: bool = True


@dataclass(frozen=True)
class ConditioningRoute:
    """A tensor of stage ``source_stage`` that the stages ``consumer_stages`` use."""

    name: str
    spec: TensorSpec
    source_stage: int
    consumer_stages: tuple[int, ...]
    wants: bool = True

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
    wants: tuple[tuple[bool, ...], ...]
    """``wants[s][k]``: whether the tensor ``boundaries[s][k]`` wants a gradient."""
    replicated: frozenset[str] = frozenset()
    """Embedders (layer names) that run on every device: what they provide never travels."""

    @cached_property
    def deliveries(self) -> tuple[Delivery, ...]:
        """Everything that stages give to others, on their own device or on another.

        A device's stages share a conditioning, which comes to the first of them.
        """
        placement = self.partition.placement
        found = [
            Delivery(Payload.BOUNDARY, str(index), before, stage, self.wants[stage][index])
            for stage in range(len(self.boundaries))
            if (before := placement.before[stage]) is not None
            for index in range(len(self.boundaries[stage]))
        ]
        for skip in self.skips:
            if skip.carrier in (SkipCarrier.LOCAL, SkipCarrier.DIRECT):
                ends = skip.source_stage, skip.destination_stage
                found.append(Delivery(Payload.SKIP, skip.name, *ends, skip.wants))
        for edge in self.conditioning:
            for device in range(placement.num_devices):
                first = edge.first_stage_on(self.partition, device)
                if first is not None:
                    ends = edge.source_stage, first
                    found.append(Delivery(Payload.CONDITIONING, edge.name, *ends, edge.wants))
        return tuple(found)

    def given_by(self, stage: int) -> tuple[Delivery, ...]:
        """What a forward of ``stage`` gives, and a backward waits for the gradients of."""
        return self._by_stage[0].get(stage, ())

    def given_to(self, stage: int) -> tuple[Delivery, ...]:
        """What a forward of ``stage`` waits for, and a backward gives the gradients of."""
        return self._by_stage[1].get(stage, ())

    @cached_property
    def _by_stage(self) -> tuple[dict[int, tuple[Delivery, ...]], dict[int, tuple[Delivery, ...]]]:
        given: dict[int, tuple[Delivery, ...]] = {}
        taken: dict[int, tuple[Delivery, ...]] = {}
        for delivery in self.deliveries:
            given[delivery.source] = (*given.get(delivery.source, ()), delivery)
            taken[delivery.destination] = (*taken.get(delivery.destination, ()), delivery)
        return given, taken

    def skips_into(self, stage: int) -> tuple[SkipRoute, ...]:
        """Skips popped in ``stage`` that were pushed in another stage."""
        return tuple(
            r
            for r in self.skips
            if r.destination_stage == stage and r.carrier is not SkipCarrier.AUTOGRAD
        )

    def skips_out_of(self, stage: int) -> tuple[SkipRoute, ...]:
        """Skips pushed in ``stage`` that travel on their own (not as the boundary)."""
        return tuple(
            r
            for r in self.skips
            if r.source_stage == stage and r.carrier in (SkipCarrier.LOCAL, SkipCarrier.DIRECT)
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
    wanted = wanted_gradients(backbone)
    skips = []
    for skip in backbone.skips:
        source, destination, carrier = carried(skip, partition)
        index, wants = skip.output_index, wanted.skips[skip.name]
        skips.append(SkipRoute(skip.name, skip.spec, source, destination, index, carrier, wants))
    conditioning = []
    for edge in backbone.conditioning:
        if backbone.layers[edge.source].name in replicated:
            continue
        source = partition.stage_of_layer(edge.source)
        stages = {partition.stage_of_layer(j) for j in edge.consumers} - {source}
        users, wants = tuple(sorted(stages)), wanted.conditioning[edge.name]
        conditioning.append(ConditioningRoute(edge.name, edge.spec, source, users, wants))
    firsts = partition.cuts[:-1]
    return Routes(
        partition,
        tuple(backbone.layers[first].inputs for first in firsts),
        tuple(skips),
        tuple(conditioning),
        tuple(wanted.boundaries[first] for first in firsts),
        replicated,
    )


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
