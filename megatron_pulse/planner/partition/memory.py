"""How much of a device's memory training takes, by the rules of Megatron and of the schedule."""

from __future__ import annotations

import math

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.layout.crossing import crossings
from megatron_pulse.planner.layout.placement import Partition, Placement
from megatron_pulse.profile.devices import ELEMENT_BYTES


def bytes_per_parameter(
    dtype: str, distributed_optimizer: bool = False, data_parallel: int = 1
) -> float:
    """Bytes of a parameter with its gradient and Adam's state under Megatron's defaults.

    ========  =====================================  ==========================================
    dtype     on every replica                       divided by the distributed optimizer
    ========  =====================================  ==========================================
    bfloat16  2 parameter, 4 fp32 gradient           4 fp32 copy, 8 both moments
    float16   2 parameter, 2 gradient                8 fp32 copy and its gradient, 8 both moments
    float32   4 parameter, 4 gradient                8 both moments
    ========  =====================================  ==========================================

    Source: Megatron-Core's guide to the distributed optimizer. Raises KeyError for other dtypes.
    """
    kept, divided = {"bfloat16": (6, 12), "float16": (4, 16), "float32": (8, 8)}[dtype]
    return kept + divided / (data_parallel if distributed_optimizer else 1)


def frozen_share(dtype: str, distributed_optimizer: bool = False, data_parallel: int = 1) -> float:
    """What a frozen parameter, which is there and no more, takes of the bytes of a trained one."""
    whole = bytes_per_parameter(dtype, distributed_optimizer, data_parallel)
    return ELEMENT_BYTES[dtype] / whole


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
    saved, backward = map(partition.per_stage, (costs.saved_bytes, costs.backward_s))
    given = (*(costs.boundary_bytes[cut] for cut in partition.cuts[1:-1]), 0)
    return tuple(
        float(kept if seconds else max(kept, waiting))
        for kept, seconds, waiting in zip(saved, backward, given, strict=True)
    )


def carried_bytes(
    costs: ChainCosts, partition: Partition, num_microbatches: int
) -> tuple[float, ...]:
    """For each device, about what buffers of messages take beside activations, at most at one time.

    A receive is posted before its message is made, and what has come early waits: a skip, and its
    gradient, as long as the stages between its ends take. What was sent is kept for about as long
    as one is on its way; a skip is so anyway, for its own stage's backward. In compiled steps of
    ``tests.benchmarks.waiting`` four devices in five hold less, nine in ten a third more at most.
    """
    placement = partition.placement
    home, chunks = placement.device_of_stage, placement.num_chunks // len(placement.starts)
    held = [0.0] * placement.num_devices
    for crossing in crossings(costs, partition):
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
