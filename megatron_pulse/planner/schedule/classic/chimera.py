"""Chimera: two replicas of the model, one in each direction over the devices.

Even microbatches go down the devices, odd ones up, so a device holds a stage of either replica. It
has twice the weights of 1F1B, whose gradients must be summed over both holders. A placement has one
holder of every stage, and so has the runtime: Chimera exists only for comparison.
"""

from __future__ import annotations

from megatron_pulse.planner.layout.placement import sequential
from megatron_pulse.planner.schedule.classic.hanayo import by_clock
from megatron_pulse.planner.schedule.classic.one_f_one_b import check_microbatches
from megatron_pulse.planner.schedule.operations import Schedule


def chimera(num_devices: int, num_microbatches: int) -> Schedule:
    """A stage on each device and direction. P = M = 4 (stage:microbatch, one column per slot)

    ======== ==== ==== ==== ==== ==== ==== ==== ==== ==== ====
    device 0 F0:0 F0:2 .    F3:1 B3:1 F3:3 B3:3 B0:0 .    B0:2
    device 1 .    F1:0 F2:1 F1:2 F2:3 B2:1 B1:0 B2:3 B1:2 .
    device 2 .    F1:1 F2:0 F1:3 F2:2 B2:0 B1:1 B2:2 B1:3 .
    device 3 F0:1 F0:3 .    F3:0 B3:0 F3:2 B3:2 B0:1 .    B0:3
    ======== ==== ==== ==== ==== ==== ==== ==== ==== ==== ====

    The schedule's placement is that of the even microbatches. For M = KP each device idles for
    (P/2-1)(f+b + (2K-1)|b-f|): P-2 slots with f = b at any M, which is half of 1F1B's and one pair
    less. Peak on device d: P/2 + 1 + min(d, P-1-d) activations. Source of the idea: Li and Hoefler,
    arXiv 2107.06925 (K > 1: its direct concatenation). Raises ValueError for an odd number of
    devices.
    """
    check_microbatches(num_microbatches)
    if num_devices % 2:
        raise ValueError(f"chimera needs an even number of devices; got {num_devices}")
    placement = sequential(num_devices)
    order = by_clock(placement, num_microbatches, directions=2)
    return Schedule("chimera", placement, num_microbatches, order)
