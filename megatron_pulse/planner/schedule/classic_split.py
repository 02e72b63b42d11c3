"""Classic schedules whose backwards are split into an input gradient I and a weight gradient W.

Only input gradients are waited for elsewhere, so weight gradients fill what would be idle; putting
one off keeps its activation. ``f``, ``i`` and ``w`` are the durations on a device (all its stages).
"""

from __future__ import annotations

from collections import Counter

from megatron_pulse.planner.placement import Placement, PlacementKind
from megatron_pulse.planner.schedule.classic import check_microbatches
from megatron_pulse.planner.schedule.operations import Kind, Operation, Schedule

F, I, W = Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD  # noqa: E741


class _Order:
    """The order of one device; every (kind, stage) takes the microbatches in turn."""

    def __init__(self, num_microbatches: int) -> None:
        self.count = num_microbatches
        self.done: Counter[tuple[Kind, int]] = Counter()
        self.operations: list[Operation] = []

    def add(self, stage: int, *kinds: Kind) -> None:
        """The next operation of each kind, while there is one."""
        for kind in kinds:
            if self.done[kind, stage] < self.count:
                self.operations.append(Operation(kind, stage, self.done[kind, stage]))
                self.done[kind, stage] += 1


def zb_h1(placement: Placement, num_microbatches: int) -> Schedule:
    """1F1B where device d puts off d weight gradients; sequential only.

    1F1B's device d warms up with P-1-d forwards and so leaves room for d more activations under
    device 0's peak of P: that many weight gradients wait until the end, where 1F1B idles for
    input gradients. Bubble (P-1)(f+i-w) instead of (P-1)(f+i+w). Source of the idea: Qi et al.,
    arXiv 2401.10241. Raises ValueError for another placement.
    """
    check_microbatches(num_microbatches)
    if placement.num_chunks != 1:
        raise ValueError(
            f"zb-h1 needs one stage per device; the {placement.kind.value} placement has "
            f"{placement.num_chunks}. Use wave, or zb-v on a fold of one wave"
        )
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
    """Every device busy from its first forward on; a fold of one wave only. Peak: 2P activations.

    With f = i = w the first microbatch is back on device d, at stage ``up``, 2(P-d)-1 slots after
    it left stage ``down``: forwards of ``down`` fill them. Until the first gradient is back at
    ``up``, 2d slots later, forwards of both stages alternate; gradients of ``up`` follow without a
    gap while those of ``down``, 3(P-d) slots later, are on their way. Then each device repeats
    F I W on either stage. When no forward is left to hide behind, weight gradients step back for
    the d input gradients of each stage that lower devices wait for, and fill the end. Makespan
    (f+i+w)M + (P-1)f/2, the least there is, for M >= 2P-2. Source of the idea: Qi et al.,
    arXiv 2405.15362. Raises ValueError for another placement.
    """
    check_microbatches(num_microbatches)
    if placement.kind is not PlacementKind.FOLD or placement.num_chunks != 2:
        raise ValueError(
            f"zb-v needs a fold of one wave; this is {placement.kind.value} with "
            f"{placement.num_chunks} stages per device. Use wave, or zb-h1 on a sequential one"
        )
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
