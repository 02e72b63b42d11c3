"""Traces as values and files, and timelines compared with them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_pulse.backbone.activations import ActivationPolicies
from megatron_pulse.planner.layout.placement import Partition, fold
from megatron_pulse.planner.layout.routes import trace_routes
from megatron_pulse.planner.program.communication import compile_communication
from megatron_pulse.planner.schedule.check.simulate import Timeline, simulate
from megatron_pulse.planner.schedule.operations import Operation, OpType
from megatron_pulse.planner.schedule.problem import ScheduleProblem, equal_stages
from megatron_pulse.planner.schedule.registry import make_schedule
from megatron_pulse.planner.trace.compare import compare, measured_problem
from megatron_pulse.planner.trace.trace import (
    Trace,
    TraceError,
    load_trace,
    save_trace,
)
from megatron_pulse.planner.trace.trace_to_profile import rescale
from megatron_pulse.profile.profile import ProfileError
from tests.planner.schedules import wave
from tests.plans import small_plan, steps_of
from tests.reference import unsealed_record
from tests.toys import nested, toy_backbone

PLACEMENT, M = fold(2), 4
FORWARD, BACKWARD = (1.0, 2.0, 1.5, 1.0), (2.0, 3.5, 3.0, 2.5)


def timeline(slower: float = 1.0, split: bool = False) -> Timeline:
    forward = tuple(slower * t if s == 1 else t for s, t in enumerate(FORWARD))
    weight = (0.5, 0.75, 1.0, 1.25) if split else None
    problem = ScheduleProblem(PLACEMENT, M, forward, BACKWARD, weight)
    schedule = wave(PLACEMENT, M, forward=FORWARD, backward=BACKWARD, weight_grad=weight)
    return simulate(problem, schedule)


def trace_of(timelines: list[Timeline]) -> Trace:
    """Trace of a run with exactly these times."""
    schedule = timelines[0].schedule
    backbone = toy_backbone(3, nested(3, 1))
    routes = trace_routes(backbone, Partition(PLACEMENT, tuple(range(5))))
    messages = compile_communication(routes, schedule).messages
    return Trace(
        {"device": "none"},
        {"size": 2, "pipeline": 2},
        "abc",
        {"name": "toy", "options": {}},
        schedule.name,
        PLACEMENT.kind.name,
        PLACEMENT.device_of_stage,
        M,
        "one machine",
        1e-9,
        steps_of(schedule, timelines, messages),
    )


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    trace = trace_of([timeline(), timeline(1.1)])
    save_trace(trace, tmp_path / "trace.json")
    assert load_trace(tmp_path / "trace.json") == trace
    assert trace.steps[0].operations[0].start_s == 0


def test_all_faults_of_a_file_are_listed(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    save_trace(trace_of([timeline()]), file)
    record = unsealed_record(file)
    record["num_microbatches"] = "four"
    record["steps"][0]["operations"][0]["op"] = "F0"
    del record["steps"][0]["waits"][1]["source"]
    del record["run"]  # without it, what else the times depend on would not be compared
    file.write_text(json.dumps(record))
    with pytest.raises(TraceError) as error:
        load_trace(file)
    for where in ("num_microbatches", "steps.0.operations.0.op", "steps.0.waits.1"):
        assert where in str(error.value)
    assert "run is missing" in str(error.value)
    file.write_text("{")
    with pytest.raises(TraceError, match="cannot be read as a trace"):
        load_trace(file)


def test_what_cannot_have_been_is_a_fault() -> None:
    trace = trace_of([timeline(), timeline()])
    step = trace.steps[0]
    first, second, *rest = step.operations
    broken = replace(
        step,
        operations=(
            replace(first, end_s=second.end_s - 0.1),
            second,
            replace(second, device=1),
            *rest[1:],
        ),
    )
    faults = "\n".join(replace(trace, steps=(broken, trace.steps[1])).faults())
    assert not trace.faults()
    assert f"{second.operation} starts while device 0 runs another" in faults
    assert f"{second.operation} ran 2 times" in faults
    assert f"{second.operation} ran on device 1" in faults
    assert f"1 operations are missing: {rest[0].operation}" in faults
    assert "step 4 has other operations than step 3" in faults
    assert replace(trace, steps=()).faults() == ["no step was traced"]


def test_a_perfect_prediction() -> None:
    found = compare(timeline(), trace_of([timeline()] * 3))
    assert found.measured_makespan_s == pytest.approx(found.predicted_makespan_s)
    assert found.measured_bubble == pytest.approx(found.predicted_bubble)
    assert {row.kind for row in found.rows} == {OpType.FORWARD, OpType.BACKWARD}
    for row in found.rows:
        assert row.measured_s == pytest.approx(row.predicted_s) and row.count == M
    for device in found.devices:
        assert device.measured_busy_s == pytest.approx(device.predicted_busy_s)
        assert device.measured_wait_s > 0


def test_a_slow_stage_is_found() -> None:
    """One of three steps is an outlier, which medians ignore."""
    slow = timeline(1.5)
    found = compare(timeline(), trace_of([slow, timeline(30.0), slow]))
    worst = found.differing_most(1)[0]
    assert (worst.kind, worst.stage) == (OpType.FORWARD, 1)
    assert worst.measured_s == pytest.approx(1.5 * worst.predicted_s)
    assert worst.total_difference_s == pytest.approx(M * 0.5 * FORWARD[1])
    assert found.measured_makespan_s == pytest.approx(slow.makespan)
    assert found.measured_bubble == pytest.approx(sum(slow.bubble) / (2 * slow.makespan))


def test_a_trace_of_another_schedule_is_refused() -> None:
    other = simulate(
        ScheduleProblem(PLACEMENT, M, FORWARD, BACKWARD), make_schedule("gpipe", PLACEMENT, M)
    )
    with pytest.raises(TraceError, match="another order than the plan's"):
        compare(other, trace_of([timeline()]))
    trace = trace_of([timeline()])
    with pytest.raises(TraceError) as error:
        compare(timeline(), replace(trace, num_microbatches=8))
    assert "32 operations are missing: B0:4, F0:4" in str(error.value)
    assert "4 microbatches in the plan, 8 in the trace" in str(error.value)


@pytest.mark.parametrize("split", [False, True])
def test_measured_times_make_the_same_problem(split: bool) -> None:
    """Backwards or input gradients as they were, from the trace alone."""
    unknown = equal_stages(PLACEMENT, M)
    times = measured_problem(unknown, trace_of([timeline(split=split)]))
    assert times.forward == pytest.approx(FORWARD)
    assert times.backward == pytest.approx(BACKWARD)
    assert times.weight_grad == (pytest.approx((0.5, 0.75, 1.0, 1.25)) if split else None)
    again = simulate(times, timeline(split=split).schedule)
    assert again.makespan == pytest.approx(timeline(split=split).makespan)


def test_evaluations_have_no_backward_times() -> None:
    line = timeline()
    schedule = line.schedule.forward_only()
    forwards = replace(
        simulate(ScheduleProblem(PLACEMENT, M, FORWARD, BACKWARD), schedule), schedule=schedule
    )
    trace = trace_of([forwards])
    assert Operation(OpType.FORWARD, 0, 0) in {t.operation for t in trace.steps[0].operations}
    with pytest.raises(TraceError, match="no backward"):
        measured_problem(equal_stages(PLACEMENT, M), trace)


def test_rescale_counts_recomputed_forwards_in_the_backward() -> None:
    """One layer of each stage is recomputed; its forward counts at the measured speed."""
    plan = small_plan()
    held = [plan.partition.layers_of_stage(stage) for stage in range(len(plan.stages))]
    again = [stage[0] for stage in held]
    plan = replace(plan, activations=ActivationPolicies(frozenset(again)))
    layers = plan.profile.times_at(plan.micro_batch_size)
    forward = tuple(2 * sum(layers[i].forward_s for i in stage) for stage in held)
    backward = tuple(
        2 * layers[first].forward_s
        + 3 * sum(layers[i].input_grad_s + layers[i].weight_grad_s for i in stage)
        for first, stage in zip(again, held, strict=True)
    )
    measured = replace(plan.problem, forward=forward, backward=backward, weight_grad=None)
    for layer, new in zip(
        layers,
        rescale(plan.profile, plan, measured).times_at(plan.micro_batch_size),
        strict=True,
    ):
        assert new.forward_s == pytest.approx(2 * layer.forward_s)
        assert new.input_grad_s == pytest.approx(3 * layer.input_grad_s)
        assert new.weight_grad_s == pytest.approx(3 * layer.weight_grad_s)
    short = replace(measured, backward=(2 * layers[again[0]].forward_s, *backward[1:]))
    with pytest.raises(ProfileError, match="stage 0: .* no longer than the forward"):
        rescale(plan.profile, plan, short)
