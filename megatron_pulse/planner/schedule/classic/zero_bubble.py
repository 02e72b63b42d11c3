"""Classic schedules whose backwards are split into an input gradient I and a weight gradient W.

Other devices wait only for input gradients, so weight gradients fill idle time. A deferred weight
gradient keeps its activation. ``f``, ``i`` and ``w`` are the durations on a device (all its
stages).
"""

from __future__ import annotations

from collections import Counter

from megatron_pulse.planner.layout.placement import Placement
from megatron_pulse.planner.schedule.classic.one_f_one_b import check_home
from megatron_pulse.planner.schedule.operations import Operation, OpType, Schedule

F, I, W = OpType.FORWARD, OpType.INPUT_GRAD, OpType.WEIGHT_GRAD  # noqa: E741


class _Order:
    """Order of one device; every (kind, stage) takes the microbatches in turn."""

    def __init__(self, num_microbatches: int) -> None:
        self.count = num_microbatches
        self.done: Counter[tuple[OpType, int]] = Counter()
        self.operations: list[Operation] = []

    def add(self, stage: int, *kinds: OpType) -> None:
        """Append the next operation of each kind, while there is one."""
        for kind in kinds:
            if self.done[kind, stage] < self.count:
                self.operations.append(Operation(kind, stage, self.done[kind, stage]))
                self.done[kind, stage] += 1


def zb_h1(placement: Placement, num_microbatches: int) -> Schedule:
    """1F1B with d deferred weight gradients on device d; sequential only.

    In 1F1B device d warms up with P-1-d forwards. It has room for d more activations under device
    0's peak of P. So d weight gradients wait until the end, where 1F1B idles for input gradients.
    Bubble (P-1)(f+i-w) instead of (P-1)(f+i+w). Source of the idea: Qi et al., arXiv 2401.10241.
    Raises ValueError for another placement.
    """
    check_home("zb-h1", placement, num_microbatches)
    orders = []
    for stage, device in enumerate(placement.device_of_stage):
        order = _Order(num_microbatches)
        for _ in range(placement.num_devices - 1 - device):
            order.add(stage, F)
        for m in range(num_microbatches):
            order.add(stage, F, I)
            if m >= device:
                order.add(stage, W)
        for _ in range(device):
            order.add(stage, W)
        orders.append(tuple(order.operations))
    return Schedule("zb-h1", placement, num_microbatches, tuple(orders))


def zb_v(placement: Placement, num_microbatches: int) -> Schedule:
    """Every device is busy from its first forward on; a fold of one wave only. Peak: 2P
    activations.

    With f = i = w the first microbatch returns to device d, at stage ``up``, 2(P-d)-1 slots after
    it left stage ``down``. Forwards of ``down`` fill these slots. Until the first gradient returns
    to ``up``, 2d slots later, forwards of both stages alternate. Gradients of ``up`` follow without
    a gap while those of ``down``, 3(P-d) slots later, are on their way. Then each device repeats F
    I W on either stage. When no forward is left, d input gradients of each stage, awaited by lower
    devices, come before weight gradients. Weight gradients fill the end. Makespan (f+i+w)M +
    (P-1)f/2, the optimum, for M >= 2P-2. Source of the idea: Qi et al., arXiv 2405.15362. Raises
    ValueError for another placement.
    """
    check_home("zb-v", placement, num_microbatches, num_chunks=2)
    num_devices = placement.num_devices
    orders = []
    for device in range(num_devices):
        down, up = placement.stages_of_device(device)
        order = _Order(num_microbatches)
        for _ in range(2 * (num_devices - device) - 1):
            order.add(down, F)
        for _ in range(device):
            order.add(up, F)
            order.add(down, F)
        for _ in range(num_devices - device):
            order.add(up, F, I, W)
        for _ in range(num_microbatches - num_devices):
            order.add(down, F, I, W)
            order.add(up, F, I, W)
        for _ in range(device):
            order.add(down, I)
            order.add(up, I)
        for _ in range(num_devices - device):
            order.add(down, I, W)
        for _ in range(num_microbatches):
            order.add(up, W)
            order.add(down, W)
        orders.append(tuple(order.operations))
    return Schedule("zb-v", placement, num_microbatches, tuple(orders))


def dualpipe_v(placement: Placement, num_microbatches: int) -> Schedule:
    """DualPipe cut in half: forwards down the fold paired with backwards up it, and the reverse.

    With r = P-1-d devices behind device d, a microbatch that left stage ``down`` is back at ``up``
    after 2r operations, and its gradient takes as long from ``up`` to ``down``:

    ==== ============== ==================================================================
    2r   Fd             until the first microbatch is back
    d+1  Fd Fu          until the first gradient is back
    r    Iu Wu Fu       until the first gradient has been down the fold as well
    rest Fd Iu Wu       every forward with a backward of the other direction ...
         Fu Id Wd       ... the pairs of the steady state, M-2r-d-1 times two
    r    Iu Wu Fu Id Wd no forward is left to go down
    d+1  Iu Id          none at all: weight gradients are put off after half of them
    r    W Id           and fill the wait for the last gradients; then all that are left
    ==== ============== ==================================================================

    DualPipe overlaps the sends of a pair with its computation; here one operation runs after the
    other, and transfers run behind both. Peak: 2P+1 activations, on every device. Makespan with f =
    i = w as zb-v's for M >= 2P. Source of the idea: DeepSeek-V3, arXiv 2412.19437, section 3.2.1,
    cut in half as proposed by Sea AI Lab (2025). Raises ValueError for another placement.
    """
    check_home("dualpipe-v", placement, num_microbatches, num_chunks=2)
    orders = []
    for device in range(placement.num_devices):
        down, up = placement.stages_of_device(device)
        behind = placement.num_devices - 1 - device
        order = _Order(num_microbatches)
        for _ in range(2 * behind):
            order.add(down, F)
        for _ in range(device + 1):
            order.add(down, F)
            order.add(up, F)
        for _ in range(behind):
            order.add(up, I, W, F)
        for _ in range(num_microbatches - 2 * behind - device - 1):
            order.add(down, F)
            order.add(up, I, W, F)
            order.add(down, I, W)
        for _ in range(behind):
            order.add(up, I, W, F)
            order.add(down, I, W)
        for i in range(2 * (device + 1)):
            order.add((up, down)[i % 2], *((I, W) if i <= device else (I,)))
        for _ in range(behind):
            order.add(up if order.done[W, up] < order.done[I, up] else down, W)
            order.add(down, I)
        for _ in range(num_microbatches):
            order.add(up, W)
            order.add(down, W)
        orders.append(tuple(order.operations))
    return Schedule("dualpipe-v", placement, num_microbatches, tuple(orders))
