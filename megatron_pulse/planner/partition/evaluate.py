"""What a partition costs.

Times are of one microbatch. A message costs its sender and its receiver ``Link.time_s``, once
forward and once for its gradient, wanted or not. A skip that crosses between devices is charged to
both, also where it is the boundary tensor itself, which the runtime does not send again: a load is
then an upper bound. Replicated and sent conditioning is left out (see ``embedders``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.cluster.link import Link
from megatron_pulse.planner.layout.crossing import crossings
from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.partition.memory import weighed_parameters


@dataclass(frozen=True)
class MemoryRule:
    """What a device may hold: ``limit_bytes`` (inf: anything).

    ``bytes_per_parameter`` counts parameter, gradient and optimizer state, of which a frozen
    parameter takes ``frozen_share`` (0 to 1); ``in_flight[s]`` is how many microbatches'
    activations stage s keeps at once, one number for each stage. A goal's ``memory`` makes one for
    a placement.
    """

    limit_bytes: float
    bytes_per_parameter: float
    in_flight: tuple[float, ...]
    frozen_share: float = 1.0

    def weighed(self, costs: ChainCosts) -> tuple[float, ...]:
        """Each layer's parameters, a frozen one counted as what it takes of a trained one."""
        return weighed_parameters(costs, self.frozen_share)


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
    that is its stage's boundary tensor only once); gradients of what is trained move
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
