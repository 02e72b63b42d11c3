"""Classic schedules derived from a clock: Hanayo's waves (and ``chimera``'s two directions).

Suppose that every operation takes one slot, and a microbatch moves by a stage a slot: forward
through the S stages, then at once back. If the next microbatch follows two slots later, a device's
operations never collide. Operations that move up the devices have slots of one parity, and those
that move down have the other. In each parity backwards begin two slots after the last forward.
After 2S slots all of a group is through the first device, and the next group follows without a gap.
For the n-th microbatch of group k:

=================  ========================
forward, stage s   2S k + 2n + s
backward, stage s  2S k + 2n + 2S - 1 - s
=================  ========================

The order of the slots is the schedule, whatever the durations are: if they differ, groups wait for
each other. ``f`` and ``b`` are the durations of a stage, forward and backward. A group that is not
full leaves its slots idle.
"""

from __future__ import annotations

from megatron_pulse.planner.layout.placement import Placement
from megatron_pulse.planner.schedule.classic.one_f_one_b import check_home
from megatron_pulse.planner.schedule.operations import Operation, OpType, Schedule


def hanayo(placement: Placement, num_microbatches: int) -> Schedule:
    """W waves over a fold, in groups of P microbatches; no weights are held twice.

    P = 2, W = 1, M = 2 (stage:microbatch, one column per slot)

    ======== ==== ==== ==== ==== ==== ==== ==== ==== ==== ====
    device 0 F0:0 .    F0:1 F3:0 B3:0 F3:1 B3:1 B0:0 .    B0:1
    device 1 .    F1:0 F2:0 F1:1 F2:1 B2:0 B1:0 B2:1 B1:1 .
    ======== ==== ==== ==== ==== ==== ==== ==== ==== ==== ====

    For M = KP each device idles for (P-1)(f+b + (2K-1)|b-f|): with f = b for 1/(2W) of 1F1B's time
    at any M, a stage being 1/(2W) of a device's work. Peak: min(M, P) 2W activations, as much as
    1F1B. Source of the idea: Liu et al., arXiv 2308.15762. Raises ValueError for another placement.
    """
    check_home("hanayo", placement, num_microbatches)
    return Schedule("hanayo", placement, num_microbatches, by_clock(placement, num_microbatches))


def by_clock(
    placement: Placement, num_microbatches: int, directions: int = 1
) -> tuple[tuple[Operation, ...], ...]:
    """Each device's operations in groups of P microbatches.

    With two directions the odd ones of a group go from the last device to the first.
    """
    num, group = placement.num_stages, placement.num_devices
    slots: list[list[tuple[int, Operation]]] = [[] for _ in range(group)]
    for m in range(num_microbatches):
        first = 2 * num * (m // group) + 2 * (m % group // directions)
        for stage, device in enumerate(placement.device_of_stage):
            mine = slots[group - 1 - device if m % directions else device]
            mine.append((first + stage, Operation(OpType.FORWARD, stage, m)))
            mine.append((first + 2 * num - 1 - stage, Operation(OpType.BACKWARD, stage, m)))
    return tuple(tuple(operation for _, operation in sorted(mine)) for mine in slots)
