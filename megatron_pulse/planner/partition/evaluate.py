"""Costs of a partition.

Times are for one microbatch. A message costs its sender and its receiver ``Link.time_s`` each, once
forward and once for its gradient, even if no gradient is sent. A skip that crosses between devices
is charged to both. A skip that is itself the boundary tensor is charged too, although the runtime
does not send it twice. Loads are therefore upper bounds. Replicated and sent conditioning is left
out (see ``embedders``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.crossing import crossings
from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.partition.memory import effective_parameters


@dataclass(frozen=True)
class MemoryRule:
    """Memory limit of a device: ``limit_bytes`` (inf: none), or ``limits`` of each if they differ.

    ``bytes_per_parameter`` counts parameter, gradient and optimizer state. A frozen parameter takes
    ``frozen_share`` of that (0 to 1). ``in_flight[s]`` is the number of in-flight microbatches of
    stage s, whose activations are in memory at once. A goal's ``memory`` makes a rule for a
    placement.
    """

    limit_bytes: float
    bytes_per_parameter: float
    in_flight: tuple[float, ...]
    frozen_share: float = 1.0
    limits: tuple[float, ...] = ()

    def of_device(self, device: int) -> MemoryRule:
        """Rule of one device."""
        if not self.limits:
            return self
        return replace(self, limit_bytes=self.limits[device], limits=())

    def weighed(self, costs: ChainCosts) -> tuple[float, ...]:
        """Parameters of each layer; a frozen parameter counts as its share of a trained one."""
        return effective_parameters(costs, self.frozen_share)


@dataclass(frozen=True)
class Evaluation:
    """Costs of a partition: seconds and bytes per microbatch, memory per device."""

    load_s: tuple[float, ...]
    compute_s: tuple[float, ...]
    stage_s: tuple[float, ...]
    memory_bytes: tuple[float, ...]
    boundary_bytes: int
    skip_bytes: int

    @property
    def balance(self) -> float:
        """Computing time of the busiest device over the mean."""
        mean = sum(self.compute_s) / len(self.compute_s)
        return max(self.compute_s) / mean if mean else 1.0


def evaluate(
    costs: ChainCosts,
    partition: Partition,
    link: Link,
    lam: float = 1.0,
    memory: MemoryRule | None = None,
) -> Evaluation:
    """Evaluate ``partition``.

    ``stage_s`` is the paper's measure of a stage (section IV, equation 1): its forward time plus
    ``lam`` times the time to send its output. Bytes are those of forwards, as the runtime sends
    them: a skip that is its stage's boundary tensor counts once. Gradients of trained tensors move
    as many again.
    """
    placed = partition.placement.device_of_stage
    num_devices = partition.placement.num_devices
    compute, load = np.zeros(num_devices), np.zeros(num_devices)
    held = np.zeros(num_devices)
    sent = [0.0] * len(placed)
    boundary = skipped = 0
    for crossing in crossings(costs, partition):
        seconds = link.time_s(crossing.num_bytes)
        load[[placed[crossing.source], placed[crossing.destination]]] += 2 * seconds
        if not crossing.skip:
            sent[crossing.source] = seconds
            boundary += crossing.num_bytes
        elif not crossing.merged:
            skipped += crossing.num_bytes
    stage_s = []
    for stage, device in enumerate(placed):
        layers = slice(partition.cuts[stage], partition.cuts[stage + 1])
        forward = sum(costs.forward_s[layers])
        compute[device] += forward + sum(costs.backward_s[layers])
        if memory is not None:
            held[device] += memory.bytes_per_parameter * sum(memory.weighed(costs)[layers])
            held[device] += memory.in_flight[stage] * sum(costs.saved_bytes[layers])
        stage_s.append(forward + lam * sent[stage])
    return Evaluation(
        tuple((load + compute).tolist()),
        tuple(compute.tolist()),
        tuple(stage_s),
        tuple(held.tolist()),
        boundary,
        skipped,
    )
