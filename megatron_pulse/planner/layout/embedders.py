"""Where embedders run: on one device that sends what they compute, or on every device.

Sending moves, for every sample, the conditioning to each other device that uses it and the sum of
its gradients back. Replicating moves the embedder's parameters once a step and the sums of their
gradients back; every device then computes the conditioning itself. Which is less depends on the
number of samples per step: few samples with long conditioning (projected captions) favour
sending, many favour replicating.
"""

from __future__ import annotations

from collections.abc import Sequence
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
class EmbedderChoice:
    """One embedder: the bytes between devices per step either way, and which way was chosen."""

    layer: str
    sent_bytes: int
    replicated_bytes: int
    replicated: bool


def choose_embedders(
    backbone: Backbone,
    partition: Partition,
    parameters: Sequence[int],
    samples_per_step: int,
    compute_bytes: int,
    policy: Policy = "auto",
    trained: Sequence[int] | None = None,
) -> tuple[EmbedderChoice, ...]:
    """A choice for every embedder of ``backbone``.

    ``parameters`` are those of each layer on one tensor-parallel rank, of which ``trained`` (None:
    all) have gradients, ``samples_per_step`` what one pipeline trains on per step,
    ``compute_bytes`` the size of an element of parameters and activations. What only the embedder's
    own device uses is neither sent nor replicated.
    """
    placed = partition.placement.device_of_stage
    wanted = wanted_gradients(backbone).conditioning
    choices = []
    for i, layer in enumerate(backbone.layers):
        if not layer.embedder:
            continue
        home = placed[partition.stage_of_layer(i)]
        sent, others = 0, set()
        for edge in backbone.conditioning:
            if edge.source != i:
                continue
            users = {placed[partition.stage_of_layer(j)] for j in edge.consumers} - {home}
            others |= users
            per_sample = edge.spec.bytes_per_sample(compute_bytes)
            if wanted[edge.name]:
                per_sample += edge.spec.numel_per_sample * GRADIENT_BYTES
            sent += len(users) * samples_per_step * per_sample
        gradients = parameters[i] if trained is None else trained[i]
        replicated = replicated_bytes(len(others), parameters[i], gradients, compute_bytes)
        chosen = bool(others) and (
            policy == "replicate" or (policy == "auto" and replicated < sent)
        )
        choices.append(EmbedderChoice(layer.name, sent, replicated, chosen))
    return tuple(choices)


def replicated_bytes(copies: int, parameters: int, trained: int, compute_bytes: int) -> int:
    """Bytes that copies of an embedder take a step: its parameters there, the gradients of those
    that are trained back."""
    return copies * (parameters * compute_bytes + trained * PARAMETER_GRADIENT_BYTES)
