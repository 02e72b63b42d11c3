"""Optimizer offload: time and bytes by hand, plans, and the required host link."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_pulse.planner.cluster.cluster import ClusterError
from megatron_pulse.planner.layout.layouts import LAYOUTS
from megatron_pulse.planner.partition.memory import ParameterState
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.planner.tune.config import Choices, Config
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.plans.to_plan import plan_of
from megatron_pulse.planner.tune.report.oom_advice import oom_advice
from tests.planner.tune.problems import cluster, profile
from tests.plans import Edit, assert_refused, shown

HOST = ParameterState(ema=True, optimizer_cpu_offload=True)
NODE_GBS = 80.0
CONFIG = Config(2, 2, 1, 1, LAYOUTS["fold exact"], distributed_optimizer=True)


def evaluator(state: ParameterState = HOST, memory_gb: float = 16.0, **changes: Any) -> Evaluator:
    machine = replace(cluster(1, 4, memory_gb, host_gbs=12.0), **changes)
    return Evaluator(profile(random.Random(2), 12, 5), machine, 8, state=state)


@pytest.mark.parametrize("ema", [False, True])
def test_its_time_and_bytes_by_hand(ema: bool) -> None:
    """bfloat16: 6 bytes stay, 4 go and 2 come over the link, 34 or 46 are moved in the memory."""
    state = ParameterState(ema=ema)
    outcomes = [
        evaluator(s, host_memory_gbs=NODE_GBS).evaluate(CONFIG)
        for s in (state, replace(state, optimizer_cpu_offload=True))
    ]
    here, there = outcomes
    held = here.stages.per_device(here.stages.trained)
    moved = 28 + 6 + 12 * ema
    each_s = 6 / 12e9 + moved / (NODE_GBS * 1e9 / 4)
    assert there.optimizer_s == pytest.approx(max(held) / 2 * each_s, rel=1e-6)
    assert there.optimizer_s > 2 * here.optimizer_s
    assert there.step_s - here.step_s == pytest.approx(there.optimizer_s - here.optimizer_s)
    for count, on_device, on_host in zip(held, here.memory_bytes, there.memory_bytes, strict=True):
        assert on_device - on_host == pytest.approx((12 + 4 * ema) / 2 * count, rel=1e-6)


@pytest.fixture(scope="module")
def plan() -> PlanFile:
    of = evaluator(host_memory_gbs=NODE_GBS)
    return plan_of(of.evaluate(CONFIG), of)


def test_a_plan_says_it(plan: PlanFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = shown(plan, tmp_path, capsys)
    assert "optimizer offload" in said and " --optimizer-cpu-offload" in said
    outer, inner = (len(plan.stages[s]) + len(plan.stages[3 - s]) for s in (0, 1))
    most = 22 / 2 * max(outer, inner) * 20_000_000  # of each device of the fold
    assert f"at most {most / 1e9:.3g} GB of host memory per device" in said


def test_tensor_parallelism_divides_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks share three quarters of each layer: each has 5/8 of its optimizer."""
    whole = evaluator(host_memory_gbs=NODE_GBS)
    layers = [replace(x, sharded_parameters=15_000_000) for x in whole.profile.layers]
    of = Evaluator(replace(whole.profile, layers=tuple(layers)), whole.cluster, 8, [16], state=HOST)
    outcome = of.evaluate(replace(CONFIG, data=1, tensor=2))
    most = max(outcome.stages.per_device(outcome.stages.trained))
    assert most % (20_000_000 * 5 // 8) == 0
    said = shown(plan_of(outcome, of), tmp_path, capsys)
    assert f"at most {22 * most / 1e9:.3g} GB of host memory per device" in said


EDITS: dict[str, Edit] = {
    "on the device": (lambda r: r.pop("optimizer_cpu_offload"), "predicted.memory_bytes.0 is"),
    "not divided": (
        lambda r: r.update(distributed_optimizer=False),
        "optimizer_cpu_offload: requires distributed_optimizer, which is false",
    ),
    "faster": (
        lambda r: r["provenance"]["cluster"].update(host_memory_gbs=2 * NODE_GBS),
        "predicted.optimizer_s is",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_plan_is_refused(edit: str, plan: PlanFile, tmp_path: Path) -> None:
    assert_refused(plan, EDITS[edit], tmp_path)


def test_it_is_always_the_distributed_one() -> None:
    of = evaluator()
    found = of.candidates(Choices(distributed_optimizer=(False,)))
    assert found and all(config.distributed_optimizer for config in found)


def test_devices_must_reach_their_nodes_memory() -> None:
    with pytest.raises(ClusterError, match="Write links.host into its file"):
        evaluator(host=None)
    assert evaluator(ParameterState(), host=None).estimator.adam_s > 0


def test_fsdp2_keeps_its_optimizer_on_the_device() -> None:
    rivals = [
        evaluator(s, host_memory_gbs=NODE_GBS).fsdp_baseline()
        for s in (HOST, replace(HOST, optimizer_cpu_offload=False))
    ]
    assert rivals[0] is not None and rivals[0] == rivals[1]


def test_it_is_advised_where_nothing_fits_and_it_would() -> None:
    """One device: nothing can be sharded."""
    choices = Choices(pipeline=(1,), tensor=(1,))
    of = evaluator(ParameterState(), memory_gb=0.7)
    small = of.on(replace(of.cluster, devices_per_node=1, memory_gb=3.2))
    text = oom_advice(small, choices, small.candidates(choices))
    assert "with optimizer offload (--optimizer-cpu-offload): " in text
    without = small.on(replace(small.cluster, host=None))
    assert "cpu-offload" not in oom_advice(without, choices, without.candidates(choices))
