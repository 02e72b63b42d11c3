"""``--pulse-trace``: a whole run writes what its steps did, and computes what it would have."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_pulse.planner.layout.placement import fold
from megatron_pulse.planner.schedule.problem import equal_stages
from megatron_pulse.planner.trace.compare import measured_problem
from megatron_pulse.planner.trace.trace import load_trace
from tests.integration.runs import STEPS, alone, assert_same, pipeline, run


@pytest.mark.parametrize(
    ("wanted", "traced", "replicas"),
    [("1-1", [1], 2), ("2-9", [2], 1)],
    ids=["inside", "past the end"],
)
def test_a_run_with_a_trace(tmp_path: Path, wanted: str, traced: list[int], replicas: int) -> None:
    """The first of two pipelines is traced."""
    flags = [*STEPS, *pipeline(2, "--pulse-schedule", "zb-v")]
    trace_flags = ["--pulse-trace", str(tmp_path / "deep"), "--pulse-trace-steps", wanted]
    got = run(2 * replicas, *flags, *trace_flags)
    if replicas == 1:
        assert_same(got, alone(*STEPS))
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["trace.json"]
    trace = load_trace(tmp_path / "deep" / "trace.json")
    assert [step.step for step in trace.steps] == traced
    assert trace.world == {
        "size": 2 * replicas,
        "pipeline": 2,
        "data": replicas,
        "tensor": 1,
    }
    assert trace.backbone["name"] == "uvit-tiny" and len(trace.plan_digest) == 64
    assert trace.num_microbatches == 4 // replicas and trace.device_of_stage == (0, 1, 1, 0)
    times = measured_problem(equal_stages(fold(2), trace.num_microbatches), trace)
    assert times.weight_grad is not None and min(times.forward + times.weight_grad) > 0


def test_nothing_is_traced_of_a_run_that_ends_before(tmp_path: Path) -> None:
    run(1, *STEPS, "--pulse-trace", str(tmp_path / "trace"), "--pulse-trace-steps", "9")
    assert not (tmp_path / "trace").exists()
