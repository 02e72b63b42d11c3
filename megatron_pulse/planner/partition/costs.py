"""What planning knows of a chain and its devices, and what a partition costs.

Times are of one microbatch. A message costs its sender and its receiver ``Link.time_s``, once
forward and once for its gradient. A skip that crosses between devices is charged to both, also
where it is the boundary tensor itself, which the runtime does not send again: a load is then an
upper bound. Replicated and sent conditioning is left out (see ``embedders``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from megatron_pulse.backbone.chain import Backbone, TensorSpec
    from megatron_pulse.planner.layout.partition import Partition

type Floats = NDArray[np.float64]


@dataclass(frozen=True)
class SkipCost:
    """A skip edge from layer ``source`` to layer ``destination`` and its size."""

    source: int
    destination: int
    num_bytes: int


@dataclass(frozen=True)
class ChainCosts:
    """Every layer's costs at one microbatch size, in chain order.

    ``boundary_bytes[i]`` is what crosses a cut before layer i (the first is not a cut).
    ``saved_bytes`` is what a layer keeps from forward to backward. ``weight_grad_s`` is the part of
    ``backward_s`` that may be put off (empty: unknown).
    """

    names: tuple[str, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    parameters: tuple[int, ...]
    saved_bytes: tuple[int, ...]
    boundary_bytes: tuple[int, ...]
    skips: tuple[SkipCost, ...] = ()
    weight_grad_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        lengths = {
            len(column)
            for column in (
                self.forward_s,
                self.backward_s,
                self.parameters,
                self.saved_bytes,
                self.boundary_bytes,
            )
        }
        if self.weight_grad_s:
            lengths.add(len(self.weight_grad_s))
        if lengths != {len(self.names)}:
            raise ValueError(f"{len(self.names)} layers, but columns of {sorted(lengths)} values")
        values = np.array(
            [self.forward_s, self.backward_s, self.parameters, self.saved_bytes],
            dtype=np.float64,
        )
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise ValueError("costs must be finite and not negative")


@dataclass(frozen=True)
class Link:
    """A connection between pipeline devices, each way; the default costs nothing."""

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")

    def time_s(self, num_bytes: float) -> float:
        """Seconds for one message."""
        return self.latency_s + num_bytes / self.bytes_per_s if num_bytes else 0.0


@dataclass(frozen=True)
class MemoryRule:
    """What a device may hold: ``limit_bytes``.

    ``bytes_per_parameter`` counts parameter, gradient and optimizer state; ``in_flight[s]`` is how
    many microbatches' activations stage s keeps at once.
    """

    limit_bytes: float
    bytes_per_parameter: float
    in_flight: tuple[int, ...]


@dataclass(frozen=True)
class Evaluation:
    """What a partition costs: seconds and bytes of one microbatch, memory of a device."""

    load_s: tuple[float, ...]
    compute_s: tuple[float, ...]
    stage_s: tuple[float, ...]
    memory_bytes: tuple[float, ...]
    boundary_bytes: int
    skip_bytes: int

    @property
    def balance(self) -> float:
        """The largest device's computing time over the mean."""
        mean = sum(self.compute_s) / len(self.compute_s)
        return max(self.compute_s) / mean if mean else 1.0


def evaluate(
    costs: ChainCosts,
    partition: Partition,
    link: Link,
    lam: float = 1.0,
    memory: MemoryRule | None = None,
) -> Evaluation:
    """The costs of ``partition``.

    ``stage_s`` is the paper's measure of a stage (section IV, equation 1): its forward time and
    ``lam`` times the sending of its output. Bytes are forward, as the runtime sends them (a skip
    that is its stage's boundary tensor only once); gradients move as many again.
    """
    placed = partition.placement.device_of_stage
    num_devices = partition.placement.num_devices
    compute, load = np.zeros(num_devices), np.zeros(num_devices)
    held = np.zeros(num_devices)
    stage_s = []
    boundary = skipped = 0
    for stage, device in enumerate(placed):
        layers = slice(partition.cuts[stage], partition.cuts[stage + 1])
        forward = sum(costs.forward_s[layers])
        compute[device] += forward + sum(costs.backward_s[layers])
        if memory is not None:
            held[device] += memory.bytes_per_parameter * sum(costs.parameters[layers])
            held[device] += memory.in_flight[stage] * sum(costs.saved_bytes[layers])
        sent = 0.0
        if stage + 1 < len(placed) and placed[stage + 1] != device:
            size = costs.boundary_bytes[partition.cuts[stage + 1]]
            sent = link.time_s(size)
            load[[device, placed[stage + 1]]] += 2 * sent
            boundary += size
        stage_s.append(forward + lam * sent)
    for skip in costs.skips:
        source = partition.stage_of_layer(skip.source)
        destination = partition.stage_of_layer(skip.destination)
        if placed[source] != placed[destination]:
            load[[placed[source], placed[destination]]] += 2 * link.time_s(skip.num_bytes)
            carried = destination == source + 1 and skip.source + 1 == partition.cuts[destination]
            skipped += 0 if carried else skip.num_bytes
    return Evaluation(
        tuple((load + compute).tolist()),
        tuple(compute.tolist()),
        tuple(stage_s),
        tuple(held.tolist()),
        boundary,
        skipped,
    )


def running_sum(values: Sequence[float]) -> Floats:
    """``[i]`` is the sum of the first i values."""
    return np.concatenate(([0.0], np.cumsum(np.asarray(values, dtype=np.float64))))


def weighted_costs(backbone: Backbone, weights: Sequence[float]) -> ChainCosts:
    """``backbone`` with ``weights`` as forward times and twice that as backward times.

    Bytes are of one sample in bf16; parameters and saved activations are unknown, and so 0.
    """
    if len(weights) != len(backbone.layers):
        raise ValueError(
            f"{backbone.name}: need {len(backbone.layers)} weights, one per layer; got "
            f"{len(weights)}"
        )
    none = (0,) * len(weights)
    return ChainCosts(
        tuple(layer.name for layer in backbone.layers),
        tuple(map(float, weights)),
        tuple(2.0 * weight for weight in weights),
        none,
        none,
        tuple(sum(map(_half_bytes, layer.inputs)) for layer in backbone.layers),
        tuple(SkipCost(s.source, s.destination, _half_bytes(s.spec)) for s in backbone.skips),
    )


def _half_bytes(spec: TensorSpec) -> int:
    return 2 * spec.numel_per_sample
