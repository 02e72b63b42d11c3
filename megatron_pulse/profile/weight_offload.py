"""Layers whose frozen weights are in host memory. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_pulse.backbone.layer_selection import matching_layers
from megatron_pulse.profile.layer_records import ProfiledLayer
from megatron_pulse.profile.profile import Profile


def offload_weights(profile: Profile, patterns: Sequence[str]) -> Profile:
    """``profile`` with the frozen weights of the layers that match ``patterns`` on the host.

    Raises ValueError for a pattern without a match, and if no matching layer has frozen weights.
    """
    if not patterns:
        return profile
    names = [layer.name for layer in profile.layers]
    frozen = [layer.frozen_parameters > 0 for layer in profile.layers]
    found = frozen_layers(names, patterns, frozen) - profile.embedders

    def offloaded(one: Profile) -> Profile:
        layers = enumerate(one.layers)
        return replace(one, layers=tuple(replace(la, offloaded=i in found) for i, la in layers))

    shapes = [offloaded(profile.at_shape(k)) for k in range(len(profile.shapes))]
    return offloaded(profile).with_shapes(shapes)


def frozen_layers(
    names: Sequence[str], patterns: Sequence[str], frozen: Sequence[bool]
) -> frozenset[int]:
    """Layers that match ``patterns`` and have ``frozen`` weights.

    Raises ValueError for a pattern without a match, or if no matching layer has frozen weights.
    """
    found = frozenset(i for i in matching_layers(names, patterns) if frozen[i])
    if not found:
        raise ValueError(
            f"{patterns[0]}: the matching layers have no frozen weights, and trained ones stay on "
            "the device"
        )
    return found


def offloaded_bytes(layer: ProfiledLayer, element_bytes: int) -> int:
    """Bytes of a layer's weights in host memory."""
    if not layer.offloaded:
        return 0
    whole = layer.frozen_parameters - layer.quantized_parameters
    return whole * element_bytes + layer.quantized_bytes
