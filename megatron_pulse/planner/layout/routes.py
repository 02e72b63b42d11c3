"""Routes of boundaries, skips and conditioning from their producers to their consumers.

================  =============================  ================================================
what stage s has  is given by a forward to       and its gradient by a backward
================  =============================  ================================================
boundary          stage s+1                      to stage s
skip              the stage t that pops it       from t to s, directly
conditioning      the first stage on every       of a device's stages, summed, from the first of
                  device that uses it            them (backwards run from the last to it)
================  =============================  ================================================

Only required gradients are sent back (see ``backbone/gradients.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from megatron_pulse.backbone.chain import Backbone, TensorSpec
from megatron_pulse.backbone.dataflow import required_gradients
from megatron_pulse.planner.layout.crossing import SkipCarrier, skip_carrier
from megatron_pulse.planner.layout.placement import Partition


class Payload(StrEnum):
    """Kind of a delivery or message."""

    BOUNDARY = "boundary"
    SKIP = "skip"
    CONDITIONING = "conditioning"
    ENCODED = "encoded"
    """State that a slice of a frozen component leaves for other slices, or result for the next
    step."""
    PREDICTION = "prediction"
    """Prediction of a forward-only pass for a microbatch, an input of the pass that follows."""

    __hash__ = str.__hash__  # an Enum's own is slow; called for every message

    @property
    def is_carried(self) -> bool:
        """True if the executor's carrier, and no stage, provides and receives the payload."""
        return self in (Payload.ENCODED, Payload.PREDICTION)


class Delivery(NamedTuple):
    """A tensor that a forward of stage ``source`` gives to stage ``destination``.

    The gradient travels back if ``needs_grad``. ``name`` is the name of the skip or conditioning,
    or the index of the boundary tensor.
    """

    payload: Payload
    name: str
    source: int
    destination: int
    needs_grad: bool = True


@dataclass(frozen=True)
class SkipRoute:
    """One skip between stages; ``output_index`` is its index among its layer's outputs.

    ``needs_grad``, here and in ``ConditioningRoute``, is true if a gradient is required.
    """

    name: str
    spec: TensorSpec
    source_stage: int
    destination_stage: int
    output_index: int
    carrier: SkipCarrier
    needs_grad: bool = True


@dataclass(frozen=True)
class ConditioningRoute:
    """A conditioning tensor of stage ``source_stage`` that the stages ``consumer_stages`` use."""

    name: str
    spec: TensorSpec
    source_stage: int
    consumer_stages: tuple[int, ...]
    needs_grad: bool = True

    def first_stage_on(self, partition: Partition, device: int) -> int | None:
        """First stage on ``device`` that uses the conditioning; None if none does."""
        placed = partition.placement.device_of_stage
        return next((s for s in self.consumer_stages if placed[s] == device), None)


@dataclass(frozen=True)
class Routes:
    """Routes of all tensors between the stages of a partitioned backbone."""

    partition: Partition
    boundaries: tuple[tuple[TensorSpec, ...], ...]
    """``boundaries[s]`` are the tensors that enter stage s."""
    skips: tuple[SkipRoute, ...]
    conditioning: tuple[ConditioningRoute, ...]
    needs_grad: tuple[tuple[bool, ...], ...]
    """``needs_grad[s][k]`` is true if ``boundaries[s][k]`` requires a gradient."""
    replicated: frozenset[str] = frozenset()
    """Names of embedder layers that run on every device; their conditioning never travels."""

    @cached_property
    def deliveries(self) -> tuple[Delivery, ...]:
        """All tensors that stages give to others, on the same device or another.

        The stages of a device share one delivery of a conditioning, to the first of them.
        """
        placement = self.partition.placement
        found = [
            Delivery(Payload.BOUNDARY, str(index), before, stage, self.needs_grad[stage][index])
            for stage in range(len(self.boundaries))
            if (before := placement.before[stage]) is not None
            for index in range(len(self.boundaries[stage]))
        ]
        for skip in self.skips:
            if skip.carrier in (SkipCarrier.LOCAL, SkipCarrier.DIRECT):
                ends = skip.source_stage, skip.destination_stage
                found.append(Delivery(Payload.SKIP, skip.name, *ends, skip.needs_grad))
        for edge in self.conditioning:
            for device in range(placement.num_devices):
                first = edge.first_stage_on(self.partition, device)
                if first is not None:
                    ends = edge.source_stage, first
                    found.append(Delivery(Payload.CONDITIONING, edge.name, *ends, edge.needs_grad))
        return tuple(found)

    def given_by(self, stage: int) -> tuple[Delivery, ...]:
        """Deliveries that a forward of ``stage`` makes, and whose gradients its backward waits
        for."""
        return self._by_stage[0].get(stage, ())

    def given_to(self, stage: int) -> tuple[Delivery, ...]:
        """Deliveries that a forward of ``stage`` waits for, and whose gradients its backward
        sends."""
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
    """Trace the routes of ``backbone`` under ``partition``, with ``replicated`` embedders."""
    wanted = required_gradients(backbone)
    skips = []
    for skip in backbone.skips:
        source, destination, carrier = skip_carrier(skip, partition)
        index, needs_grad = skip.output_index, wanted.skips[skip.name]
        skips.append(
            SkipRoute(skip.name, skip.spec, source, destination, index, carrier, needs_grad)
        )
    conditioning = []
    for edge in backbone.conditioning:
        if backbone.layers[edge.source].name in replicated:
            continue
        source = partition.stage_of_layer(edge.source)
        stages = {partition.stage_of_layer(j) for j in edge.consumers} - {source}
        users, needs_grad = tuple(sorted(stages)), wanted.conditioning[edge.name]
        conditioning.append(ConditioningRoute(edge.name, edge.spec, source, users, needs_grad))
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
    """Batch fields that ``stage`` reads, for its layers and for replicated embedders."""
    consumers = [
        i
        for i in routes.partition.layers_of_stage(stage)
        if backbone.layers[i].name not in routes.replicated
    ]
    consumers += embedders_of(backbone, routes, stage)
    read = {name for i in consumers for name in backbone.layers[i].uses}
    return frozenset(read & backbone.batch_fields.keys())
