"""Runs on devices of several kinds: CPU ranks whose processes may take different memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_pulse.planner.cluster.cluster import Cluster, to_record
from megatron_pulse.planner.cluster.device_kinds import DeviceFigures, DeviceKind
from megatron_pulse.planner.layout.layouts import ROW
from megatron_pulse.planner.partition.memory import ParameterState
from megatron_pulse.planner.plan_file.plan_file import save_plan
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.plans.to_plan import plan_of
from megatron_pulse.planner.tune.plans.verify_figures import load_checked
from megatron_pulse.profile.analytic import analyse
from megatron_pulse.profile.roofline import Roofline
from megatron_pulse.profile.unlike_devices import combine
from model_specs import load_backbone
from tests.integration.runs import BASE, STEPS, TINY, alone, assert_same, run, train
from tests.integration.test_plans import BATCH, LINK, UVIT
from tests.ranks import RanksFailed, run_ranks, said_once

FAST = DeviceKind("fast", 8.0, 1.0, DeviceFigures(0.2, 40.0))
SLOW = DeviceKind("slow", 6.0, 1.0, DeviceFigures(0.1, 20.0))


def mixed_plan(
    path: Path,
    order: tuple[int, ...],
    options: Mapping[str, Any] = UVIT,
    kinds: tuple[DeviceKind, ...] = (FAST, SLOW),
) -> Path:
    """A plan of two stages in a row, by a profile of each kind."""
    devices = [kinds[i] for i in range(2)]
    cluster = Cluster("home", 1, 2, 6.0, SLOW.device, LINK).of_kinds(devices)
    backbone = load_backbone("uvit-tiny", dict(options))
    profiles = {}
    for kind in kinds:
        assert kind.peaks is not None
        profiles[kind.name] = analyse(backbone, [2], Roofline(kind.peaks, "float32"))
    evaluator = Evaluator(combine(profiles), cluster, BATCH, state=ParameterState(ema=True))
    config = Config(2, 1, 1, 2, ROW, device_order=order)
    problem = evaluator.problem(config, config.num_microbatches(BATCH))
    save_plan(plan_of(evaluator.evaluate(config, synthesize(problem, effort=4)), evaluator), path)
    return path


def limited(gb_of_rank: Mapping[int, float], flags: list[str]) -> dict[str, Any]:
    """``train`` within limits of the process, as of ``ulimit -d``."""
    if (gb := gb_of_rank.get(int(os.environ["RANK"]))) is not None:
        limit = int(gb * 1e9)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return train(flags)


@pytest.mark.parametrize("order", [(), (1, 0)], ids=["as-listed", "reversed"])
def test_run_obeys_a_plan_of_two_profiles(tmp_path: Path, order: tuple[int, ...]) -> None:
    plan = mixed_plan(tmp_path / "plan.json", order)
    given = load_checked(plan)
    assert set(given.profile.kinds) == {"fast", "slow"}
    fewer = min(range(2), key=lambda stage: len(given.stages[stage]))
    assert given.cluster.kind_of(fewer) == SLOW
    obeyed = run(2, "--pulse-plan", str(plan), *STEPS[2:], backbone="none")
    assert_same(obeyed, alone(*STEPS))


def test_bits_of_unlike_devices_are_not_compared(tmp_path: Path) -> None:
    plan = mixed_plan(tmp_path / "plan.json", ())
    flags = ["--pulse-plan", str(plan), *STEPS[2:], "--pulse-sdc-check-interval", "1"]
    with pytest.raises(RanksFailed) as failed:
        run(2, *flags, backbone="none")
    assert said_once(failed.value, "--pulse-sdc-check-interval: --pulse-plan is for devices of ")


def test_auto_finds_profiles_and_plans_for_kinds_of_one_node(tmp_path: Path) -> None:
    flags = [*BASE, *TINY["uvit"], *STEPS, "--pulse-auto", "--save", str(tmp_path)]
    flags += ["--pipeline-model-parallel-size", "2", "--pulse-memory-gb", "4"]
    results = run_ranks(2, limited, {1: 3.0}, flags)
    plan = load_checked(tmp_path / "plan.json")
    memory = [plan.cluster.in_file_order.kind_of(rank).memory_gb for rank in range(2)]
    assert memory == [4.0, 3.0]  # the flag limits the larger kind
    assert {*plan.profile.kinds} == {kind.name for kind in plan.cluster.kinds}
    assert to_record(plan.cluster)["nodes"][0].keys() == {"devices"}
    last = next(result for result in results if result["rank"] == 1)
    assert last["losses"] == pytest.approx(alone(*STEPS).losses, rel=1e-6)


def test_device_without_memory_for_its_part_is_refused(tmp_path: Path) -> None:
    """Rank 1 runs on the first device, which the plan takes for a larger one."""
    large = {"in_channels": 1, "depth": 4, "embed_dim": 2048}
    plan = mixed_plan(tmp_path / "plan.json", (1, 0), large)
    flags = [*BASE, "--pulse-plan", str(plan), *STEPS[2:]]
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, limited, {0: 2.0}, flags)
    assert failed.value.exit_codes == [2, 2]
    said = "".join(failed.value.outputs)
    assert said_once(failed.value, "GB there, for the kind fast (8 GB, 100% usable)")
    assert "rank 1 (CPU (" in said and ", 2 GB, launcher's rank 0 on " in said
    assert "make the plan anew for the cluster as it is ('pulse probe', 'pulse tune'; " in said
