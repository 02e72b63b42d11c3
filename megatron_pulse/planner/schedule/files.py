"""Schedules as text: CSV in the style of torch.distributed.pipelining's action files, and JSON.

CSV has one row per device and one cell per operation, in order: ``2F0`` is the forward of stage 2
on microbatch 0 (B whole backward, I input gradient, W weight gradient). Ours are also read and
may be mixed: ``F2:0``. Empty cells (idle slots) count for nothing. Stages are on the devices whose
rows name them.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_pulse.planner.placement import Placement, fold, interleaved, sequential
from megatron_pulse.planner.schedule.operations import Kind, Operation, Schedule


def to_csv(schedule: Schedule) -> str:
    """One line per device, cells like ``2F0``."""
    return "".join(
        ",".join(f"{op.stage}{op.kind.value}{op.microbatch}" for op in order) + "\n"
        for order in schedule.order
    )


def from_csv(text: str, placement: Placement | None = None, name: str = "csv") -> Schedule:
    """The schedule of a CSV text, for ``placement`` or the one that its rows show.

    Raises ValueError naming the row and cell that cannot be read, or when the rows show none of
    the placements; whether the schedule can run is ``validate``'s to say.
    """
    order: list[tuple[Operation, ...]] = []
    for row, cells in enumerate(csv.reader(io.StringIO(text)), 1):
        operations = []
        for column, cell in enumerate(cells, 1):
            if cell.strip():
                try:
                    operations.append(_operation(cell))
                except ValueError as error:
                    raise ValueError(f"row {row}, cell {column}: {error}") from None
        order.append(tuple(operations))
    while order and not order[-1]:
        order.pop()
    if not any(order):
        raise ValueError("the file has no operations")
    count = 1 + max(op.microbatch for operations in order for op in operations)
    return Schedule(name, placement or _shown(order), count, tuple(order))


def to_json(schedule: Schedule) -> dict[str, Any]:
    """Name, placement, microbatches, and per device its operations as ``F2:0``."""
    return {
        "name": schedule.name,
        "placement": schedule.placement.kind.value,
        "device_of_stage": list(schedule.placement.device_of_stage),
        "num_microbatches": schedule.num_microbatches,
        "order": [[str(op) for op in order] for order in schedule.order],
    }


def from_json(value: str | Mapping[str, Any]) -> Schedule:
    """The schedule of what ``to_json`` gives, or of its text; ValueError for other things."""
    record = json.loads(value) if isinstance(value, str) else value
    try:
        home = tuple(int(device) for device in record["device_of_stage"])
        order = tuple(tuple(_operation(text) for text in row) for row in record["order"])
        name, count = str(record["name"]), int(record["num_microbatches"])
        kind = str(record["placement"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a schedule: {error!r}") from None
    placement = _known(home)
    if placement is None or placement.kind.value != kind:
        raise ValueError(f"no {kind} placement has its stages on devices {home}")
    return Schedule(name, placement, count, order)


def _operation(text: str) -> Operation:
    """``2F0`` or ``F2:0``."""
    match = re.fullmatch(r"(\d+)([FBIW])(\d+)", text.strip())
    if match is None:
        try:
            return Operation.parse(text)
        except ValueError:
            raise ValueError(
                f"not an operation: {text!r}; expected for example 2F0 or F2:0"
            ) from None
    return Operation(Kind(match[2]), int(match[1]), int(match[3]))


def _shown(order: Sequence[Sequence[Operation]]) -> Placement:
    """The placement whose stages are where the rows run them."""
    home: dict[int, int] = {}
    for device, operations in enumerate(order):
        for op in operations:
            if home.setdefault(op.stage, device) != device:
                raise ValueError(f"stage {op.stage} is in rows {home[op.stage] + 1}, {device + 1}")
    stages = sorted(home)
    if stages != list(range(len(stages))):
        missing = sorted(set(range(stages[-1])) - set(stages))
        raise ValueError(f"no row runs stage {', '.join(map(str, missing))}")
    found = _known(tuple(home[s] for s in stages))
    if found is None or found.num_devices != len(order):
        raise ValueError(
            f"stages on devices {tuple(home[s] for s in stages)} are none of the placements "
            f"sequential, interleaved and fold on {len(order)} devices"
        )
    return found


def _known(home: tuple[int, ...]) -> Placement | None:
    """The placement with these homes of its stages."""
    num_devices = max(home, default=0) + 1
    chunks = len(home) // num_devices
    for placement in (
        sequential(num_devices),
        interleaved(num_devices, chunks),
        fold(num_devices, max(1, chunks // 2)),
    ):
        if placement.device_of_stage == home:
            return placement
    return None
