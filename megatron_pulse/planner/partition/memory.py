"""How much of a device's memory training takes, by the rules of Megatron and of the schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.layout.crossing import (
    Crossing,
    SkipCarrier,
    SkipEnds,
    carried,
)
from megatron_pulse.planner.layout.placement import Partition, Placement
from megatron_pulse.profile.devices import ELEMENT_BYTES


@dataclass(frozen=True)
class ParameterState:
    """What a run keeps of a trained parameter otherwise than Megatron by default: its average in
    fp32 (``averages``), with bfloat16 the sum of its gradients in that (``half_gradients``), or the
    optimizer's state and averages in the node's memory (``host_optimizer``)."""

    averages: bool = False
    half_gradients: bool = False
    host_optimizer: bool = False

    def gradient_bytes(self, dtype: str) -> int:
        """Of a gradient as it is summed over microbatches and replicas; on its way to the host a
        float16 one is summed in fp32."""
        half = {"bfloat16": self.half_gradients, "float16": not self.host_optimizer}
        return 2 if half.get(dtype) else 4


DEFAULT_STATE = ParameterState()
"""Megatron's."""


def bytes_per_parameter(
    dtype: str,
    distributed_optimizer: bool = False,
    data_parallel: int = 1,
    state: ParameterState = DEFAULT_STATE,
) -> float:
    """Bytes of a parameter with its gradient and Adam's state while a step computes.

    ========  =====================================  ==========================================
    dtype     on every replica                       divided by the distributed optimizer
    ========  =====================================  ==========================================
    bfloat16  2 parameter, 4 fp32 gradient (or 2)    4 fp32 copy, 8 both moments
    float16   2 parameter, 2 gradient (or 4 fp32)    4 fp32 copy, 8 both moments
    float32   4 parameter, 4 gradient                8 both moments
    ========  =====================================  ==========================================

    An average has 4 more, divided too. With the optimizer on the host all that is divided is
    there (``host_bytes_per_parameter``). What it has while it works is ``stepping_bytes``.
    Source: Megatron-Core's guide to the distributed optimizer, whose figures have both. Raises
    KeyError for other dtypes.
    """
    replicas = data_parallel if distributed_optimizer else 1
    kept = ELEMENT_BYTES[dtype] + state.gradient_bytes(dtype)
    if state.host_optimizer:
        return kept
    copy = 0 if dtype == "float32" else 4
    return kept + (copy + 8 + 4 * state.averages) / replicas


def host_bytes_per_parameter(dtype: str, data_parallel: int, state: ParameterState) -> float:
    """Bytes of a parameter in the node's memory for each replica, where the optimizer is there:
    fp32 copy, gradient and both moments, an average, and what the copy is rounded to."""
    if not state.host_optimizer:
        return 0.0
    rounded = ELEMENT_BYTES[dtype] if dtype != "float32" else 0
    return (4 + 4 + 8 + 4 * state.averages + rounded) / data_parallel


def stepping_bytes(
    dtype: str,
    distributed_optimizer: bool = False,
    data_parallel: int = 1,
    state: ParameterState = DEFAULT_STATE,
) -> float:
    """Bytes of a parameter that are there while the optimizer works, and no activation is: an fp32
    copy of a gradient that is summed in half precision. It goes before the next forward."""
    if state.host_optimizer:  # there they are fp32
        return 0.0
    replicas = data_parallel if distributed_optimizer else 1
    return (4 if state.gradient_bytes(dtype) < 4 else 0) / replicas


def weighed_parameters(costs: ChainCosts, share: float) -> tuple[float, ...]:
    """Each layer's parameters, where a frozen one counts as ``share`` of a trained one."""
    if not costs.trained:
        return costs.parameters
    pairs = zip(costs.parameters, costs.trained, strict=True)
    return tuple(trained + share * (whole - trained) for whole, trained in pairs)


def kept_bytes(costs: ChainCosts, partition: Partition) -> tuple[float, ...]:
    """What a forward of each stage keeps until its backward.

    A stage without a backward keeps nothing, but what it hands on waits where it is taken. That is
    counted as its own: it must not run ahead without bound.
    """
    saved, backward = map(partition.per_stage, (kept_of_layers(costs, partition), costs.backward_s))
    given = (*(costs.boundary_bytes[cut] for cut in partition.cuts[1:-1]), 0)
    return tuple(
        float(kept if seconds else max(kept, waiting))
        for kept, seconds, waiting in zip(saved, backward, given, strict=True)
    )


def kept_of_layers(costs: ChainCosts, partition: Partition) -> tuple[float, ...]:
    """What a forward of each layer keeps until its backward. What a layer that is computed again
    pops, it keeps, unless the skip's own stage does."""
    layers = list(costs.saved_bytes)
    for first in partition.cuts[:-1]:
        layers[first] += costs.shared_bytes[first] if costs.shared_bytes else 0
    if any(costs.recompute_s):
        for skip in costs.skips:
            _, _, carrier = carried(skip, partition)
            alone = carrier is SkipCarrier.LOCAL and sent_alone(skip, partition)
            if costs.recompute_s[skip.destination] and (alone or carrier is SkipCarrier.DIRECT):
                layers[skip.destination] += skip.num_bytes
    return tuple(layers)


def sent_alone(skip: SkipEnds, partition: Partition) -> bool:
    """Whether a skip leaves a stage's last layer, so that no other of its layers keeps it."""
    return skip.source + 1 == partition.cuts[partition.stage_of_layer(skip.source) + 1]


def waiting_bytes(costs: ChainCosts, partition: Partition) -> tuple[float, ...]:
    """What each stage still holds between the input gradient and the weight gradient."""
    return tuple(map(float, partition.per_stage(costs.waiting_bytes or costs.saved_bytes)))


def carried_bytes(
    crossed: Iterable[Crossing], placement: Placement, num_microbatches: int
) -> tuple[float, ...]:
    """For each device, about what buffers of messages take beside activations, at most at one time,
    where so much is ``crossed``.

    A receive is posted before its message is made, and what has come early waits: a skip, and its
    gradient, as long as the stages between its ends take. What was sent is kept for about as long
    as one is on its way; a skip is so anyway, for its own stage's backward (NCCL's copy of one, for
    an operation's time, is not counted). In compiled steps of
    ``tests.benchmarks.waiting`` four devices in five hold less, nine in ten a third more at most.
    """
    home, chunks = placement.device_of_stage, placement.num_chunks // len(placement.starts)
    held = [0.0] * placement.num_devices
    for crossing in crossed:
        ends = home[crossing.source], home[crossing.destination]
        if crossing.merged or ends[0] == ends[1]:
            continue
        stages = crossing.destination - crossing.source
        received = crossing.num_bytes * (1 + min(num_microbatches, stages / chunks))
        held[ends[1]] += received
        held[ends[0]] += 0 if crossing.skip else crossing.num_bytes
        if crossing.wants:
            held[ends[0]] += received
            held[ends[1]] += crossing.num_bytes
    return tuple(held)


def in_flight(placement: Placement, num_microbatches: int) -> tuple[int, ...]:
    """For each stage, about how many microbatches wait between its forward and its backward.

    At full rate and with backwards of twice a forward, a microbatch spends (S - s)/V of its
    device's periods between stage s and back (S stages, V on each device): what 1F1B holds. With
    several stages on a device no schedule keeps the rate with so little, and half as much again
    is counted (equal stages need 6, 12, 22 in all at P = 4, 8, 16). So it is with each chain of a
    cascade.
    """
    chunks = placement.num_chunks // len(placement.starts)
    slack = 1.0 if chunks == 1 else 1.5
    rest = [placement.ends[placement.chain_of(s)] + 1 - s for s in range(placement.num_stages)]
    return tuple(min(num_microbatches, math.ceil(slack * left / chunks)) for left in rest)
