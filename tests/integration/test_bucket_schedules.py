"""Training by a plan with a microbatch size and a schedule for each bucket."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_pulse.cli.main import main
from megatron_pulse.integration.planning.run_plan import plan_of_file
from megatron_pulse.planner.plan_file.plan_file import PlanFile, save_plan
from megatron_pulse.planner.tune.plans.verify_figures import recomputed
from tests.bucket_plans import BATCH, bucket_chain, bucket_plan
from tests.integration.runs import BASE, assert_equal_to_rounding, assert_same, run
from tests.integration.test_bad_input import refuse
from tests.integration.test_buckets import store

SIZES = (1, 2, 4)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Stores of three shapes, of which an epoch has a step and a half of each."""
    folder = tmp_path_factory.mktemp("stores")
    shapes = {"a": (1, 4, 8), "b": (1, 8, 4), "c": (1, 8, 8)}
    return ",".join(store(folder / name, *shape) for name, shape in shapes.items())


def flags(plan: PlanFile, path: Path, data: str, *more: str) -> list[str]:
    save_plan(plan, path)
    return ["--pulse-plan", str(path), "--pulse-data", data, "--train-iters", "4", *more]


def test_fold_by_buckets_equals_one_process(tmp_path: Path, data: str) -> None:
    """Each bucket has another microbatch size, and steps are of all three."""
    one = run(1, *flags(bucket_plan(SIZES, 1), tmp_path / "one.json", data), backbone="none")
    two = run(2, *flags(bucket_plan(SIZES, 2), tmp_path / "two.json", data), backbone="none")
    assert two.executed.placement == "fold"
    assert two.executed.microbatches == {BATCH // size for size in SIZES}
    assert_same(two, one)
    both = bucket_plan((4, 1, 2), 1, data=2)
    other = run(2, *flags(both, tmp_path / "both.json", data), backbone="none")
    assert_equal_to_rounding(other, one)


def test_mixed_steps_and_other_shapes_are_refused(
    tmp_path: Path, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = bucket_plan(SIZES, 1)
    argv = [*BASE[2:], *flags(plan, tmp_path / "plan.json", data)]
    (said,) = refuse(monkeypatch, 1, ["--pulse-bucket-batch", "4"], argv)
    assert "--pulse-bucket-batch 4 mixes buckets within a step, but --pulse-plan has" in said
    fewer = [replace(shape, share=0.5) for shape in plan.shapes[:2]]
    argv = flags(recomputed(replace(plan, shapes=tuple(fewer))), tmp_path / "plan.json", data)
    (said,) = refuse(monkeypatch, 1, [], [*BASE[2:], *argv])
    assert "there are schedules for 1x4x8, 1x8x4, but unet-tiny has 3 shape(s)" in said


def test_step_is_told_by_bucket() -> None:
    """Numbers and sizes of microbatches in a run's log, and the idle share of their mean."""
    given = bucket_plan(SIZES, 2)
    plan = plan_of_file(given, bucket_chain())
    assert "  bucket 1x8x4: 4 microbatch(es) of 2" in plan.describe()
    assert plan.idle_share(4) == pytest.approx(given.predicted["bubble"], abs=0.05)
    assert plan.digest() != plan_of_file(replace(given, shapes=()), bucket_chain()).digest()
    orders = [plan.at_shape(k).step(BATCH // size).schedule for k, size in enumerate(SIZES)]
    assert orders == [shape.plan.schedule for shape in given.shapes]


def test_verify_compares_a_step_of_every_bucket(
    tmp_path: Path, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    save_plan(bucket_plan(SIZES, 2), path)
    assert main(["verify", str(path), "--steps", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["result"], found["steps"]) == ("equal to the bit", 3)
    assert main(["show", str(path)]) == 0
    assert "verified" in capsys.readouterr().out
    assert main(["verify", str(path), "--data", data, "-o", str(tmp_path / "of_data.json")]) == 0
