"""Conditioning traffic between the devices of a pipeline, as a run chooses it.

The choice is that of ``layout.embedders``. Either an embedder's results are sent to every device
that uses them, or its parameters are broadcast once a step, if that is less traffic. In the second
case every stage that uses the results computes the embedder. Its whole backward then runs with the
stage's input gradient, and its activations are not recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.layout.embedder_choice import (
    GRADIENT_BYTES,
    PARAMETER_GRADIENT_BYTES,
    ProvidedConditioning,
    choose_embedders,
)
from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.profile.layer_records import LayerTimes
from megatron_pulse.profile.profile import Profile
from megatron_pulse.profile.roofline import ELEMENT_BYTES


@dataclass(frozen=True)
class ConditioningMessage:
    """Bytes per sample sent from stage ``source`` to ``destination``, the first stage of a device
    that uses the results. Gradients come back."""

    source: int
    destination: int
    forward_bytes: int
    gradient_bytes: int


@dataclass(frozen=True)
class ReplicatedEmbedder:
    """Embedder replicated on every device and computed in ``stages``.

    Once a step its owner broadcasts ``parameter_bytes`` and receives the sum of ``gradient_bytes``
    of all devices.
    """

    layer: int
    owner: int
    stages: tuple[int, ...]
    parameter_bytes: int
    gradient_bytes: int


def conditioning(
    profile: Profile, partition: Partition, costs: ChainCosts, samples_per_step: int
) -> tuple[tuple[ConditioningMessage, ...], tuple[ReplicatedEmbedder, ...]]:
    """Messages and replicated embedders of one pipeline that trains on ``samples_per_step``.

    ``costs`` are those of one tensor-parallel rank.
    """
    home, size = partition.placement.device_of_stage, ELEMENT_BYTES[profile.dtype]
    edges = [
        ProvidedConditioning(
            edge.source,
            edge.consumers,
            edge.num_bytes,
            edge.needs_grad * (edge.num_bytes // size * GRADIENT_BYTES),
            profile.layers[edge.source].name if edge.embedder else "",
        )
        for edge in profile.conditioning
    ]
    choices = choose_embedders(
        edges,
        partition,
        costs.parameters,
        samples_per_step,
        size,
        trained=costs.trained_parameters,
    )
    copies = {layer for layer, choice in choices.items() if choice.replicated}
    sent = []
    for edge in edges:
        if edge.source in copies:
            continue
        stages = sorted(map(partition.stage_of_layer, edge.consumers))
        source = partition.stage_of_layer(edge.source)
        for device in sorted(edge.devices(partition)):
            first = next(stage for stage in stages if home[stage] == device)
            sent.append(ConditioningMessage(source, first, edge.forward_bytes, edge.gradient_bytes))
    copied = []
    for layer in sorted(copies):
        consumers = {j for edge in edges if edge.source == layer for j in edge.consumers}
        stages = sorted(set(map(partition.stage_of_layer, consumers)))
        there = costs.parameters[layer] * size
        back = costs.trained_parameters[layer] * PARAMETER_GRADIENT_BYTES
        owner = home[partition.stage_of_layer(layer)]
        copied.append(ReplicatedEmbedder(layer, owner, tuple(stages), there, back))
    return tuple(sent), tuple(copied)


def with_copies(
    costs: ChainCosts,
    partition: Partition,
    copied: Sequence[ReplicatedEmbedder],
    times: Sequence[LayerTimes],
    recompute: frozenset[int],
    of_device: Sequence[ChainCosts],
) -> ChainCosts:
    """Costs with those of replicated embedders moved to the first layer of each stage that uses
    them.

    ``times`` are those of the layers without recomputation. ``of_device`` are the whole chain's
    costs on each pipeline device, as a stage computes an embedder on its own device.
    """
    if not copied:
        return costs
    home = partition.placement.device_of_stage
    forward, backward = list(costs.forward_s), list(costs.backward_s)
    split_forward = list(costs.split_forward_s or costs.forward_s)
    split_backward = list(costs.split_backward_s or costs.backward_s)
    weight, saved = list(costs.weight_grad_s), list(costs.saved_bytes)
    recompute_s, recompute_bytes = list(costs.recompute_s), list(costs.recompute_bytes)
    wgrad_bytes = list(costs.wgrad_bytes or costs.saved_bytes)
    shared = list(costs.shared_bytes)
    for i in (embedder.layer for embedder in copied):
        for column in (forward, backward, split_forward, split_backward, weight, recompute_s):
            column[i] = 0.0
        saved[i] = recompute_bytes[i] = wgrad_bytes[i] = 0
        if i + 1 < len(shared):  # a shared input is now saved by the next layer alone
            saved[i + 1] += shared[i + 1]
            shared[i + 1] = 0
    for embedder in copied:
        i = embedder.layer
        for stage in embedder.stages:
            first, own = partition.cuts[stage], of_device[home[stage]]
            again = own.forward_s[i] if i in recompute and own.backward_s[i] else 0.0
            for column in (forward, split_forward):
                column[first] += own.forward_s[i]
            for column in (backward, split_backward):
                column[first] += own.backward_s[i] - again
            held = times[i].saved_bytes if i in recompute else costs.saved_bytes[i]
            saved[first] += held
            wgrad_bytes[first] += held
    return replace(
        costs,
        forward_s=tuple(forward),
        backward_s=tuple(backward),
        weight_grad_s=tuple(weight),
        split_forward_s=tuple(split_forward),
        split_backward_s=tuple(split_backward),
        saved_bytes=tuple(saved),
        recompute_s=tuple(recompute_s),
        recompute_bytes=tuple(recompute_bytes),
        wgrad_bytes=tuple(wgrad_bytes),
        shared_bytes=tuple(shared),
    )
