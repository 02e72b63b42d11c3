"""Forward pass without backward, for predictions: no search, for any placement.

Fold, P = 2, M = 3 (F0 to F3 are the stages, the microbatch follows the colon)

====== =====================================
device order
====== =====================================
0      F0:0 F0:1 F0:2 F3:0 F3:1 F3:2
1      F1:0 F1:1 F2:0 F1:2 F2:1 F2:2
====== =====================================
"""

from __future__ import annotations

from megatron_pulse.planner.layout.placement import Placement
from megatron_pulse.planner.schedule.classic.one_f_one_b import check_microbatches
from megatron_pulse.planner.schedule.operations import Operation, OpType, Schedule


def forward_pass(placement: Placement, num_microbatches: int) -> Schedule:
    """Forwards of all stages, each device's in the order of microbatch + stage.

    This sum rises from a forward to those that read its results, so the orders cannot block each
    other.
    """
    check_microbatches(num_microbatches)
    order = tuple(
        tuple(
            Operation(OpType.FORWARD, stage, microbatch)
            for _, stage, microbatch in sorted(
                (microbatch + stage, stage, microbatch)
                for stage in placement.stages_of_device(device)
                for microbatch in range(num_microbatches)
            )
        )
        for device in range(placement.num_devices)
    )
    return Schedule("forward-pass", placement, num_microbatches, order)
