"""CSV files of every schedule of the installed torch.distributed.pipelining."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules as theirs

from megatron_pulse.planner.layout.placement import fold, interleaved, sequential
from megatron_pulse.planner.schedule.check.validate import validate
from megatron_pulse.planner.schedule.operations import Operation
from megatron_pulse.planner.schedule.serialize import from_csv

DEVICES, MICROBATCHES = 2, 4
CLASSES: dict[str, Any] = {
    "ScheduleGPipe": sequential(DEVICES),
    "Schedule1F1B": sequential(DEVICES),
    "ScheduleInterleaved1F1B": interleaved(DEVICES, 2),
    "ScheduleInterleavedZeroBubble": interleaved(DEVICES, 2),
    "ScheduleZBVZeroBubble": fold(DEVICES),
    "ScheduleDualPipeV": fold(DEVICES),
    "ScheduleLoopedBFS": interleaved(DEVICES, 2),
}


def made(name: str) -> Any:
    """The schedule of the first device, as torch makes it of its stages."""
    homes = CLASSES[name].device_of_stage
    stages = [
        SimpleNamespace(
            stage_index=stage, num_stages=len(homes), group_size=DEVICES, group_rank=0, group=None,
            is_first=stage == 0, is_last=stage == len(homes) - 1, has_backward=False,
            stage_index_to_group_rank=dict(enumerate(homes)), submod=torch.nn.Identity(),
        )
        for stage, device in enumerate(homes)
        if device == 0
    ]  # fmt: skip
    given = stages[0] if len(homes) == DEVICES else stages
    return getattr(theirs, name)(given, MICROBATCHES, loss_fn=lambda y, t: y)


def computed(name: str, actions: list[Any]) -> list[Operation]:
    """The operations of torch's actions, one after the other."""
    flat = [part for a in actions if a is not None for part in (a.sub_actions or (a,))]
    found = []
    for action in (a for a in flat if a.is_compute_op):
        kind, number = action.computation_type.value, action.microbatch_index
        if (name, kind, action.stage_index) == ("Schedule1F1B", "F", DEVICES - 1):
            number -= 1  # torch counts these from 1
        kinds = "IW" if (name, kind) == ("ScheduleDualPipeV", "B") else kind
        found += [Operation.parse(f"{one}{action.stage_index}:{number}") for one in kinds]
    return found


def test_every_class_is_here() -> None:
    def below(kind: type) -> set[type]:
        return {kind}.union(*map(below, kind.__subclasses__()))

    found = {kind.__name__ for kind in below(theirs._PipelineSchedule)}
    bases = {"PipelineScheduleSingle", "PipelineScheduleMulti"}
    assert {name for name in found if not name.startswith("_")} - bases == CLASSES.keys()


@pytest.mark.parametrize("name", CLASSES)
def test_a_file_of_torch_is_its_order(name: str, tmp_path: Path) -> None:
    schedule, path = made(name), tmp_path / "order.csv"
    single = isinstance(schedule, theirs.PipelineScheduleSingle)
    order = schedule._get_pipeline_order() if single else schedule.pipeline_order
    texts = []
    if single:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(order[rank] for rank in order)
        texts.append(path.read_text())
        assert "REDUCE_GRAD" in texts[0]
    else:
        for form in ("compute_only", "compute_comms"):
            schedule._dump_csv(str(path), form)
            texts.append(path.read_text())
        assert "SEND_F" in texts[1] and "RECV_B" in texts[1]
    for text in texts:
        if name == "ScheduleLoopedBFS":
            with pytest.raises(ValueError, match=r"last microbatch to the first, .* looped BFS"):
                from_csv(text)
            continue
        found = from_csv(text)
        assert found.placement == CLASSES[name] and found.num_microbatches == MICROBATCHES
        assert [list(row) for row in found.order] == [computed(name, order[rank]) for rank in order]
        assert validate(found) == []


def test_cells_that_torch_does_not_write() -> None:
    for cell in ("(0F0;1G0)OVERLAP_F_B", "()OVERLAP_F_B", "0SEND_F", "0OVERLAP_F_B"):
        with pytest.raises(ValueError, match="row 1, cell 2: not an operation: "):
            from_csv(f"0F0,{cell},0B0\n1F0,1B0")
