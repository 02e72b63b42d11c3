"""The table of placements: what its rows say, and that a further row is all a placement needs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pulse.backbone.costs import weighted_costs
from megatron_pulse.cli.main import main
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.crossing import crossings
from megatron_pulse.planner.layout.layouts import (
    FOLD_EXACT,
    LAYOUTS,
    WHOLE,
    Layout,
    Skips,
    layout_name,
    layouts_called,
    modes,
)
from megatron_pulse.planner.layout.placement import (
    PLACEMENTS,
    Partition,
    Placement,
    PlacementKind,
    make_placement,
)
from megatron_pulse.planner.layout.routes import Payload, trace_routes
from megatron_pulse.planner.partition.find import Goal, PartitionError, best, best_of_each
from megatron_pulse.planner.program.communication import messages_of
from megatron_pulse.planner.program.make_plan import make_plan
from megatron_pulse.planner.schedule.check.simulate import simulate
from megatron_pulse.planner.schedule.check.validate import faults_for
from megatron_pulse.planner.schedule.classic.catalog import CLASSICS
from megatron_pulse.planner.schedule.classic.compare import rivals
from megatron_pulse.planner.schedule.operations import Operation, OpType
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.registry import SCHEDULES, make_schedule
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from megatron_pulse.planner.schedule.serialize import from_csv, from_json, to_csv, to_json
from megatron_pulse.planner.tune.config import Choices, configs
from tests.planner.chains import SDXL_UNET, chain
from tests.planner.strategies import placements


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
        row.place(2, next(n for n in range(1, 6) if n not in allowed))


def test_one_row_is_all_that_a_placement_needs(further: Layout) -> None:
    """A new row is cut, scheduled, checked, simulated, compiled, saved, tuned and compared."""
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
    schedule = synthesize(problem, effort=2).schedule
    assert schedule.name == "wave" and faults_for(problem, schedule) == []
    assert simulate(problem, schedule).makespan >= 15 * further.num_chunks
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


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=str)
def test_a_partition_has_the_name_of_its_layout(layout: Layout) -> None:
    num_layers, skips = SDXL_UNET
    costs = weighted_costs(chain(num_layers, skips), [1.0 + i % 3 for i in range(num_layers)])
    devices = 1 if layout is WHOLE else 2
    found = best(layout, costs, devices, Goal(link=Link(bytes_per_s=1e9)))
    # Skips of a soft fold may stay on their devices though they need not.
    exact = layout.name == "fold soft" and found.volume.skip == 0
    name = layout_name(found.partition, costs.skips)
    assert name == (FOLD_EXACT.name if exact else layout.name)
    assert layouts_called(layout.name) == [layout]


def test_layouts_are_called_by_their_placement_too() -> None:
    num_layers, skips = SDXL_UNET
    costs = weighted_costs(chain(num_layers, skips), [1.0] * num_layers)
    cut = Partition(make_placement("fold", 2, 2), (0, 1, 2, 3, num_layers))
    assert layout_name(cut, costs.skips) == "fold soft"
    third = Partition(make_placement("interleaved", 2, 3), (0, 1, 2, 3, 4, 5, num_layers))
    assert layout_name(third, costs.skips) == "interleaved of 6 stages"
    assert layouts_called("fold") == [FOLD_EXACT, LAYOUTS["fold soft"], LAYOUTS["two waves"]]
    assert layouts_called("flod") == []


def test_a_row_is_a_choice_of_the_commands(
    further: Layout,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PULSE_CACHE_DIR", str(tmp_path))
    num, kind = 3 * further.num_chunks, further.kind.name
    times = tmp_path / "times.json"
    times.write_text(json.dumps({"forward": [1.0] * num, "backward": [2.0] * num}))
    argv = ["schedule", "--times", str(times), "-p", "3", "-m", "2", "--placement", kind]
    assert main([*argv, "--solver", "none", "--seconds", "0.1"]) == 0
    assert f"{kind} of {num} stages on P = 3, M = 2" in capsys.readouterr().out
    assert main([*argv, "--waves", "2"]) == 2
    assert f"{kind} on 3 device(s) takes {2 * num}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["partition", "--help"])
    assert f"{kind:13s} {further.help}" in capsys.readouterr().out


@settings(max_examples=60, deadline=None, derandomize=True)
@given(placements(), st.data())
def test_what_crosses_is_what_is_delivered_elsewhere(
    placement: Placement, data: st.DataObject
) -> None:
    """Costs and messages know the same of any cuts: what is local, merged, or sent, and whereto."""
    num = placement.num_stages
    num_layers = num + data.draw(st.integers(0, 6))
    inner = data.draw(st.permutations(range(1, num_layers)))
    cuts = (0, *sorted(inner[: num - 1]), num_layers)
    ends = st.tuples(st.integers(0, num_layers - 2), st.integers(1, 5))
    drawn = data.draw(st.lists(ends, max_size=6, unique=True))
    skips = [(i, j) for i, j in ((i, i + more) for i, more in drawn) if j < num_layers]
    backbone = chain(num_layers, skips, {0: range(1, num_layers)})
    partition = Partition(placement, cuts)
    routes = trace_routes(backbone, partition)
    home = placement.device_of_stage

    found = list(crossings(weighted_costs(backbone, [1.0] * num_layers), partition))
    sent = Counter((c.source, c.destination, c.skip) for c in found if not c.merged)
    assert sent == Counter(
        (d.source, d.destination, d.payload is Payload.SKIP)
        for d in routes.deliveries
        if home[d.source] != home[d.destination] and d.payload is not Payload.CONDITIONING
    )
    stage_of = partition.stage_of_layer
    apart = [(stage_of(i), stage_of(j), i) for i, j in skips if stage_of(i) != stage_of(j)]
    merged = [s for s in apart if s[1] == s[0] + 1 and s[2] == cuts[s[1]] - 1]
    assert sum(d.payload is Payload.SKIP for d in routes.deliveries) == len(apart) - len(merged)
    assert sum(c.merged for c in found) == sum(home[s] != home[t] for s, t, _ in merged)

    conditioned = [d for d in routes.deliveries if d.payload is Payload.CONDITIONING]
    users = {d: [s for s in placement.stages_of_device(d) if s] for d in set(home)}
    firsts = {min(stages) for stages in users.values() if stages}
    assert {d.destination for d in conditioned} == firsts and len(conditioned) == len(firsts)

    for stage in range(num):
        forward = messages_of(routes, Operation(OpType.FORWARD, stage, 2))
        elsewhere = [d for d in routes.given_by(stage) if home[d.destination] != home[stage]]
        assert len(forward) == len(elsewhere)
        for message in forward:  # its gradient comes back
            back = messages_of(routes, message.consumer._replace(kind=OpType.BACKWARD))
            answer = message._replace(
                producer=message.consumer._replace(kind=OpType.BACKWARD),
                consumer=message.producer._replace(kind=OpType.BACKWARD),
                source=message.destination,
                destination=message.source,
            )
            assert answer in back
