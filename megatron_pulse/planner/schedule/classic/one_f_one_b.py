"""Classic schedules: GPipe, 1F1B and Megatron's interleaved 1F1B.

P = 2, M = 3 (F and B of one stage per device; the number is the microbatch)

====== =============== ===============
device GPipe           1F1B
====== =============== ===============
0      F0 F1 F2 B0 B1  F0 F1 B0 F2 B1
1      F0 F1 F2 B0 B1  F0 B0 F1 B1 F2
====== =============== ===============
"""

from __future__ import annotations

from itertools import batched

from megatron_pulse.planner.layout.placement import PLACEMENTS, Placement
from megatron_pulse.planner.schedule.operations import Operation, OpType, Schedule


def check_microbatches(num_microbatches: int) -> None:
    """Raise ValueError unless there is at least one microbatch."""
    if num_microbatches < 1:
        raise ValueError(f"a schedule needs at least one microbatch; got {num_microbatches}")


def check_home(
    name: str, placement: Placement, num_microbatches: int, num_chunks: int | None = None
) -> None:
    """Raise ValueError unless the schedule ``name`` supports ``placement`` and
    ``num_microbatches``.

    With ``num_chunks`` the placement must have that many stages per device.
    """
    check_microbatches(num_microbatches)
    kind, chunks = placement.kind, placement.num_chunks
    fits = kind.allows(chunks) if num_chunks is None else chunks == num_chunks
    if name not in kind.classics or not fits:
        homes = " or ".join(k.name for k in PLACEMENTS.values() if name in k.classics)
        only = "" if num_chunks is None else f" with {num_chunks} stages per device"
        others = " or ".join(("wave", *kind.classics))
        raise ValueError(
            f"{name} needs placement {homes}{only}; this is {kind} with {chunks} stage(s) "
            f"per device. Use {others}"
        )


def trivial(
    placement: Placement, num_microbatches: int, name: str = "trivial", split: bool = False
) -> Schedule:
    """One stage on one device: each microbatch forward, then at once backward."""
    check_microbatches(num_microbatches)
    backward = (OpType.INPUT_GRAD, OpType.WEIGHT_GRAD) if split else (OpType.BACKWARD,)
    order = tuple(
        Operation(kind, 0, m)
        for m in range(num_microbatches)
        for kind in (OpType.FORWARD, *backward)
    )
    return Schedule(name, placement, num_microbatches, (order,))


def gpipe(placement: Placement, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards, stage by stage; for any placement.

    Peak: every activation of every microbatch. Source: Huang et al., arXiv 1811.06965.
    """
    check_microbatches(num_microbatches)
    order = []
    for device in range(placement.num_devices):
        stages = placement.stages_of_device(device)
        order.append(
            tuple(
                Operation(kind, stage, m)
                for kind, way in ((OpType.FORWARD, stages), (OpType.BACKWARD, stages[::-1]))
                for stage in way
                for m in range(num_microbatches)
            )
        )
    return Schedule("gpipe", placement, num_microbatches, tuple(order))


def one_f_one_b(placement: Placement, num_microbatches: int) -> Schedule:
    """One forward, one backward after P-1-d warm-up forwards on device d; sequential only.

    Peak: min(M, P-d) activations on device d. Source: Narayanan et al., arXiv 2006.09503
    (PipeDream-Flush). Raises ValueError for another placement.
    """
    check_home("1f1b", placement, num_microbatches)
    order = []
    for stage, device in enumerate(placement.device_of_stage):
        forwards = [Operation(OpType.FORWARD, stage, m) for m in range(num_microbatches)]
        backwards = [Operation(OpType.BACKWARD, stage, m) for m in range(num_microbatches)]
        order.append(_alternate(forwards, backwards, placement.num_devices - 1 - device))
    return Schedule("1f1b", placement, num_microbatches, tuple(order))


def interleaved_1f1b(placement: Placement, num_microbatches: int) -> Schedule:
    """Megatron's order: microbatches in groups of P, each group through all chunks in turn.

    If P does not divide M, the last group takes the remainder too (P + M mod P microbatches). Every
    device then warms up for the largest group: a group smaller than P would leave a device waiting
    for the loop around the others. Peak: about (V-1)P + 2(P-1-d) + 1 activations. Source: Narayanan
    et al., arXiv 2104.04473, section 2.2; Megatron-Core's ``get_schedule_table``. Raises ValueError
    for another placement.
    """
    check_home("interleaved", placement, num_microbatches)
    num_devices = placement.num_devices
    groups = [tuple(group) for group in batched(range(num_microbatches), num_devices)]
    if len(groups) > 1 and len(groups[-1]) < num_devices:
        groups[-2:] = [groups[-2] + groups[-1]]
    largest = max(map(len, groups))
    order = []
    for device in range(num_devices):
        stages = placement.stages_of_device(device)
        forwards = [Operation(OpType.FORWARD, s, m) for g in groups for s in stages for m in g]
        backwards = [
            Operation(OpType.BACKWARD, s, m) for g in groups for s in stages[::-1] for m in g
        ]
        warm_up = 2 * (num_devices - 1 - device) + (placement.num_chunks - 1) * largest
        order.append(_alternate(forwards, backwards, warm_up))
    return Schedule("interleaved", placement, num_microbatches, tuple(order))


def _alternate(
    forwards: list[Operation], backwards: list[Operation], warm_up: int
) -> tuple[Operation, ...]:
    """``warm_up`` forwards, then forward and backward in turn, then the remaining backwards."""
    warm_up = min(warm_up, len(forwards))
    steady = len(forwards) - warm_up
    turns = zip(forwards[warm_up:], backwards[:steady], strict=True)
    pairs = [op for pair in turns for op in pair]
    return (*forwards[:warm_up], *pairs, *backwards[steady:])
