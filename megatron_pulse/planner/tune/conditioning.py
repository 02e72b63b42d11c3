"""What conditioning moves between the devices of a pipeline, as a run chooses to move it.

The choice is that of ``layout.embedders``: an embedder's results are sent to every device that uses
them, or its parameters are, once a step, if that is less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_pulse.planner.layout.embedders import (
    GRADIENT_BYTES,
    PARAMETER_GRADIENT_BYTES,
    replicated_bytes,
)
from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.profile.devices import ELEMENT_BYTES
from megatron_pulse.profile.profile import Profile


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
    """An embedder on every device: its owner broadcasts ``parameter_bytes`` once a step, and gets
    the sum of ``gradient_bytes`` of all."""

    layer: int
    owner: int
    parameter_bytes: int
    gradient_bytes: int


def conditioning(
    profile: Profile, partition: Partition, parameters: Sequence[int], samples_per_step: int
) -> tuple[tuple[Sent, ...], tuple[Copied, ...]]:
    """What is sent, and what is copied, where one pipeline trains on ``samples_per_step``.

    ``parameters`` are those of each layer on one tensor-parallel rank.
    """
    home, size = partition.placement.device_of_stage, ELEMENT_BYTES[profile.dtype]
    sent: dict[int, list[Sent]] = {}
    for edge in profile.conditioning:
        source = partition.stage_of_layer(edge.source)
        first: dict[int, int] = {}
        for stage in sorted(map(partition.stage_of_layer, edge.consumers)):
            first.setdefault(home[stage], stage)
        first.pop(home[source], None)
        there, back = edge.num_bytes, edge.num_bytes // size * GRADIENT_BYTES
        sent.setdefault(edge.source, []).extend(
            Sent(source, stage, there, back) for stage in first.values()
        )
    embedders = {edge.source for edge in profile.conditioning if edge.embedder}
    copied = []
    for layer in sorted(embedders & {i for i, messages in sent.items() if messages}):
        others = {home[message.destination] for message in sent[layer]}
        moved = sum(message.forward_bytes + message.gradient_bytes for message in sent[layer])
        count = parameters[layer]
        if replicated_bytes(len(others), count, size) < samples_per_step * moved:
            owner = home[partition.stage_of_layer(layer)]
            copied.append(Copied(layer, owner, count * size, count * PARAMETER_GRADIENT_BYTES))
            del sent[layer]
    return tuple(message for messages in sent.values() for message in messages), tuple(copied)
