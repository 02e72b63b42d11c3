"""What travels between devices and host while they compute: lines beside those of operations.

For an activation that waits on the host::

    device       [ F2:0 ] ... O2:0            L2:0  [  other  ][ B2:0 ]
    to the host          [copy]                |
    back                                       [  copy   ]

To the host it goes at once, when those before it have; O is where a device waits for that, if it
must, and gives the memory away. L takes the memory again, and B waits for what comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_pulse.planner.schedule.operations import BACKWARDS, Kind, Operation, Schedule


@dataclass(frozen=True)
class Copy:
    """What the O of ``operation`` waits for, or what its L begins."""

    operation: Operation


def copy_lines(schedule: Schedule) -> list[Sequence[Copy]]:
    """What travels from each device to the host, and back, in order; nothing where nothing does."""
    lines: list[Sequence[Copy]] = []
    for order in schedule.order if schedule.offloaded else ():
        forwards = (op for op in order if op.kind is Kind.FORWARD)
        left = (op for op in forwards if (op.stage, op.microbatch) in schedule.offloaded)
        lines.append([Copy(op._replace(kind=Kind.OFFLOAD)) for op in left])
        lines.append([Copy(op) for op in order if op.kind is Kind.RELOAD])
    return lines


def copies_before(item: Operation | Copy, schedule: Schedule) -> Iterator[Operation | Copy]:
    """What must have ended, of that, before ``item``."""
    if isinstance(item, Copy):
        op = item.operation
        yield op._replace(kind=Kind.FORWARD) if op.kind is Kind.OFFLOAD else op
    elif item.kind is Kind.OFFLOAD:
        yield Copy(item)
    elif item.kind in BACKWARDS and (item.stage, item.microbatch) in schedule.offloaded:
        yield Copy(item._replace(kind=Kind.RELOAD))
