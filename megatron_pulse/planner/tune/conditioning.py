"""What conditioning moves between the devices of a pipeline, as a run chooses to move it.

The choice is that of ``layout.embedders``: an embedder's results are sent to every device that uses
them, or its parameters are, once a step, if that is less. Then every stage that uses them computes
them: all of their backward with the stage's input gradient, and no activations recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.layout.embedders import (
    GRADIENT_BYTES,
    PARAMETER_GRADIENT_BYTES,
    replicated_bytes,
)
from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.profile.devices import ELEMENT_BYTES
from megatron_pulse.profile.profile import LayerTimes, Profile


@dataclass(frozen=True)
class Sent:
    """What the forward of stage ``source`` sends to ``destination``, the first stage of a device
    that uses it, of every sample; gradients come back."""

    source: int
    destination: int
    forward_bytes: int
    gradient_bytes: int


@dataclass(frozen=True)
class Copied:
    """An embedder on every device, computed in ``stages``: its owner broadcasts
    ``parameter_bytes`` once a step, and gets the sum of ``gradient_bytes`` of all."""

    layer: int
    owner: int
    stages: tuple[int, ...]
    parameter_bytes: int
    gradient_bytes: int


def conditioning(
    profile: Profile, partition: Partition, costs: ChainCosts, samples_per_step: int
) -> tuple[tuple[Sent, ...], tuple[Copied, ...]]:
    """What is sent, and what is copied, where one pipeline trains on ``samples_per_step``.

    ``costs`` are those of one tensor-parallel rank.
    """
    home, size = partition.placement.device_of_stage, ELEMENT_BYTES[profile.dtype]
    sent: dict[int, list[Sent]] = {}
    for edge in profile.conditioning:
        source = partition.stage_of_layer(edge.source)
        first: dict[int, int] = {}
        for stage in sorted(map(partition.stage_of_layer, edge.consumers)):
            first.setdefault(home[stage], stage)
        first.pop(home[source], None)
        there, back = edge.num_bytes, edge.wants * (edge.num_bytes // size * GRADIENT_BYTES)
        sent.setdefault(edge.source, []).extend(
            Sent(source, stage, there, back) for stage in first.values()
        )
    copied = []
    for layer in sorted(profile.embedders & {i for i, messages in sent.items() if messages}):
        others = {home[message.destination] for message in sent[layer]}
        moved = sum(message.forward_bytes + message.gradient_bytes for message in sent[layer])
        count, trained = costs.parameters[layer], costs.trained_parameters[layer]
        if replicated_bytes(len(others), count, trained, size) < samples_per_step * moved:
            owner = home[partition.stage_of_layer(layer)]
            edges = (edge for edge in profile.conditioning if edge.source == layer)
            stages = {partition.stage_of_layer(j) for edge in edges for j in edge.consumers}
            moved_bytes = count * size, trained * PARAMETER_GRADIENT_BYTES
            copied.append(Copied(layer, owner, tuple(sorted(stages)), *moved_bytes))
            del sent[layer]
    return tuple(message for messages in sent.values() for message in messages), tuple(copied)


def with_copies(
    costs: ChainCosts,
    partition: Partition,
    copied: Sequence[Copied],
    times: Sequence[LayerTimes],
    recompute: bool,
) -> ChainCosts:
    """``costs`` as stages compute: those of ``copied`` are with the first layer of each stage that
    uses them. ``times`` are the layers' without recomputation."""
    if not copied:
        return costs
    forward, backward = list(costs.forward_s), list(costs.backward_s)
    weight, saved = list(costs.weight_grad_s), list(costs.saved_bytes)
    for i in (embedder.layer for embedder in copied):
        forward[i] = backward[i] = weight[i] = 0.0
        saved[i] = 0
    for embedder in copied:
        i = embedder.layer
        again = costs.forward_s[i] if recompute and costs.backward_s[i] else 0.0
        for first in (partition.cuts[stage] for stage in embedder.stages):
            forward[first] += costs.forward_s[i]
            backward[first] += costs.backward_s[i] - again
            saved[first] += times[i].saved_bytes if recompute else costs.saved_bytes[i]
    return replace(
        costs,
        forward_s=tuple(forward),
        backward_s=tuple(backward),
        weight_grad_s=tuple(weight),
        saved_bytes=tuple(saved),
    )
