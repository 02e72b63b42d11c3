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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_pulse.planner.schedule.operations import BACKWARDS, Operation, OpType, Schedule


@dataclass(frozen=True)
class OffloadCopy:
    """The copy that the O of ``operation`` waits for, or that its L begins."""

    operation: Operation


def copy_lines(schedule: Schedule) -> list[Sequence[OffloadCopy]]:
    """Copies of each device to the host, and back, in order; empty without offload."""
    lines: list[Sequence[OffloadCopy]] = []
    for order in schedule.order if schedule.offloaded else ():
        forwards = (op for op in order if op.kind is OpType.FORWARD)
        left = (op for op in forwards if (op.stage, op.microbatch) in schedule.offloaded)
        lines.append([OffloadCopy(op._replace(kind=OpType.OFFLOAD)) for op in left])
        lines.append([OffloadCopy(op) for op in order if op.kind is OpType.RELOAD])
    return lines


def copies_before(
    item: Operation | OffloadCopy, schedule: Schedule
) -> Iterator[Operation | OffloadCopy]:
    """Yield the operations and copies that must end before ``item``, as far as offload is
    concerned."""
    if isinstance(item, OffloadCopy):
        op = item.operation
        yield op._replace(kind=OpType.FORWARD) if op.kind is OpType.OFFLOAD else op
    elif item.kind is OpType.OFFLOAD:
        yield OffloadCopy(item)
    elif item.kind in BACKWARDS and (item.stage, item.microbatch) in schedule.offloaded:
        yield OffloadCopy(item._replace(kind=OpType.RELOAD))
