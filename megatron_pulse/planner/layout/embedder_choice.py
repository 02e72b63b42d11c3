"""Choice for each embedder: run on one device and send its conditioning, or run on every device.

Sending moves, for every sample, the conditioning to each other device that uses it, and the sum of
its gradients back. Replicating moves the embedder's parameters once a step, and the sums of their
gradients back; every device then computes the conditioning itself. The cheaper choice depends on
the number of samples per step. Few samples with long conditioning (projected captions) favour
sending, and many samples favour replicating.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.dataflow import required_gradients
from megatron_pulse.planner.layout.placement import Partition

Policy = Literal["auto", "send", "replicate"]

GRADIENT_BYTES = 8
"""Bytes per element of the gradients of conditioning, which are summed and sent in fp64."""

PARAMETER_GRADIENT_BYTES = 4
"""Bytes per parameter of the gradients of a replicated embedder."""


@dataclass(frozen=True)
class ProvidedConditioning:
    """Conditioning from layer ``source`` to ``consumers``, in bytes per sample.

    ``embedder`` is the name of the layer if every device can run it, else empty.
    """

    source: int
    consumers: tuple[int, ...]
    forward_bytes: int
    gradient_bytes: int
    embedder: str = ""

    def devices(self, partition: Partition) -> set[int]:
        """Devices other than the source's own that use the conditioning."""
        placed = partition.placement.device_of_stage
        used = {placed[partition.stage_of_layer(layer)] for layer in self.consumers}
        return used - {placed[partition.stage_of_layer(self.source)]}


def provided(backbone: Backbone, compute_bytes: int) -> tuple[ProvidedConditioning, ...]:
    """Conditioning that the layers of ``backbone`` provide, with ``compute_bytes`` per element."""
    wanted = required_gradients(backbone).conditioning
    return tuple(
        ProvidedConditioning(
            edge.source,
            edge.consumers,
            edge.spec.bytes_per_sample(compute_bytes),
            wanted[edge.name] * edge.spec.numel_per_sample * GRADIENT_BYTES,
            layer.name if (layer := backbone.layers[edge.source]).embedder else "",
        )
        for edge in backbone.conditioning
    )


@dataclass(frozen=True)
class EmbedderChoice:
    """An embedder, the bytes between devices per step for each choice, and the choice made."""

    layer: str
    sent_bytes: int
    replicated_bytes: int
    replicated: bool


def choose_embedders(
    edges: Iterable[ProvidedConditioning],
    partition: Partition,
    parameters: Sequence[int],
    samples_per_step: int,
    compute_bytes: int,
    policy: Policy = "auto",
    trained: Sequence[int] | None = None,
) -> dict[int, EmbedderChoice]:
    """Choose for every embedder among the sources of ``edges``; keys are the embedders' layers.

    ``parameters`` are those of each layer on one tensor-parallel rank, of which ``trained`` (None:
    all) have gradients. ``samples_per_step`` counts the samples of one pipeline per step.
    ``compute_bytes`` is the size of an element of parameters and activations. Conditioning that
    only the embedder's own device uses is neither sent nor replicated.
    """
    of_embedder: dict[int, list[ProvidedConditioning]] = {}
    for edge in edges:
        if edge.embedder:
            of_embedder.setdefault(edge.source, []).append(edge)
    choices = {}
    for layer, given in sorted(of_embedder.items()):
        users = [edge.devices(partition) for edge in given]
        sent = samples_per_step * sum(
            len(devices) * (edge.forward_bytes + edge.gradient_bytes)
            for edge, devices in zip(given, users, strict=True)
        )
        gradients = parameters[layer] if trained is None else trained[layer]
        replicated = len(set().union(*users)) * (
            parameters[layer] * compute_bytes + gradients * PARAMETER_GRADIENT_BYTES
        )
        chosen = bool(sent) and (policy == "replicate" or (policy == "auto" and replicated < sent))
        choices[layer] = EmbedderChoice(given[0].embedder, sent, replicated, chosen)
    return choices
