"""Where embedders run: on one device that sends what they compute, or on every device.

Sending moves, for every sample, the conditioning to each other device that uses it and the sum of
its gradients back. Replicating moves the embedder's parameters once a step and the sums of their
gradients back; every device then computes the conditioning itself. Which is less depends on the
number of samples per step: few samples with long conditioning (projected captions) favour
sending, many favour replicating.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.gradients import wanted_gradients
from megatron_pulse.planner.layout.placement import Partition

Policy = Literal["auto", "send", "replicate"]

GRADIENT_BYTES = 8
"""Of an element of conditioning, whose gradients are summed and sent in fp64."""

PARAMETER_GRADIENT_BYTES = 4
"""Of a parameter of an embedder's copy."""


@dataclass(frozen=True)
class Provided:
    """What layer ``source`` provides to ``consumers``: bytes of a sample, and of its gradient back.

    ``embedder``: the name of the layer, if every device can run it.
    """

    source: int
    consumers: tuple[int, ...]
    forward_bytes: int
    gradient_bytes: int
    embedder: str = ""

    def devices(self, partition: Partition) -> set[int]:
        """The other devices that use it."""
        placed = partition.placement.device_of_stage
        used = {placed[partition.stage_of_layer(layer)] for layer in self.consumers}
        return used - {placed[partition.stage_of_layer(self.source)]}


def provided(backbone: Backbone, compute_bytes: int) -> tuple[Provided, ...]:
    """What the layers of ``backbone`` provide, with elements of ``compute_bytes``."""
    wanted = wanted_gradients(backbone).conditioning
    return tuple(
        Provided(
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
    """One embedder: the bytes between devices per step either way, and which way was chosen."""

    layer: str
    sent_bytes: int
    replicated_bytes: int
    replicated: bool


def choose_embedders(
    edges: Iterable[Provided],
    partition: Partition,
    parameters: Sequence[int],
    samples_per_step: int,
    compute_bytes: int,
    policy: Policy = "auto",
    trained: Sequence[int] | None = None,
) -> dict[int, EmbedderChoice]:
    """A choice for every embedder among the sources of ``edges``, by its layer.

    ``parameters`` are those of each layer on one tensor-parallel rank, of which ``trained`` (None:
    all) have gradients, ``samples_per_step`` what one pipeline trains on per step,
    ``compute_bytes`` the size of an element of parameters and activations. What only the embedder's
    own device uses is neither sent nor replicated.
    """
    of_embedder: dict[int, list[Provided]] = {}
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
