"""``pulse compare``: what a run did beside its plan, drawn, said, and learnt from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from megatron_pulse.cli.main import main
from megatron_pulse.planner.layout.routes import Payload
from megatron_pulse.planner.plan_file.plan_file import PlanFile, save_plan
from megatron_pulse.planner.schedule.check.simulate import Timeline, simulate
from megatron_pulse.planner.schedule.message import Message
from megatron_pulse.planner.schedule.operations import Operation, OpType
from megatron_pulse.planner.trace.compare import measured_problem
from megatron_pulse.planner.trace.trace import TimedWait, save_trace
from megatron_pulse.profile.files import load_profile
from tests.cli.conftest import Refused, of_class
from tests.plans import MICRO_BATCH, small_plan, small_profile, trace_of
from tests.reference import unsealed_record


@pytest.fixture(autouse=True)
def here(planned: Path) -> Path:
    return planned


def measured(plan: PlanFile, forward: float, backward: float, weight: float) -> Timeline:
    """A run whose operations take these multiples of what was planned, more on later stages."""
    problem = plan.problem
    grow = [1 + 0.1 * s for s in range(len(plan.stages))]

    def scaled(values: tuple[float, ...], by: float) -> tuple[float, ...]:
        return tuple(by * g * v for g, v in zip(grow, values, strict=True))

    split = None if problem.weight_grad is None else scaled(problem.weight_grad, weight)
    slower = replace(
        problem,
        forward=scaled(problem.forward, forward),
        backward=scaled(problem.backward, backward),
        weight_grad=split,
    )
    return simulate(slower, plan.schedule)


@pytest.mark.parametrize("split", [False, True])
def test_compare_finds_what_differs(
    split: bool, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = small_plan(split=split)
    save_plan(plan, "a.json")
    lines = [measured(plan, f, 1.0, 3.0) for f in (1.9, 2.0, 2.2)]
    save_trace(trace_of(plan, lines), here / "run" / "trace.json")
    assert main("compare a.json run --json".split()) == 0
    record: Any = json.loads(capsys.readouterr().out)
    assert record["steps"] == [3, 4, 5]
    rows = {(row["kind"], row["stage"]): row for row in record["stages"]}
    assert len(rows) == 4 * (3 if split else 2)
    for stage in range(4):
        seconds = rows["forward", stage]["seconds"]
        assert seconds["predicted"] == pytest.approx(plan.problem.forward[stage])
        assert seconds["measured"] == pytest.approx((2 + 0.2 * stage) * seconds["predicted"])
    makespan = record["makespan_s"]
    assert makespan["predicted"] == pytest.approx(plan.simulate_step().timeline.makespan)
    assert makespan["measured"] == pytest.approx(lines[1].makespan)
    sent = 8 * plan.predicted["pipeline_bytes_per_sample"]
    assert record["sent_bytes"] == {"predicted": sent, "measured": 2000}
    said = " ".join(record["in_words"])
    # Durations grow along the chain, so what differs most is of the last stage.
    assert "stage 3 took" in said and "longer" in said and "less were sent" in said
    assert main("compare a.json run/trace.json -o both.svg".split()) == 0
    out = capsys.readouterr().out
    assert all(line in out for line in record["in_words"]) and "drawn to both.svg" in out
    svg = ElementTree.parse(here / "both.svg").getroot()
    bars = of_class(svg, "op")
    assert len(bars) == 2 * 4 * 4 * (3 if split else 2)
    text = "".join(svg.itertext())
    assert "measured, step 4: makespan" in text  # the step of median length
    assert main("compare a.json run -o both.html".split()) == 0
    page = (here / "both.html").read_text()
    assert page.count("<svg") == 1 and "Where they differ most" in page


@pytest.mark.parametrize(("split", "recompute"), [(False, False), (True, False), (False, True)])
def test_compare_writes_a_measured_profile(
    split: bool, recompute: bool, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stages of the written profile take what was measured, at all of its sizes."""
    plan = small_plan(split=split, recompute=recompute)
    save_plan(plan, "a.json")
    trace = trace_of(plan, [measured(plan, 2.0, 2.5, 3.0)])
    save_trace(trace, "trace.json")
    argv = "compare a.json trace.json --profile profile.json --write-profile new.json"
    before = (here / "profile.json").read_bytes()
    assert main(argv.split()) == 0
    assert "written to new.json" in capsys.readouterr().out
    assert (here / "profile.json").read_bytes() == before
    old, new = small_profile(), load_profile("new.json")
    costs, took = new.at(MICRO_BATCH, plan.activations), measured_problem(plan.problem, trace)
    for stage in range(len(plan.stages)):
        held = plan.partition.layers_of_stage(stage)
        weight = took.weight_grad[stage] if took.weight_grad is not None else 0.0
        assert sum(costs.forward_s[i] for i in held) == pytest.approx(took.forward[stage])
        whole = took.backward[stage] + weight
        assert sum(costs.backward_s[i] for i in held) == pytest.approx(whole)
        if split:
            assert sum(costs.weight_grad_s[i] for i in held) == pytest.approx(weight)
        ratios = {
            round(new.times[size][i].forward_s / old.times[size][i].forward_s, 9)
            for size in (1, 2)
            for i in held
        }
        assert len(ratios) == 1
    assert new.layers == old.layers and "scaled to what a run measured" in new.method


def test_compare_refuses_another_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = small_plan()
    trace = trace_of(plan, [plan.simulate_step().timeline])
    other = replace(
        trace,
        backbone={"name": "unet-tiny", "options": {}},
        world={**trace.world, "data": 3, "pipeline": 4},
    )
    save_trace(other, "other.json")
    assert main("compare plan.json other.json -o o.svg".split()) == 2
    err = capsys.readouterr().err
    for text in ("3 faults", "data 3, the plan has 2", "pipeline 4", "backbone is unet-tiny"):
        assert text in err
    whole = small_plan("sequential")
    line = whole.simulate_step().timeline
    save_trace(trace_of(whole, [line]), "row.json")
    assert main("compare plan.json row.json".split()) == 2
    assert "stages are on devices (0, 1, 1, 0) in the plan" in capsys.readouterr().err
    assert not (here / "o.svg").exists()


def test_compare_refuses_a_plan_with_wrong_figures(here: Path, refused: Refused) -> None:
    plan = small_plan()
    save_trace(trace_of(plan, [plan.simulate_step().timeline]), "trace.json")
    record = unsealed_record(here / "plan.json")
    record["times"]["forward"][1] *= 0.5
    record["predicted"]["bubble"] = 0.0
    (here / "plan.json").write_text(json.dumps(record))
    argv = "compare plan.json trace.json -o both.svg --profile profile.json --write-profile n.json"
    refused(
        argv.split(),
        "2 faults",
        "times.forward.1 is",
        "predicted.bubble is 0; recomputed from profile",
    )


def test_compare_draws_waiting(here: Path) -> None:
    plan = small_plan()
    trace = trace_of(plan, [plan.simulate_step().timeline])
    made, taken = (Operation(OpType.FORWARD, stage, 0) for stage in (0, 1))
    wait = TimedWait(Message(made, taken, Payload.BOUNDARY, "", 0, 1), 0.0, 0.01)
    save_trace(replace(trace, steps=(replace(trace.steps[0], waits=(wait,)),)), "trace.json")
    assert main("compare plan.json trace.json -o both.svg".split()) == 0
    svg = ElementTree.parse(here / "both.svg").getroot()
    marks = [m for m in of_class(svg, "mark") if m.get("fill") == "url(#wait)"]
    assert len(marks) == 2  # and one in the legend
    assert f"of {made} from device 0" in str(marks[0].findtext("{*}title"))
    assert "waits for a message" in "".join(svg.itertext())
