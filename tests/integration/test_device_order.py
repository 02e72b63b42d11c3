"""Runs whose plan places its ranks on the job's devices in an order of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_pulse.planner.layout.layouts import FOLD_EXACT, ROW
from megatron_pulse.planner.plan_file.plan_file import save_plan
from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.plans.verify_figures import load_checked
from tests.integration.runs import (
    BASE,
    STEPS,
    Kill,
    alone,
    assert_equal_to_rounding,
    assert_same,
    run,
    train,
)
from tests.integration.test_plans import make_plan
from tests.ranks import RanksFailed, run_ranks, said_once
from tests.reference import unsealed_record


def ordered_plan(path: Path, config: Config, order: tuple[int, ...] | None) -> Path:
    plan = load_checked(make_plan(path, config))
    save_plan(replace(plan, device_order=order), path)
    return path


@pytest.mark.parametrize(
    ("config", "order"),
    [
        (Config(2, 1, 1, 2, FOLD_EXACT, split=True), (1, 0)),
        (Config(4, 1, 1, 2, ROW), (3, 2, 1, 0)),
        (Config(2, 2, 1, 2, ROW), (2, 0, 3, 1)),
    ],
    ids=["two", "four-reversed", "replicas"],
)
def test_order_of_devices_changes_no_bit(
    tmp_path: Path, config: Config, order: tuple[int, ...]
) -> None:
    plan = ordered_plan(tmp_path / "plan.json", config, order)
    ranks = config.pipeline * config.data
    flags = ["--pulse-plan", str(plan), *STEPS[2:]]
    ordered = run(ranks, *flags, backbone="none")
    ordered_plan(plan, config, None)
    plain = run(ranks, *flags, backbone="none")
    assert_same(ordered, plain)
    if config.data == 1:
        assert_same(ordered, alone(*STEPS))
    else:
        assert_equal_to_rounding(ordered, alone(*STEPS))


def test_rank_runs_on_the_device_that_the_plan_names(tmp_path: Path) -> None:
    plan = ordered_plan(tmp_path / "plan.json", Config(4, 1, 1, 2, ROW), (2, 0, 3, 1))
    stages = json.loads(plan.read_text())["stages"]
    flags = [*BASE, "--pulse-plan", str(plan), *STEPS[2:]]
    of_device = run_ranks(4, train, flags)
    assert [result["rank"] for result in of_device] == [1, 3, 0, 2]
    for result in of_device:
        own, held = stages[result["rank"]], [name for name, *_ in result["weights"]]
        assert held and all(any(f"{name}." in parameter for name in own) for parameter in held)


def test_failures_name_the_rank_of_the_plan(tmp_path: Path) -> None:
    """Rank 1 runs on device 0, whose process hosts the store."""
    plan = ordered_plan(tmp_path / "plan.json", Config(2, 1, 1, 2, ROW), (1, 0))
    flags = ["--pulse-plan", str(plan), *STEPS[2:]]
    with pytest.raises(RanksFailed) as failed:
        run(2, *flags, backbone="none", kill=Kill(1, 2))
    killed, other = failed.value.outputs
    assert failed.value.exit_codes == [-9, 1]
    assert "from pipeline device 1 (rank 1): rank 1 closed the connection" in other
    assert "first failure in this job: rank 0: rank 1 (process " in other
    assert "(rank host:launcher's rank): 0 " in other and ":1, 1 " in other


def test_checkpoint_resumes_in_another_order(tmp_path: Path) -> None:
    save = ["--save", str(tmp_path / "run"), "--save-interval", "1"]
    plan = ordered_plan(tmp_path / "plan.json", Config(2, 1, 1, 2, FOLD_EXACT, split=True), (1, 0))
    flags = ["--pulse-plan", str(plan), *STEPS[2:], *save]
    with pytest.raises(RanksFailed):
        run(2, *flags, backbone="none", kill=Kill(0, 2))
    ordered_plan(plan, Config(2, 1, 1, 2, FOLD_EXACT, split=True), None)
    resumed = run(2, *flags, backbone="none")
    whole = alone(*STEPS)
    assert resumed.losses == whole.losses[1:]
    assert all((resumed.weights[name] == whole.weights[name]).all() for name in whole.weights)


def test_auto_reuses_a_plan_with_an_order(tmp_path: Path) -> None:
    """The process group exists before the plan is read, and is formed again."""
    ordered_plan(tmp_path / "plan.json", Config(2, 1, 1, 2, FOLD_EXACT, split=True), (1, 0))
    flags = ["--pulse-auto", "--save", str(tmp_path), *STEPS]
    assert_same(run(2, *flags), alone(*STEPS))


def test_wrong_order_is_refused(tmp_path: Path) -> None:
    plan = ordered_plan(tmp_path / "plan.json", Config(2, 1, 1, 2, ROW), (1, 0))
    record = unsealed_record(plan)
    for wrong in ([1, 1], [0, 1, 2], [1]):
        plan.write_text(json.dumps(record | {"device_order": wrong}))
        with pytest.raises(RanksFailed) as failed:
            run(2, "--pulse-plan", str(plan), *STEPS[2:], backbone="none")
        assert failed.value.exit_codes == [2, 2]
        assert said_once(failed.value, "device_order: lists each of the devices 0 to 1 once")
