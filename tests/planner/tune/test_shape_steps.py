"""Steps of each sample shape: their microbatch sizes, schedules and figures, in plans and files."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from megatron_pulse.cli.main import main
from megatron_pulse.planner.layout.layouts import FOLD_EXACT
from megatron_pulse.planner.plan_file.certificate import digest_of
from megatron_pulse.planner.plan_file.plan_file import save_plan, to_record
from megatron_pulse.planner.schedule.check.simulate import simulate
from megatron_pulse.planner.tune.config import Choices, Config
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.plans.to_plan import plan_of
from megatron_pulse.planner.tune.plans.verify_figures import load_checked, recomputed
from megatron_pulse.planner.tune.search.result import Tuning
from megatron_pulse.planner.tune.search.shape_steps import plan_shapes, sizes_of_shape
from megatron_pulse.profile.files import save_profile
from megatron_pulse.profile.profile import Source
from tests.bucket_plans import BATCH, bucket_evaluator, bucket_plan, bucket_profile, whole_step
from tests.plans import Edit, assert_refused, shown

SHARES = (2.0, 1.0, 1.0)
CONFIG = Config(2, 1, 1, 2, FOLD_EXACT)


@cache
def planned() -> tuple[Evaluator, Outcome]:
    """Evaluator, and its outcome of ``CONFIG`` with a step of every shape."""
    evaluator = bucket_evaluator(SHARES, 2)
    found = Tuning([whole_step(evaluator, CONFIG)])
    assert plan_shapes(evaluator, found, Choices(), 1.0) == []
    return evaluator, found.outcomes[0]


def test_shapes_have_the_microbatch_size_of_their_shortest_step() -> None:
    evaluator, outcome = planned()
    chosen = [shape.outcome.config.micro_batch_size for shape in outcome.shapes]
    for k, shape in enumerate(outcome.shapes):
        own = shape.evaluator
        sizes = sizes_of_shape(own.profile, BATCH, CONFIG, Choices())
        assert sizes == [1, 2, 4, 8]
        every = {
            size: whole_step(own, replace(CONFIG, micro_batch_size=size), outcome).step_s
            for size in sizes
        }
        assert shape.outcome.step_s == pytest.approx(min(every.values()), rel=0.02), (k, every)
        assert every[chosen[k]] <= 1.02 * min(every.values())
    assert chosen[0] > chosen[2]  # samples of half the pixels
    mean = sum(s.share * s.outcome.step_s for s in outcome.shapes)
    assert outcome.step_s == pytest.approx(mean)
    assert [shape.share for shape in outcome.shapes] == [0.5, 0.25, 0.25]
    most = [max(s.outcome.memory_bytes) for s in outcome.shapes]
    assert max(outcome.memory_bytes) >= max(most)


def test_sizes_of_a_measured_profile_are_measured_ones() -> None:
    """And those that were chosen; others are not extrapolated."""
    evaluator, _ = planned()
    profile = replace(evaluator.profile.at_shape(0), source=Source.MEASURED)
    assert sizes_of_shape(profile, BATCH, CONFIG, Choices()) == [1, 2, 8]
    assert sizes_of_shape(profile, BATCH, CONFIG, Choices(micro_batch_size=(2,))) == [2]
    assert sizes_of_shape(profile, 16, CONFIG, Choices(pairs=True)) == [2, 8]


def test_bucket_that_does_not_fit_is_named() -> None:
    evaluator, _ = planned()
    outcome = whole_step(evaluator, CONFIG)
    gb = 0.4 * max(outcome.memory_bytes) / 1e9
    short = evaluator.on(replace(evaluator.cluster, memory_gb=gb, usable_memory=1.0))
    found = Tuning([outcome])
    (fault,) = plan_shapes(short, found, Choices(micro_batch_size=(2,)), 0.0)
    assert "bucket 1x8x8: P=2 D=1 T=1 b=2" in fault and not found.outcomes


def test_plan_file_holds_certified_steps_of_every_bucket(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluator, outcome = planned()
    plan = plan_of(outcome, evaluator)
    text = shown(plan, tmp_path, capsys)
    for shape in plan.shapes:
        own, known = shape.plan, shape.plan.provenance["schedule"]
        assert simulate(own.problem, own.schedule).makespan == pytest.approx(known["makespan"])
        assert known["lower_bound"] <= known["makespan"] * (1 + 1e-9)
        assert f"{own.num_microbatches} x {own.micro_batch_size}" in text
        assert own.num_samples == plan.num_samples == BATCH
    again = recomputed(load_checked(tmp_path / "plan.json"))
    for name, value in plan.predicted.items():
        assert again.predicted[name] == pytest.approx(value), name
    assert digest_of(plan) != digest_of(replace(plan, shapes=()))
    path = str(tmp_path / "plan.json")
    assert main(["check", path]) == 0
    assert "buckets   1x4x8: " in capsys.readouterr().out
    assert main(["show", path, "--bucket", "1x8x8", "-o", str(tmp_path / "page.html")]) == 0
    assert f"microbatch(es) of {plan.shapes[2].plan.micro_batch_size}" in capsys.readouterr().out
    assert main(["show", path, "--bucket", "8x8"]) == 2
    assert "no bucket '8x8': they are 1x4x8, 1x8x4, 1x8x8" in capsys.readouterr().err


@pytest.mark.parametrize(
    "edit",
    [
        (lambda r: r["shapes"][1].update(share=0.5), "the sum of all shares is 1.25"),
        (lambda r: r["shapes"][1].update(name="1x4x8"), "shapes: 1x4x8 occurs 2 times"),
        (
            lambda r: r["shapes"][0]["schedule"]["order"][0].reverse(),
            "shapes, 1x4x8: schedule: ",
        ),
        (
            lambda r: r["shapes"][2]["certificate"].update(proved=True, lower_bound=1e-3),
            "shapes, 1x8x8: provenance.schedule.proved is true, but lower_bound 0.001 is below",
        ),
        (
            lambda r: r["shapes"][2]["predicted"].update(memory_bytes=[1.0, 1.0]),
            "shapes, 1x8x8: predicted.memory_bytes.0 is 1; recomputed",
        ),
        (lambda r: r["predicted"].update(bubble=0.9), "predicted.bubble is 0.9; recomputed"),
        (lambda r: r["shapes"][0].update(micro_batch_size=3), "not a multiple of data 1 x "),
    ],
)
def test_plan_file_refuses_edited_buckets(tmp_path: Path, edit: Edit) -> None:
    assert_refused(bucket_plan((1, 2, 4), shares=SHARES), edit, tmp_path)


def test_check_replays_buckets_and_compares_them_with_the_backbone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = bucket_plan((1, 2, 4), shares=SHARES)
    record = json.loads(json.dumps(to_record(plan)))
    record["shapes"][2]["certificate"]["makespan"] = 9.0
    (tmp_path / "plan.json").write_text(json.dumps(record))
    assert main(["check", str(tmp_path / "plan.json")]) == 2
    said = capsys.readouterr().err
    assert "shapes, 1x8x8: provenance.schedule.makespan is 9; recomputed from profile" in said
    save_plan(replace(plan, shapes=plan.shapes[::-1]), tmp_path / "plan.json")
    assert main(["check", str(tmp_path / "plan.json")]) == 2
    assert "shapes are 1x8x8, 1x8x4, 1x4x8; those of unet-tiny are" in capsys.readouterr().err


def test_tune_plans_buckets_unless_steps_mix_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_profile(bucket_profile(SHARES), tmp_path / "profile.json")
    path = tmp_path / "plan.json"
    argv = ["tune", "--profile", str(tmp_path / "profile.json"), "--cluster", "cpu"]
    argv += ["--global-batch-size", "8", "--pipeline", "2", "--tensor", "1", "--seconds", "1"]
    assert main([*argv, "-o", str(path), "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["outcomes"][0]
    plan = load_checked(path)
    found = [(b["name"], b["num_microbatches"] * b["micro_batch_size"]) for b in best["buckets"]]
    assert found == [(shape.name, BATCH) for shape in plan.shapes]
    mean = sum(b["share"] * b["step_s"] for b in best["buckets"])
    assert best["step_s"] == plan.predicted["step_s"] == pytest.approx(mean)
    assert main([*argv, "-o", str(path), "--mix-buckets"]) == 0
    assert not load_checked(path).shapes
