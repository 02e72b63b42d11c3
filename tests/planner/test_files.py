"""CSV and JSON of schedules: round trips, files from elsewhere, and files that are wrong."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings

from megatron_pulse.planner.layout.placement import fold, interleaved, sequential
from megatron_pulse.planner.schedule.check.validate import validate
from megatron_pulse.planner.schedule.operations import BubbleTask, Schedule
from megatron_pulse.planner.schedule.registry import make_schedule
from megatron_pulse.planner.schedule.serialize import from_csv, from_json, to_csv, to_json
from tests.planner.slices import fill
from tests.planner.strategies import equal, schedules


def filled() -> Schedule:
    """Two bubble tasks, one of them at home on one device only."""
    problem = equal(sequential(3), 4)
    bubble_tasks = [BubbleTask("text", (0.5, 1.5, 0.25)), BubbleTask("image", (1.0, 9.0), (2,))]
    return fill(problem, make_schedule("1f1b", sequential(3), 4), bubble_tasks)


def test_bubble_tasks_round_trip() -> None:
    schedule = filled()
    assert from_json(json.dumps(to_json(schedule))) == schedule
    assert from_csv(to_csv(schedule), name="1f1b", bubble_tasks=schedule.bubble_tasks) == schedule
    assert "1X1" in to_csv(schedule)


def test_csv_does_not_hold_bubble_tasks() -> None:
    faults = validate(from_csv(to_csv(filled())))
    assert len(faults) == 5 and all("there is no bubble task" in fault for fault in faults)


def test_only_stages_show_the_placement() -> None:
    assert from_csv("0X9,0F0,0B0\n1F0,1B0,0X8").num_microbatches == 1
    with pytest.raises(ValueError, match="no operations"):
        from_csv("0X0")


@settings(max_examples=60, derandomize=True)
@given(schedules())
def test_round_trips(schedule: Schedule) -> None:
    assert from_csv(to_csv(schedule), name=schedule.name) == schedule
    assert from_json(json.dumps(to_json(schedule))) == schedule


def test_cells() -> None:
    text = to_csv(make_schedule("zb-h1", sequential(2), 2))
    assert text.splitlines() == ["0F0,0F1,0I0,0W0,0I1,0W1", "1F0,1I0,1F1,1I1,1W0,1W1"]


def test_both_forms_spaces_and_idle_slots() -> None:
    text = "0F0, F0:1 ,,0B0,,0B1\n,F1:0,1B0,1F1,1B1,\n\n"
    schedule = from_csv(text)
    assert schedule.placement == sequential(2) and validate(schedule) == []
    assert " ".join(map(str, schedule.order[0])) == "F0:0 F0:1 B0:0 B0:1"


@pytest.mark.parametrize("placement", [sequential(3), fold(2), fold(2, 2), interleaved(3, 3)])
def test_the_rows_show_the_placement(placement) -> None:
    assert from_csv(to_csv(make_schedule("gpipe", placement, 2))).placement == placement


def test_a_given_placement_is_kept_and_checked_by_validate() -> None:
    text = to_csv(make_schedule("gpipe", fold(2), 1))
    faults = validate(from_csv(text, interleaved(2)))
    assert "F2:0 is on device 1; stage 2 is on device 0" in faults


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no operations"),
        ("0F0,0B0\n1F0,1G0", "row 2, cell 2: not an operation: '1G0'; expected"),
        ("0F0,1F0\n1B0,0B0", "stage 0 is in rows 1, 2"),
        ("0F0,0B0\n2F0,2B0", "no row runs stage 1"),
        ("0F0,00B0\n1F0,1B0", "row 1, cell 2: not an operation: '00B0'"),
        ("0F0\n1F0\n2F0,3F0", r"stages on devices \(0, 1, 2, 2\) are none of the placements"),
    ],
)
def test_wrong_csv(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        from_csv(text)


def test_wrong_json() -> None:
    good = to_json(make_schedule("1f1b", sequential(2), 2))
    for key in good.keys() - {"bubble_tasks"}:
        with pytest.raises(ValueError, match=key):
            from_json({k: v for k, v in good.items() if k != key})
    with pytest.raises(ValueError, match="no fold placement has its stages on devices"):
        from_json({**good, "placement": "fold"})
    with pytest.raises(ValueError, match="not an operation: 'G0:0'"):
        from_json({**good, "order": [["G0:0"]]})
    with pytest.raises(ValueError, match="bubble task 'text': it has no slices"):
        from_json(
            {**good, "bubble_tasks": [{"name": "text", "slice_seconds": [], "devices": None}]}
        )
    with pytest.raises(ValueError):
        from_json("[")
