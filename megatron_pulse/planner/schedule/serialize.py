"""Schedules as text: CSV in the style of torch.distributed.pipelining's action files, and JSON.

CSV has one row per device and one cell per operation, in order. ``2F0`` is the forward of stage 2
on microbatch 0 (B whole backward, I input gradient, W weight gradient, R recomputation). ``2X0`` is
slice 0 of bubble task 2, whose details only JSON has. Our form ``F2:0`` is also read, and forms may
be mixed. Empty cells (idle slots) are skipped. Stages are on the devices whose rows name them.

In torch's files ``(0F3;3B1)OVERLAP_F_B`` is read as its operations one after the other. The actions
``0SEND_F1``, ``0RECV_F1``, ``0SEND_B1``, ``0RECV_B1``, ``0UNSHARD``, ``0RESHARD`` and
``0REDUCE_GRAD`` are skipped: communication and gradient reduction follow from the order of the
operations. A whole backward beside split ones (DualPipeV) is read as an input gradient followed by
its weight gradient.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from megatron_pulse.files import parse_json
from megatron_pulse.planner.layout.placement import PLACEMENTS, Placement, make_placement
from megatron_pulse.planner.schedule.operations import (
    BACKWARDS,
    BubbleTask,
    Operation,
    OpType,
    Schedule,
    SliceDependency,
)

_ACTION = re.compile(
    r"(0|[1-9][0-9]{0,8})"
    r"((SEND|RECV)_[FB](0|[1-9][0-9]{0,8})|(UNSHARD|RESHARD|REDUCE_GRAD)[0-9]{0,9})"
)
"""Actions of torch's runtime that are not operations."""
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")


def to_csv(schedule: Schedule) -> str:
    """CSV text with one line per device, and cells like ``2F0``."""
    return "".join(
        ",".join(f"{op.stage}{op.kind.value}{op.microbatch}" for op in order) + "\n"
        for order in schedule.order
    )


def from_csv(
    text: str,
    placement: Placement | None = None,
    name: str = "csv",
    bubble_tasks: tuple[BubbleTask, ...] = (),
) -> Schedule:
    """Parse a CSV text into a schedule for ``placement``, or for the one that its rows show.

    Raises ValueError naming the row and cell that cannot be read, or if the rows match none of the
    placements. The schedule is not validated; see ``validate``.
    """
    order: list[tuple[Operation, ...]] = []
    rows = csv.reader(io.StringIO(text))
    try:
        for row, cells in enumerate(rows, 1):
            operations = []
            for column, cell in enumerate(cells, 1):
                try:
                    operations += _operations(cell.strip())
                except ValueError as error:
                    raise ValueError(f"row {row}, cell {column}: {error}") from None
            order.append(tuple(operations))
    except csv.Error as error:
        raise ValueError(f"line {rows.line_num}: {error}") from error
    while order and not order[-1]:
        order.pop()
    if not any(op.kind is not OpType.BUBBLE_TASK for operations in order for op in operations):
        raise ValueError("the file has no operations")
    order = _all_split([_from_zero(operations) for operations in order])
    count = 1 + max(
        op.microbatch for row in order for op in row if op.kind is not OpType.BUBBLE_TASK
    )
    _require_few(order, count)
    _require_ascending(order)
    return Schedule(name, placement or _shown(order), count, tuple(order), bubble_tasks)


def to_json(schedule: Schedule) -> dict[str, Any]:
    """JSON object: name, placement, microbatches, bubble tasks, and each device's operations as
    ``F2:0``."""
    return {
        "name": schedule.name,
        "placement": schedule.placement.kind.name,
        "device_of_stage": list(schedule.placement.device_of_stage),
        "num_microbatches": schedule.num_microbatches,
        "order": [[str(op) for op in order] for order in schedule.order],
        "bubble_tasks": [asdict(task) for task in schedule.bubble_tasks],
    }


def from_json(value: str | Mapping[str, Any]) -> Schedule:
    """Parse the object or text that ``to_json`` made; raises ValueError for anything else.

    ``bubble_tasks`` may be missing.
    """
    record = parse_json(value) if isinstance(value, str) else value
    try:
        home = tuple(map(_whole, record["device_of_stage"]))
        order = tuple(tuple(_operation(text) for text in row) for row in record["order"])
        name, count = str(record["name"]), _whole(record["num_microbatches"])
        kind = str(record["placement"])
        bubble_tasks = tuple(map(_bubble_task, record.get("bubble_tasks", ())))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a schedule: {error!r}") from None
    _require_few(order, count)
    if max(home, default=0) >= len(order):
        raise ValueError(
            f"stages are on devices 0 to {max(home)}, but order has {len(order)} devices"
        )
    placement = next((p for p in _known(home) if p.kind.name == kind), None)
    if placement is None:
        raise ValueError(f"no {kind} placement has its stages on devices {home}")
    return Schedule(name, placement, count, order, bubble_tasks)


def _bubble_task(record: Mapping[str, Any]) -> BubbleTask:
    devices = record["devices"]
    return BubbleTask(
        str(record["name"]),
        tuple(map(_number, record["slice_seconds"])),
        None if devices is None else tuple(map(_whole, devices)),
        tuple(map(_slice, record.get("slices", ()))),
        tuple(tuple(map(_dep, deps)) for deps in record.get("deps", ())),
        tuple(map(_whole, record.get("consumers", ()))),
    )


def _slice(record: Sequence[Any]) -> tuple[int, int, int, int]:
    first, last, start, end = map(_whole, record)
    return first, last, start, end


def _dep(record: Sequence[Any]) -> SliceDependency:
    task, number, lag = record
    return SliceDependency(_whole(task), _whole(number), _number(lag))


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(
            f"not a schedule: expected a whole number, 0 or more, got {str(value)[:60]!r}"
        )
    return value


def _number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"not a schedule: expected a number, got {str(value)[:60]!r}")
    return float(value)


def _require_few(order: Sequence[Sequence[Operation]], num_microbatches: int) -> None:
    """Raise ValueError if there are too few operations for these stages or microbatches."""
    count = sum(map(len, order))
    last = max((op.stage for row in order for op in row), default=0)
    if num_microbatches > count or last >= count:
        raise ValueError(
            f"{num_microbatches} microbatch(es) and stages up to {last} cannot all be in "
            f"{count} operation(s)"
        )


def _from_zero(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """Renumber the forwards of a stage from 0 if its backwards count from 0.

    torch 2.x numbers the forwards of 1F1B's last stage from 1, so that the last has a microbatch
    that does not exist.
    """
    numbers: dict[tuple[OpType, int], list[int]] = {}
    for op in operations:
        numbers.setdefault((op.kind, op.stage), []).append(op.microbatch)
    late = {
        stage
        for (kind, stage), found in numbers.items()
        if kind is OpType.FORWARD
        and [number - 1 for number in found] == numbers.get((OpType.BACKWARD, stage))
        and found[0] == 1
    }
    return tuple(
        op._replace(microbatch=op.microbatch - 1)
        if op.kind is OpType.FORWARD and op.stage in late
        else op
        for op in operations
    )


def _all_split(order: Sequence[tuple[Operation, ...]]) -> list[tuple[Operation, ...]]:
    """Orders with every backward split, if any is."""
    if not any(op.kind is OpType.WEIGHT_GRAD for operations in order for op in operations):
        return list(order)
    parts = (OpType.INPUT_GRAD, OpType.WEIGHT_GRAD)
    return [
        tuple(
            part
            for op in operations
            for part in (
                [op._replace(kind=kind) for kind in parts] if op.kind is OpType.BACKWARD else [op]
            )
        )
        for operations in order
    ]


def _require_ascending(order: Sequence[Sequence[Operation]]) -> None:
    """Raise ValueError for backwards that all run from the last microbatch to the first.

    ``validate`` lists any other disorder, operation by operation.
    """
    microbatches: dict[int, list[int]] = {}
    for op in (op for operations in order for op in operations):
        if op.kind in BACKWARDS:
            microbatches.setdefault(op.stage, []).append(op.microbatch)
    if microbatches and all(
        len(found) > 1 and all(a > b for a, b in pairwise(found)) for found in microbatches.values()
    ):
        raise ValueError(
            "backwards of every stage run from the last microbatch to the first, as in "
            "torch's looped BFS. Here gradients are accumulated in the order of the microbatches: "
            "write the backwards in that order"
        )


def _operations(cell: str) -> list[Operation]:
    """Operations of one cell of a CSV file."""
    if not cell or _ACTION.fullmatch(cell):
        return []
    if overlap := _OVERLAP.fullmatch(cell):
        return [_operation(part) for part in overlap[1].split(";")]
    return [_operation(cell)]


def _operation(text: str) -> Operation:
    """Operation written as ``2F0`` or ``F2:0``."""
    match = re.fullmatch(r"(0|[1-9][0-9]{0,8})([FBIWROLX])(0|[1-9][0-9]{0,8})", text.strip())
    if match is None:
        try:
            return Operation.parse(text)
        except ValueError:
            raise ValueError(
                f"not an operation: {text[:60]!r}; expected for example 2F0 or F2:0"
            ) from None
    return Operation(OpType(match[2]), int(match[1]), int(match[3]))


def _shown(order: Sequence[Sequence[Operation]]) -> Placement:
    """Placement whose stages are on the devices of their rows."""
    rows: dict[int, set[int]] = {}
    for device, operations in enumerate(order):
        for op in operations:
            if op.kind is not OpType.BUBBLE_TASK:
                rows.setdefault(op.stage, set()).add(device)
    missing = sorted(set(range(max(rows))) - rows.keys())
    if missing:
        raise ValueError(f"no row runs stage {', '.join(map(str, missing))}")
    for stage, devices in sorted(rows.items()):
        if len(devices) > 1:
            shown = ", ".join(str(device + 1) for device in sorted(devices))
            raise ValueError(f"stage {stage} is in rows {shown}")
    homes = tuple(min(rows[stage]) for stage in sorted(rows))
    for placement in _known(homes):
        if placement.num_devices == len(order):
            return placement
    raise ValueError(
        f"stages on devices {homes} are none of the placements "
        f"{', '.join(PLACEMENTS)} on {len(order)} devices"
    )


def _known(home: tuple[int, ...]) -> Iterator[Placement]:
    """Placements with these devices of their stages."""
    num_devices = max(home, default=0) + 1
    chunks = len(home) // num_devices
    for kind in PLACEMENTS.values():
        if num_devices == 1:
            placement = make_placement(kind.name, 1, 2 * chunks)
            if placement.device_of_stage == home:
                yield placement
        elif kind.allows(chunks) and kind.homes(num_devices, chunks) == home:
            yield kind.place(num_devices, chunks)
