"""Memory that training takes on a device, by the rules of Megatron and of the schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.layout.crossing import (
    Crossing,
    SkipCarrier,
    SkipEnds,
    skip_carrier,
)
from megatron_pulse.planner.layout.placement import Partition, Placement
from megatron_pulse.profile.roofline import ELEMENT_BYTES

ADAM_BYTES = 8.0
"""Bytes of Adam's moments per parameter."""


@dataclass(frozen=True)
class ParameterState:
    """Options for the state of a trained parameter that differ from Megatron's defaults.

    ``ema``: an EMA in fp32. ``grad_reduce_in_bf16``: bfloat16 gradients are accumulated and reduced
    in bfloat16. ``optimizer_cpu_offload``: optimizer offload; optimizer state and EMA are in the
    node's memory. ``optimizer_bytes``: of the optimizer's state, by default Adam's moments.
    ``reference``: a frozen copy, the reference of a preference loss.
    """

    ema: bool = False
    grad_reduce_in_bf16: bool = False
    optimizer_cpu_offload: bool = False
    optimizer_bytes: float = ADAM_BYTES
    reference: bool = False

    def gradient_bytes(self, dtype: str) -> int:
        """Bytes per element of the gradient that is summed over microbatches and replicas.

        With optimizer offload float16 gradients are summed in fp32.
        """
        half = {"bfloat16": self.grad_reduce_in_bf16, "float16": not self.optimizer_cpu_offload}
        return 2 if half.get(dtype) else 4


DEFAULT_STATE = ParameterState()
"""Megatron's defaults."""


def bytes_per_parameter(
    dtype: str,
    distributed_optimizer: bool = False,
    data_parallel: int = 1,
    state: ParameterState = DEFAULT_STATE,
) -> float:
    """Bytes per parameter, with its gradient and Adam's state, while a step computes.

    ========  =====================================  ==========================================
    dtype     on every replica                       divided by the distributed optimizer
    ========  =====================================  ==========================================
    bfloat16  2 parameter, 4 fp32 gradient (or 2)    4 fp32 copy, 8 both moments
    float16   2 parameter, 2 gradient (or 4 fp32)    4 fp32 copy, 8 both moments
    float32   4 parameter, 4 gradient                8 both moments
    ========  =====================================  ==========================================

    Another optimizer has other ``optimizer_bytes``. An EMA takes 4 more, divided too. The copy of
    a reference takes as much as the parameter. Optimizer
    offload moves all that is divided to the host (``host_bytes_per_parameter``). Workspace memory
    of the optimizer is ``optimizer_step_bytes``. Source: Megatron-Core's guide to the distributed
    optimizer, whose figures include both. Raises KeyError for other dtypes.
    """
    replicas = data_parallel if distributed_optimizer else 1
    kept = ELEMENT_BYTES[dtype] * (1 + state.reference) + state.gradient_bytes(dtype)
    if state.optimizer_cpu_offload:
        return kept
    copy = 0 if dtype == "float32" else 4
    return kept + (copy + state.optimizer_bytes + 4 * state.ema) / replicas


def host_bytes_per_parameter(dtype: str, data_parallel: int, state: ParameterState) -> float:
    """Bytes per parameter in the node's memory, per replica, with optimizer offload.

    They are an fp32 copy, a gradient, both moments, the EMA, and the rounded copy.
    """
    if not state.optimizer_cpu_offload:
        return 0.0
    rounded = ELEMENT_BYTES[dtype] if dtype != "float32" else 0
    return (4 + 4 + 8 + 4 * state.ema + rounded) / data_parallel


def optimizer_step_bytes(
    dtype: str,
    distributed_optimizer: bool = False,
    data_parallel: int = 1,
    state: ParameterState = DEFAULT_STATE,
) -> float:
    """Workspace bytes per parameter of the optimizer step, during which no activations are held.

    They hold the fp32 copy of a gradient that is summed in half precision. The copy is freed before
    the next forward.
    """
    if state.optimizer_cpu_offload:  # gradients on the host are fp32
        return 0.0
    replicas = data_parallel if distributed_optimizer else 1
    return (4 if state.gradient_bytes(dtype) < 4 else 0) / replicas


def effective_parameters(costs: ChainCosts, share: float) -> tuple[float, ...]:
    """Parameters of each layer; a frozen parameter counts as ``share`` of a trained one.

    A quantised one counts by its bytes.
    """
    if not costs.trained:
        return costs.parameters
    pairs = zip(costs.stored_parameters, costs.trained, strict=True)
    return tuple(trained + share * (whole - trained) for whole, trained in pairs)


def kept_bytes(costs: ChainCosts, partition: Partition) -> tuple[float, ...]:
    """Activation bytes that a forward of each stage keeps until its backward.

    A stage without a backward keeps nothing itself, but its output waits at the consumer. The
    output counts as the stage's own, so that the stage cannot run ahead without bound.
    """
    saved, backward = map(
        partition.per_stage, (activation_bytes_of_layers(costs, partition), costs.backward_s)
    )
    given = (*(costs.boundary_bytes[cut] for cut in partition.cuts[1:-1]), 0)
    return tuple(
        float(kept if seconds else max(kept, wgrad_bytes))
        for kept, seconds, wgrad_bytes in zip(saved, backward, given, strict=True)
    )


def activation_bytes_of_layers(costs: ChainCosts, partition: Partition) -> tuple[float, ...]:
    """Activation bytes that a forward of each layer keeps until its backward.

    A recomputed layer keeps the skips that it pops, unless the skip's own stage keeps them.
    """
    layers = list(costs.saved_bytes)
    for first in partition.cuts[:-1]:
        layers[first] += costs.shared_bytes[first] if costs.shared_bytes else 0
    if any(costs.recompute_s):
        for skip in costs.skips:
            _, _, carrier = skip_carrier(skip, partition)
            alone = carrier is SkipCarrier.LOCAL and sent_alone(skip, partition)
            if costs.recompute_s[skip.destination] and (alone or carrier is SkipCarrier.DIRECT):
                layers[skip.destination] += skip.num_bytes
    return tuple(layers)


def sent_alone(skip: SkipEnds, partition: Partition) -> bool:
    """True if the source of a skip is the last layer of its stage, so no other layer there keeps
    it."""
    return skip.source + 1 == partition.cuts[partition.stage_of_layer(skip.source) + 1]


def wgrad_bytes(costs: ChainCosts, partition: Partition) -> tuple[float, ...]:
    """Bytes that a stage holds between input gradient and weight gradient (weight-gradient
    queue)."""
    return tuple(map(float, partition.per_stage(costs.wgrad_bytes or costs.saved_bytes)))


def in_transit_bytes(
    crossed: Iterable[Crossing], placement: Placement, num_microbatches: int
) -> tuple[float, ...]:
    """Approximate peak bytes of message buffers on each device, beside activations.

    A receive is posted before its message is produced. An early arrival waits: a skip, and its
    gradient, for as long as the stages between its ends take. A sent message is kept for about as
    long as one is in transit. A sent skip is kept anyway for its own stage's backward, so only its
    receive counts. NCCL's copy of a skip, kept for one operation, is not counted. The figures are
    estimates; ``tests.benchmarks.waiting`` compares them with compiled steps.
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
        if crossing.needs_grad:
            held[ends[0]] += received
            held[ends[1]] += crossing.num_bytes
    return tuple(held)


def in_flight(placement: Placement, num_microbatches: int) -> tuple[int, ...]:
    """Estimate the in-flight microbatches of each stage.

    At full rate, and with backwards of twice a forward, a microbatch spends (S - s)/V periods of
    its device between the forward and the backward of stage s (S stages, V per device). 1F1B holds
    exactly this number. With several stages per device no schedule keeps the rate with so few. Then
    half as many again are counted (equal stages need 6, 12, 22 in all at P = 4, 8, 16). The same
    holds for each chain of a cascade.
    """
    chunks = placement.num_chunks // len(placement.starts)
    slack = 1.0 if chunks == 1 else 1.5
    rest = [placement.ends[placement.chain_of(s)] + 1 - s for s in range(placement.num_stages)]
    return tuple(min(num_microbatches, math.ceil(slack * left / chunks)) for left in rest)
