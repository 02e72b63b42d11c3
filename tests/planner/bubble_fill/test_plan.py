"""Filled plans: as files, worked out again, shown, and refused where they are edited."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_pulse.cli.main import main
from megatron_pulse.planner.bubble_fill.components import Component, FrozenLayer
from megatron_pulse.planner.bubble_fill.encoder_table import (
    EncoderOrigin,
    EncoderTable,
    TableError,
    component_records,
    read_table,
)
from megatron_pulse.planner.bubble_fill.search import FillError
from megatron_pulse.planner.plan_file.plan_file import PlanFile, PlanFileError, read_plan, save_plan
from megatron_pulse.planner.schedule.check.validate import validate
from megatron_pulse.planner.schedule.operations import Operation, OpType
from megatron_pulse.planner.tune.plans import encoder_policies
from megatron_pulse.planner.tune.plans.bubble_fill import fill_plan, slowest_link
from megatron_pulse.planner.tune.plans.encoder_policies import (
    SOONER,
    EncodedPlan,
    Policy,
    encode_plan,
)
from megatron_pulse.planner.tune.plans.verify_figures import load_checked, recomputed
from tests.plans import small_plan, small_profile
from tests.reference import unsealed_record

Record = dict[str, Any]


def components(plan: PlanFile) -> tuple[Component, ...]:
    """An encoder of twelve layers, and one of three that takes its results: half of what idles."""
    idle = sum(plan.simulate_step().timeline.bubble)
    samples = plan.num_microbatches * plan.micro_batch_size
    each = 0.5 * idle / samples / 15

    def layers(count: int) -> tuple[FrozenLayer, ...]:
        return tuple(
            FrozenLayer(f"layers.{i}", {1: each, 8: 8 * each}, 1e3, 1e2, 1e2) for i in range(count)
        )

    text = Component("text", layers(12), (), 1e2, (0, 1))
    return text, Component("pooled", layers(3), ("text",), 10.0, (0,))


@pytest.fixture(scope="module")
def filled() -> PlanFile:
    plan = small_plan(split=True)
    records = json.loads(json.dumps(component_records(components(plan))))
    return recomputed(fill_plan(plan, records, 2.0).plan)


def test_a_filled_plan_is_read_as_it_was_written(filled: PlanFile, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    save_plan(filled, file)
    assert load_checked(file) == read_plan(file)[1]
    schedule = load_checked(file).schedule
    assert validate(schedule) == [] and schedule == filled.schedule
    assert [task.name for task in schedule.bubble_tasks] == ["text", "pooled"]
    timeline = filled.simulate_step().timeline
    for line in schedule.order:
        for op in line:
            for source, lag in schedule.slices_before(op):
                assert timeline.start[op] >= timeline.end[source] + lag - 1e-12
    assert any(task.deps[-1] for task in schedule.bubble_tasks)


def test_show_and_check_name_encoders(
    filled: PlanFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    save_plan(filled, file)
    assert main(["show", str(file), "-o", str(tmp_path / "plan.svg")]) == 0
    out = capsys.readouterr().out
    assert (
        "in bubbles, for the next step" in out
        and "X0        text: " in out
        and "X1        pooled: " in out
    )
    assert "bubble task, text, slice" in (tmp_path / "plan.svg").read_text()
    assert main(["check", str(file)]) == 0
    assert "it can run" in capsys.readouterr().out


def slice_twice(record: Record) -> None:
    line = next(line for line in record["schedule"]["order"] if "X0:0" in line)
    line.append("X0:0")


def dearer(record: Record) -> None:
    record["encoders"][0]["layers"][0]["seconds"]["1"] *= 2
    record["encoders"][0]["layers"][0]["seconds"]["8"] *= 2


def samples_lost(record: Record) -> None:
    record["schedule"]["bubble_tasks"][0]["slices"][0][3] += 1


def circle(record: Record) -> None:
    count = len(record["schedule"]["bubble_tasks"][0]["slice_seconds"])
    record["schedule"]["bubble_tasks"][0]["deps"][0] = [[0, count - 1, 0.0]]


EDITS: dict[str, tuple[Callable[[Record], object], str]] = {
    "twice": (slice_twice, "X0:0 is in the schedule 2 times"),
    "dearer": (dearer, "slices delay"),
    "quicker": (
        lambda r: r["encoders"][1]["layers"][0]["seconds"].update({"1": 1e-9, "8": 8e-9}),
        "slice_seconds does not follow from the costs in encoders",
    ),
    "samples": (samples_lost, "run more than once"),
    "circle": (circle, "deadlock"),
    "no encoders": (lambda r: r.pop("encoders"), "bubble task 'text' belongs to no component"),
    "another name": (
        lambda r: r["schedule"]["bubble_tasks"][1].update(name="x"), "no component is called 'x'"
    ),
    "a layer lost": (lambda r: r["encoders"][1]["layers"].pop(), "there are layers 0 to 1"),
    "bytes": (
        lambda r: r["encoders"][0].update(result_bytes=-1),
        "encoders.0.result_bytes is -1; allowed is a number from 0 to 1e15: bytes",
    ),
    "too large": (
        lambda r: r["encoders"][0]["layers"][0].update(parameter_bytes=1e14), "bytes, "
    ),
    "deps": (
        lambda r: r["schedule"]["bubble_tasks"][0].update(deps=[]),
        "deps does not follow from the costs in encoders",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_filling_is_refused(name: str, filled: PlanFile, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    save_plan(filled, file)
    record = unsealed_record(file)
    edited = copy.deepcopy(record)
    edit, reason = EDITS[name]
    edit(edited)
    assert edited != record
    file.write_text(json.dumps(edited))
    with pytest.raises(PlanFileError) as caught:
        load_checked(file)
    assert reason in str(caught.value)


def test_a_plan_without_encoders_says_nothing_of_them(tmp_path: Path) -> None:
    plan = small_plan()
    save_plan(plan, tmp_path / "plan.json")
    assert "encoders" not in json.loads((tmp_path / "plan.json").read_text())
    assert not any(op.kind is OpType.BUBBLE_TASK for line in plan.schedule.order for op in line)
    assert Operation(OpType.BUBBLE_TASK, 0, 0) not in plan.simulate_step().timeline.end


def test_a_table_that_cannot_be_used(tmp_path: Path) -> None:
    file = tmp_path / "encoders.json"
    table = EncoderTable(component_records(components(small_plan()))).record()
    file.write_text(json.dumps(table))
    assert read_table(file).components == table["components"]
    former = json.loads(file.read_text())
    for one in former["components"]:
        one["readers"] = one.pop("consumers")
    file.write_text(json.dumps(former))
    assert read_table(file).components == table["components"]
    table["components"][1]["after"] = ["pooled"]
    file.write_text(json.dumps(table))
    with pytest.raises(TableError, match="depend on each other in a cycle: pooled"):
        read_table(file)
    table["components"][0]["layers"][0]["seconds"] = {"0": 1}
    table["components"][1]["consumers"] = "some"
    del table["components"][1]["counts"]
    file.write_text(json.dumps(table))
    with pytest.raises(TableError) as caught:
        read_table(file)
    said = str(caught.value)
    assert "a number of samples, 1 or more" in said and "counts is missing" in said
    assert 'consumers is \'some\'; allowed is "all", "ends", or a list of devices' in said


def test_tune_fills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from megatron_pulse.profile.files import save_profile

    plan = small_plan()
    save_profile(small_profile(), tmp_path / "profile.json")
    (tmp_path / "encoders.json").write_text(
        json.dumps(EncoderTable(component_records(components(plan))).record())
    )
    given = ["--profile", "profile.json", "--encoders", "encoders.json", "-o", "plan.json"]
    given = [str(tmp_path / g) if g.endswith(".json") else g for g in given]
    batch = ["--global-batch-size", str(plan.global_batch_size), "--pipeline", "2"]
    limits = ["--seconds", "1", "--solver", "none", "--cluster", "cpu", "--tensor", "1"]
    # idle time that takes the encoders whole: filling is 8 % sooner, however few drafts there are
    idle = ["--layouts", "sequential", "--no-split-backward", "--micro-batch-size", "2"]
    assert main(["tune", *given, *batch, *limits, *idle]) == 0
    out = capsys.readouterr().out
    assert "unfilled  " in out and "X0        text: " in out
    assert main(["schedule", *given[:4], "-p", "2", "-m", "4", "--seconds", "1", "--no-cache"]) == 0
    out = capsys.readouterr().out
    assert "in bubbles, for the next step" in out and "X1        pooled: " in out
    origin = EncoderOrigin("another", {}, "A100-80GB", "analytic", 0)
    other = EncoderTable(json.loads(json.dumps(component_records(components(plan)))), origin)
    (tmp_path / "encoders.json").write_text(json.dumps(other.record()))
    assert read_table(tmp_path / "encoders.json") == other
    assert main(["schedule", *given[:4], "-p", "2", "-m", "4", "--seconds", "1"]) == 0
    said = capsys.readouterr().err
    assert (
        "encoder costs are for backbone another" in said
        and "encoder costs are of A100-80GB" in said
    )
    csv = str(tmp_path / "x.csv")
    assert main(["schedule", *given[:4], "-p", "2", "-m", "4", "--csv", csv]) == 2
    assert not (tmp_path / "x.csv").exists()
    assert "--csv holds no encoders" in capsys.readouterr().err
    assert [f.name for f in load_checked(tmp_path / "plan.json").schedule.bubble_tasks] == [
        "text",
        "pooled",
    ]


def steady(name: str, layers: int, each: float) -> Component:
    made = tuple(FrozenLayer(f"layers.{i}", {1: each}, 1e3, 1e2, 1e2) for i in range(layers))
    return Component(name, made, (), 1e2, (0, 1))


def encoded(plan: PlanFile, *given: Component, **fixed: str) -> EncodedPlan:
    records = json.loads(json.dumps(component_records(given)))
    return encode_plan(plan, records, 0.5, fixed)


def test_each_encoder_runs_where_a_step_is_shortest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Small layers fit into bubbles. One layer longer than every bubble runs before the step,
    divided over the devices."""
    plan = small_plan(split=True)
    idle, samples = sum(plan.simulate_step().timeline.bubble), plan.num_samples
    text = steady("text", 12, 0.4 * idle / samples / 12)
    found = encoded(plan, text, steady("vae", 1, 3 * max(plan.problem.forward)))
    assert {c.name: c.policy for c in found.choices} == {"text": "fill", "vae": "before-step"}
    assert [f.name for f in found.plan.schedule.bubble_tasks] == ["text"]
    assert [one["name"] for one in found.plan.before_step or ()] == ["vae"]
    both = {c.name: c for c in found.choices}
    for choice in found.choices:
        steps = [s for s in (choice.fill_s, choice.before_step_s) if s is not None]
        assert found.pipeline_s <= min(steps) / SOONER
        assert choice.stored_s is not None and choice.stored_s <= found.pipeline_s
    # One of two devices tells the other its share's results, and then the other way round.
    link = slowest_link(plan)
    told = samples * 1e2 / link.bytes_per_s + 2 * link.latency_s
    front = -(-samples // plan.pipeline) * 3 * max(plan.problem.forward) + told
    assert found.encoders_before_step_s == pytest.approx(front) and told > 1e-3 * front
    assert both["vae"].stored_s == pytest.approx(found.pipeline_s - front)
    file = tmp_path / "plan.json"
    save_plan(recomputed(found.plan), file)
    assert load_checked(file).policies == found.plan.policies
    assert main(["show", str(file)]) == 0
    out = capsys.readouterr().out
    assert "in bubbles" in out and "before step" in out and "stored MB a sample" in out
    record = unsealed_record(file)
    record["policies"][0]["policy"] = "before-step"
    file.write_text(json.dumps(record))
    with pytest.raises(PlanFileError, match="but the plan has"):
        load_checked(file)


def test_policies_that_are_given_are_obeyed() -> None:
    plan = small_plan(split=True)
    idle = sum(plan.simulate_step().timeline.bubble)
    text = steady("text", 12, 0.4 * idle / plan.num_samples / 12)
    assert encoded(plan, text, text=Policy.BEFORE_STEP).plan.encoders is None
    long = steady("vae", 1, 3 * max(plan.problem.forward))
    assert [f.name for f in encoded(plan, long, vae=Policy.FILL).plan.schedule.bubble_tasks] == [
        "vae"
    ]


def test_who_takes_results_is_not_in_idle_time_alone() -> None:
    """Sets of dependent components, or of many, are not all tried."""
    text, pooled = components(small_plan())
    assert {frozenset(), frozenset({"text"}), frozenset({"text", "pooled"})} == {
        *encoder_policies._sets([text, pooled])
    }
    many = [steady(f"x{i}", 1, 1.0 + i) for i in range(7)]
    assert len(list(encoder_policies._sets(many))) == 2**encoder_policies.MOST


def test_encoders_without_memory_anywhere_are_refused() -> None:
    large = replace(steady("text", 1, 1e-6).layers[0], parameter_bytes=1e13)
    with pytest.raises(FillError, match="bytes"):
        encoded(small_plan(), Component("text", (large,), (), 1.0, (0,)))
