"""The table of placements: what its rows say, and that a further row is all a placement needs."""

from __future__ import annotations

import pytest

from megatron_pulse.backbone.costs import weighted_costs
from megatron_pulse.planner.cluster.link import Link
from megatron_pulse.planner.layout.layouts import FOLD_EXACT, LAYOUTS, Layout, Skips, modes
from megatron_pulse.planner.layout.placement import PLACEMENTS, PlacementKind, make_placement
from megatron_pulse.planner.partition.best import best, best_of_each
from megatron_pulse.planner.partition.find import Goal, PartitionError
from megatron_pulse.planner.schedule.check.simulate import run
from megatron_pulse.planner.schedule.check.validate import faults_for
from megatron_pulse.planner.schedule.classic.names import CLASSICS
from megatron_pulse.planner.schedule.classic.registry import SCHEDULES, make_schedule
from megatron_pulse.planner.schedule.compare import rivals
from megatron_pulse.planner.schedule.files import from_csv, from_json, to_csv, to_json
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.step.plan import make_plan
from megatron_pulse.planner.tune.config import Choices, configs
from tests.planner.chains import SDXL_UNET, chain


def _winding(num_devices: int, num_chunks: int) -> tuple[int, ...]:
    there = tuple(range(num_devices))
    return tuple(d for k in range(num_chunks) for d in (there, there[::-1])[k % 2])


def _back_first(num_devices: int, num_chunks: int) -> tuple[int, ...]:
    there = tuple(range(num_devices))
    return (*there[::-1], *there) * (num_chunks // 2)


SNAKE = PlacementKind("snake", "there and back, three times", _winding, 3, 2)
FOLDED_UP = PlacementKind("folded up", "back and there", _back_first, 2, 2, mirrored=True)


@pytest.fixture(params=[SNAKE, FOLDED_UP], ids=str)
def further(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Layout:
    """A placement more, by a row of each table and nothing else."""
    kind: PlacementKind = request.param
    skips = Skips.HOME if kind.mirrored else Skips.DIRECT
    layout = Layout(f"{kind} layout", kind, kind.least_chunks, skips, mode=kind.name)
    monkeypatch.setitem(PLACEMENTS, kind.name, kind)
    monkeypatch.setitem(LAYOUTS, layout.name, layout)
    return layout


def test_rows_fit_the_schedules() -> None:
    named = {name for kind in PLACEMENTS.values() for name in kind.classics}
    assert named == set(CLASSICS) - {"gpipe"}
    for kind in PLACEMENTS.values():
        assert kind.auto in SCHEDULES
        for count in (kind.least_chunks, kind.most_chunks(7)):
            placed = kind.place(4, count)
            assert [len(placed.stages_of_device(d)) for d in range(4)] == [count] * 4
            home = placed.device_of_stage
            assert not kind.mirrored or home == home[::-1]
            assert make_placement(kind.name, 4, count) == placed == placed.over(4)
    assert set(modes()) == {"exact", "soft", "sequential", "interleaved"}


@pytest.mark.parametrize(
    ("kind", "allowed", "text"),
    [
        ("sequential", {1}, "1"),
        ("interleaved", {2, 3, 4, 5}, "2, 3, ..."),
        ("fold", {2, 4}, "2, 4, ..."),
    ],
)
def test_stages_on_a_device(kind: str, allowed: set[int], text: str) -> None:
    row = PLACEMENTS[kind]
    assert {n for n in range(6) if row.allows(n)} == allowed and row.chunks == text
    assert [row.most_chunks(n) for n in range(6)] == [
        max([k for k in allowed if k <= n], default=min(allowed)) for n in range(6)
    ]
    with pytest.raises(ValueError, match=f"a device of {kind} hosts {text.replace('.', '[.]')}"):
        row.place(2, 0)


def test_one_row_is_all_that_a_placement_needs(further: Layout) -> None:
    """It is cut, scheduled, checked, timed, compiled, written, read, tuned and compared."""
    num_layers, skips = SDXL_UNET
    backbone = chain(num_layers, skips)
    costs = weighted_costs(backbone, [1.0 + i % 3 for i in range(num_layers)])
    goal = Goal(link=Link(bytes_per_s=100.0))
    found = best(further, costs, 3, goal)
    placement = found.partition.placement
    assert placement.device_of_stage == further.kind.homes(3, further.num_chunks)
    if further.collocates:  # a fold whose devices have other names costs as much
        assert found.volume.skip == 0
        other = best(FOLD_EXACT, costs, 3, goal)
        assert max(found.evaluation.load_s) == max(other.evaluation.load_s)
        assert found.partition.cuts == other.partition.cuts
    else:
        assert found.volume.skip > 0
        with pytest.raises(PartitionError, match="on one device takes a fold; the placement is"):
            make_plan(backbone, costs, placement, goal=Goal(collocate=True))

    num = placement.num_stages
    problem = ScheduleProblem(placement, 5, (1.0,) * num, (2.0,) * num, link=0.5)
    schedule = make_schedule("auto", placement, 5, link=0.5, effort=2)
    assert schedule.name == "wave" and faults_for(problem, schedule) == []
    assert run(problem, schedule).makespan >= 15 * further.num_chunks
    with pytest.raises(ValueError, match=f"this is {further.kind} with {further.num_chunks}"):
        make_schedule("hanayo", placement, 5)
    assert from_json(to_json(schedule)) == schedule
    assert from_csv(to_csv(schedule), name="wave") == schedule
    assert {"gpipe", "1f1b"} <= {rival.name for rival in rivals(problem)}

    step = make_plan(backbone, costs, placement, "gpipe", goal=goal).step(4)
    assert step.communication.messages and step.schedule.placement == placement
    tried = configs(3, 3, 12, True, Choices(layouts=(further,), pipeline=(3,)))
    assert {config.placement for config in tried} == {placement}
    assert further in best_of_each(costs, 3, goal, further.num_chunks)
