"""Frozen weights in host memory, and what the device pays for them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_pulse.planner.cluster.cluster import Cluster, ClusterError
from megatron_pulse.profile.layer_records import LayerTimes, ProfiledLayer
from megatron_pulse.profile.profile import Profile
from megatron_pulse.profile.roofline import ELEMENT_BYTES
from megatron_pulse.profile.weight_offload import offloaded_bytes

_SECONDS = ("forward_s", "input_grad_s", "split_forward_s", "split_input_grad_s")
_PEAKS = ("peak_bytes", "forward_bytes")


def with_weight_copies(profile: Profile, cluster: Cluster) -> Profile:
    """``profile`` as a device of ``cluster`` runs it: offloaded weights are copied before use.

    A pass of an offloaded layer takes the longer of its own time and the copy's, which overlaps
    with the layer before. Two layers' weights are in its working memory. Its activations are kept
    or fully recomputed. Raises ClusterError without a link to the host.
    """
    if not profile.offloads_weights:
        return profile
    if (host := cluster.to_host) is None:
        raise ClusterError(
            f"cluster {cluster.name!r} has no link to the host, which weight offload requires. "
            "Write links.host into its file ('pulse probe' measures it), or leave out "
            "--offload-weights"
        )
    size = ELEMENT_BYTES[profile.dtype]
    moved = [offloaded_bytes(layer, size) for layer in profile.layers]
    beside = [own + most for own, most in zip(moved, _neighbours(moved), strict=True)]

    def copied(row: LayerTimes, num_bytes: int, held: int) -> LayerTimes:
        row = replace(row, selective_bytes=0, selective_peak_bytes=0, selective_s=0.0)
        if not num_bytes:
            return row
        seconds = host.time_s(num_bytes)
        times = {n: max(getattr(row, n), seconds) for n in _SECONDS if getattr(row, n)}
        peaks = {n: getattr(row, n) + held for n in _PEAKS if getattr(row, n)}
        return replace(row, **times, **peaks)

    def all_copied(
        times: Mapping[int, Sequence[LayerTimes]],
    ) -> dict[int, tuple[LayerTimes, ...]]:
        return {number: tuple(map(copied, rows, moved, beside)) for number, rows in times.items()}

    kinds = {
        name: replace(kind, times=all_copied(kind.times)) for name, kind in profile.kinds.items()
    }
    layers = tuple(map(_on_device, profile.layers))
    return replace(profile, layers=layers, times=all_copied(profile.times), kinds=kinds)


def _neighbours(moved: Sequence[int]) -> list[int]:
    """Larger of the bytes of the layers before and after each."""
    padded = [0, *moved, 0]
    return [max(a, b) for a, b in zip(padded, padded[2:], strict=False)]


def _on_device(layer: ProfiledLayer) -> ProfiledLayer:
    """``layer`` without its offloaded weights."""
    if not layer.offloaded:
        return layer
    trained = layer.trained_parameters
    return replace(
        layer,
        parameters=trained,
        frozen_parameters=0,
        sharded_parameters=min(layer.sharded_parameters, trained),
        quantized_parameters=0,
        quantized_bytes=0,
    )
