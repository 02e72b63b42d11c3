"""Classic schedules read off a clock: Hanayo's waves and Chimera's two directions.

When every operation takes one slot, a microbatch moves by a stage a slot: forward through the S
stages, then at once back. If the next one follows two slots later, a device's operations never
meet: what moves up the devices is there in slots of one parity, what moves down in the others,
and in each parity backwards begin two slots after the last forward. After 2S slots all of a group
is through the first device, and the next group follows without a gap. For the n-th microbatch of
group k:

=================  ========================
forward, stage s   2S k + 2n + s
backward, stage s  2S k + 2n + 2S - 1 - s
=================  ========================

The order of the slots is the schedule, whatever the durations are: where they differ, groups wait
for each other. ``f`` and ``b`` are the durations of a stage, forward and backward. A group that is
not full leaves its slots idle.
"""

from __future__ import annotations

from megatron_pulse.planner.layout.placement import Placement, PlacementKind
from megatron_pulse.planner.schedule.classic.one_f_one_b import check_microbatches
from megatron_pulse.planner.schedule.operations import Kind, Operation, Schedule


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
    check_microbatches(num_microbatches)
    if placement.kind is not PlacementKind.FOLD or placement.num_stages == 1:
        raise ValueError(
            f"hanayo needs a fold; this is {placement.kind.value} with {placement.num_chunks} "
            f"stages per device. Use wave, or 1f1b on a sequential placement"
        )
    return _clocked("hanayo", placement, num_microbatches)


def chimera(placement: Placement, num_microbatches: int) -> Schedule:
    """Two pipelines at once: even microbatches go down the devices, odd ones up.

    Every device holds a stage of each direction, so twice the weights of 1F1B, and their gradients
    are to be summed over the two holders. P = M = 4 (stage:microbatch, one column per slot)

    ======== ==== ==== ==== ==== ==== ==== ==== ==== ==== ====
    device 0 F0:0 F0:2 .    F3:1 B3:1 F3:3 B3:3 B0:0 .    B0:2
    device 1 .    F1:0 F2:1 F1:2 F2:3 B2:1 B1:0 B2:3 B1:2 .
    device 2 .    F1:1 F2:0 F1:3 F2:2 B2:0 B1:1 B2:2 B1:3 .
    device 3 F0:1 F0:3 .    F3:0 B3:0 F3:2 B3:2 B0:1 .    B0:3
    ======== ==== ==== ==== ==== ==== ==== ==== ==== ==== ====

    For M = KP each device idles for (P/2-1)(f+b + (2K-1)|b-f|): P-2 slots with f = b at any M,
    which is half of 1F1B's and one pair less. Peak on device d: P/2 + 1 + min(d, P-1-d)
    activations. Source of the idea: Li and Hoefler, arXiv 2107.06925 (K > 1: its direct
    concatenation). Raises ValueError for another placement.
    """
    check_microbatches(num_microbatches)
    if placement.kind is not PlacementKind.BIDIRECTIONAL or placement.num_stages == 1:
        raise ValueError(
            f"chimera needs a bidirectional placement; this is {placement.kind.value}. Use hanayo "
            f"or wave on a fold, which holds no weights twice"
        )
    return _clocked("chimera", placement, num_microbatches)


def _clocked(name: str, placement: Placement, num_microbatches: int) -> Schedule:
    """Groups of P microbatches; on a bidirectional placement half of them in each direction."""
    num, group = placement.num_stages, placement.num_devices
    ways = 2 if placement.kind is PlacementKind.BIDIRECTIONAL else 1
    slots: list[list[tuple[int, Operation]]] = [[] for _ in range(placement.num_devices)]
    for m in range(num_microbatches):
        first = 2 * num * (m // group) + 2 * (m % group // ways)
        for stage in range(num):
            mine = slots[placement.device_of(stage, m)]
            mine.append((first + stage, Operation(Kind.FORWARD, stage, m)))
            mine.append((first + 2 * num - 1 - stage, Operation(Kind.BACKWARD, stage, m)))
    order = tuple(tuple(operation for _, operation in sorted(mine)) for mine in slots)
    return Schedule(name, placement, num_microbatches, order)
