"""Copies between devices and host, simulated as orders beside those of operations.

For an offloaded activation::

    device       [ F2:0 ] ... O2:0            L2:0  [  other  ][ B2:0 ]
    to the host          [copy]                |
    back                                       [  copy   ]

The copy to the host begins after the forward, when earlier copies have ended. O is the point at
which the device waits for that copy if necessary, and frees the memory. L takes the memory again
and begins the copy back, and B waits for that copy.
"""

from __future__ import annotations

from megatron_pulse.planner.schedule.operations import Operation, OpType, Schedule


def copy_lines(schedule: Schedule) -> list[list[tuple[Operation, Operation]]]:
    """Copies of each device to the host, and back, in order; empty without offload.

    A copy is given by the operation that it follows and the operation that waits for it.
    """
    lines = []
    split = OpType.INPUT_GRAD in schedule.kinds
    backward = OpType.INPUT_GRAD if split else OpType.BACKWARD
    for order in schedule.order if schedule.offloaded else ():
        leaving = [
            (op, op._replace(kind=OpType.OFFLOAD))
            for op in order
            if op.kind is OpType.FORWARD and op[1:] in schedule.offloaded
        ]
        back = [(op, op._replace(kind=backward)) for op in order if op.kind is OpType.RELOAD]
        lines += [leaving, back]
    return lines
