"""How much of a device's memory training takes, by the rules of Megatron and of the schedule."""

from __future__ import annotations

from functools import lru_cache

from megatron_pulse.planner.placement import Placement
from megatron_pulse.planner.schedule.registry import make_schedule


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


@lru_cache(maxsize=256)
def in_flight(
    placement: Placement, num_microbatches: int, effort: int | None = None
) -> tuple[int, ...]:
    """For each stage, the most microbatches whose forward has run and whose backward has not.

    Of the schedule that runs by default under ``placement``; a small ``effort`` gives an estimate
    sooner (see ``wave``). Stages of a device need not all have their most at the same time.
    """
    schedule = make_schedule("auto", placement, num_microbatches, effort=effort)
    live = [0] * placement.num_stages
    most = [0] * placement.num_stages
    for order in schedule.order:
        for operation in order:
            live[operation.stage] += operation.kind.live
            most[operation.stage] = max(most[operation.stage], live[operation.stage])
    return tuple(most)
