"""Every kind of bad input: one clear error before anything starts, and no file touched."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_pulse.integration.flags.parse import parse
from megatron_pulse.integration.flags.plan_overrides import contradictions
from megatron_pulse.integration.flags.pulse_options import PulseOptions
from megatron_pulse.integration.flags.startup_checks import FlagError
from megatron_pulse.planner.plan_file.plan_file import save_plan
from tests.integration.runs import BASE, TINY, pipeline, run
from tests.plans import OPTIONS, small_plan
from tests.ranks import RanksFailed, run_ranks, said_once

GOOD = [*TINY["uvit"], *BASE, "--global-batch-size", "8", "--train-iters", "5"]

TENSOR_PARALLEL = ["--tensor-model-parallel-size", "2"]
# (ranks, flags that are added to a good run, what the error must say)
BAD: dict[str, tuple[int, list[str], str]] = {
    "too many devices": (8, pipeline(8, "--pulse-option", "depth=4"), "largest legal P"),
    "ranks do not divide": (
        3,
        pipeline(2),
        "cannot be divided into --pipeline-model-parallel-size 2",
    ),
    "batch does not divide": (2, ["--global-batch-size", "7"], "not a positive multiple"),
    "eval batch does not divide": (2, ["--eval-global-batch-size", "7"], "eval-global-batch-size"),
    "unknown backbone": (1, ["--pulse-backbone", "uvit-xs"], "uvit-s"),
    "two models": (1, ["--pulse-module", "diffusers:UNet2DModel"], "leave one out"),
    "unknown option": (1, ["--pulse-option", "dept=8"], "dept"),
    "bad option value": (1, ["--pulse-option", "depth=many"], "depth"),
    "inconsistent option": (1, ["--pulse-option", "depth=7"], "even"),
    "weights beyond memory": (
        1,
        ["--pulse-option", "embed_dim=4000000"],
        "Use more devices, or a smaller",
    ),
    "too many layers": (1, ["--pulse-option", "depth=2000"], "depth: 2000 exceeds 1,000"),
    "malformed option": (1, ["--pulse-option", "depth"], "KEY=VALUE"),
    "unknown data": (1, ["--pulse-data", "cifar"], "digits8"),
    "missing folder": (1, ["--pulse-data", "folder:/does/not/exist"], "/does/not/exist"),
    "missing latents": (1, ["--pulse-data", "latents:/does/not/exist"], "/does/not/exist"),
    "data of another shape": (1, ["--pulse-option", "in_channels=3"], "3x8x8"),
    "too few classes": (1, ["--pulse-option", "num_classes=5"], "num_classes=10"),
    "1F1B on a fold": (2, pipeline(2, "--pulse-schedule", "1f1b"), "1f1b"),
    "odd fold": (
        2,
        pipeline(2, "--pulse-num-chunks", "3"),
        "a device of fold hosts 2, 4, ...",
    ),
    "stages of a row": (
        2,
        pipeline(2, "--pulse-placement", "sequential", "--pulse-num-chunks", "2"),
        "a device of sequential hosts 1 stage(s)",
    ),
    "cap too small": (2, pipeline(2, "--pulse-activation-cap", "1"), "cap"),
    "schedule file": (2, pipeline(2, "--pulse-schedule", "none.csv"), "none.csv"),
    "dropout": (1, ["--attention-dropout", "0.1"], "--attention-dropout"),
    "heads do not divide": (
        3,
        ["--tensor-model-parallel-size", "3"],
        "attention heads of uvit-tiny",
    ),
    "sequence parallel": (
        2,
        [*TENSOR_PARALLEL, "--sequence-parallel", "--pulse-option", "num_classes=0"],
        "17 tokens",
    ),
    "context parallel": (
        20,
        ["--context-parallel-size", "20"],
        "--context-parallel-size 20: 18 tokens of embed are fewer than 20 ranks",
    ),
    "own layout": (2, pipeline(2, "--pipeline-model-parallel-layout", "t|t"), "the partition"),
    "checkpoint format": (1, ["--ckpt-format", "torch"], "torch_dist"),
    "no learning rate": (1, ["--lr", "0"], "--lr"),
    "no steps": (1, ["--train-iters", "0"], "--train-iters"),
    "class dropout": (1, ["--pulse-class-dropout", "1.5"], "--pulse-class-dropout"),
    "ema decay": (1, ["--pulse-ema-decay", "2"], "--pulse-ema-decay"),
    "recompute modules": (
        1,
        ["--recompute-granularity", "selective", "--recompute-modules", "mlp"],
        "recomputation is by layer",
    ),
    "recompute none": (1, ["--pulse-recompute", "blok.*"], "no layer matches 'blok.*'"),
    "recompute twice": (
        1,
        ["--recompute-granularity", "full", "--pulse-recompute", "*"],
        "only some: give one of them",
    ),
    "time limit": (1, ["--pulse-timeout-s", "-1"], "--pulse-timeout-s"),
    "corrupt digits": (1, ["--pulse-skip-corrupt"], "is for image files"),
    "captions of digits": (1, ["--pulse-default-caption", "x"], "is for image files"),
    "save interval alone": (1, ["--save-interval", "5"], "without --save"),
}


def refuse(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, flags: list[str], good: list[str] = GOOD
) -> list[str]:
    """The faults that a run with these flags is refused for, before any process group exists."""
    from megatron_pulse.integration.setup import prepare, read_command_line

    monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "argv", ["pretrain_diffusion.py", *good, *flags])
    with pytest.raises(FlagError) as error:
        prepare(*read_command_line())
    return error.value.faults


@pytest.mark.parametrize("kind", BAD)
def test_refused_with_the_reason(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_ranks, flags, reason = BAD[kind]
    faults = refuse(monkeypatch, num_ranks, flags)
    assert len(faults) == 1, faults
    assert reason in faults[0]


def test_stages_that_the_default_placement_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    good = [*BASE, "--pulse-backbone", "dit-tiny"]
    faults = refuse(monkeypatch, 2, pipeline(2, "--pulse-num-chunks", "2"), good)
    assert any(
        "the default placement here (no skips: a fold has no benefit)" in fault for fault in faults
    )


def test_auto_measures_nothing_for_data_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_pulse.integration.setup import read_command_line

    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    flags = ["--pulse-auto", "--pulse-option", "in_channels=3"]
    monkeypatch.setattr(sys, "argv", ["pretrain_diffusion.py", *GOOD, *flags])
    with pytest.raises(FlagError) as error:
        read_command_line()
    assert any("its images are 1x8x8" in fault for fault in error.value.faults)


def test_no_data_is_chosen_for_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    place = GOOD.index("--pulse-data")
    (fault,) = refuse(monkeypatch, 1, [], [*GOOD[:place], *GOOD[place + 2 :]])
    assert "--pulse-data names none" in fault and "latents:PATH" in fault and "mnist" in fault


def test_all_faults_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = refuse(
        monkeypatch, 2, ["--global-batch-size", "7", "--lr", "0", "--pulse-option", "depth=7"]
    )
    assert len(faults) == 3, faults


MNISTT = ["--pulse-data", "mnistt"]
SEVERAL: dict[str, tuple[list[str], list[str]]] = {
    "option and data": (
        ["--pulse-option", "depth=x", *MNISTT],
        ["depth: expected int, got 'x'", "no dataset 'mnistt'"],
    ),
    "malformed option and data": (
        ["--pulse-option", "depth", "--pulse-option", "=", *MNISTT],
        ["--pulse-option depth: write it as KEY=VALUE", "no such option", "'mnistt'"],
    ),
    "unknown flag, bad values": (
        ["--trian-iters", "5", "--lr", "fast", "--seed", "--pulse-placement", "folded", *MNISTT],
        [
            "no flag --trian-iters: did you mean --train-iters",
            "--lr: invalid float value: 'fast'",
            "--seed: expected one argument",
            "--pulse-placement: invalid choice: 'folded'",
            "'mnistt'",
        ],
    ),
    "words that belong nowhere": (
        ["--bf16=yes", "more", "-lr", *MNISTT],
        ["--bf16 takes no value", "'more' belongs to no flag", "'-lr' belongs", "'mnistt'"],
    ),
    "schedule file": (
        ["--pulse-schedule", "none.csv", "--pulse-profile", "p.json", "--lr", "0", *MNISTT],
        ["none.csv: there is no such file", "--pulse-profile p.json", "--lr", "'mnistt'"],
    ),
    "plan": (
        ["--pulse-plan", "none.json", "--pulse-option", "depth=7", "--lr", "-1", *MNISTT],
        ["none.json cannot be read", "even", "--lr", "'mnistt'"],
    ),
    "layout and training": (
        ["--pulse-activation-cap", "0", "--pulse-ema-decay", "2", "--load", "nowhere"],
        ["--pulse-activation-cap is 0", "--pulse-ema-decay", "nowhere"],
    ),
    "planning and training": (
        ["--pulse-memory-gb", "0.0001", "--lr", "0"],
        ["no plan can be made", "--lr"],
    ),
    "auto": (
        ["--pulse-auto", "--pulse-option", "depth=x", "--lr", "0", "--dtype", "x", *MNISTT],
        ["depth", "--lr", "no flag --dtype", "'mnistt'"],
    ),
    "auto and placement": (
        [
            "--pulse-auto",
            "--pulse-placement",
            "fold",
            "--pulse-num-chunks",
            "4",
            *MNISTT,
            "--pulse-schedule",
            "auto",
            "--pulse-link-gbs",
            "12.5",
            "--pulse-memory-gb",
            "3",
        ],
        [
            *(
                f"--pulse-{flag} and --pulse-auto exclude each other"
                for flag in ("placement fold", "num-chunks 4", "schedule auto", "link-gbs 12.5")
            ),
            "'mnistt'",
        ],
    ),
    "process": (
        ["--pulse-objective", "epsilon", "--pulse-beta-start", "2", "--lr", "x", *MNISTT],
        ["diffusion process: ", "--lr: invalid float", "'mnistt'"],
    ),
}


@pytest.mark.parametrize("kind", SEVERAL)
def test_independent_faults_come_together(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags, expected = SEVERAL[kind]
    faults = refuse(monkeypatch, 1, flags)
    assert len(faults) == len(expected), faults
    for text in expected:
        assert sum(text in fault for fault in faults) == 1, (text, faults)


def test_a_plan_is_not_contradicted_by_defaults_that_are_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_plan(small_plan("sequential", pipeline=4), tmp_path / "plan.json")
    plan = ["--pulse-plan", str(tmp_path / "plan.json"), "--pulse-data", "digits8"]
    agreed = ["--micro-batch-size", "2", "--train-iters", "5", "--lr", "1e-3"]
    otherwise = ["--pulse-placement", "fold", "--pipeline-model-parallel-size", "1"]
    decided = ["--pulse-link-us", "5", "--pulse-memory-gb", "3"]
    faults = refuse(monkeypatch, 8, [*agreed, *otherwise, *decided], plan)
    assert faults == [
        "--pipeline-model-parallel-size 1, but --pulse-plan says 4. Leave the flag out",
        "--pulse-placement fold, but --pulse-plan says sequential. Leave the flag out",
        *(f"--pulse-{flag} and --pulse-plan exclude each other (the plan decides it): leave one out"
          for flag in ("link-us 5.0", "memory-gb 3.0")),
    ]  # fmt: skip
    line = parse(["--pulse-backbone", "uvit-tiny", "--pulse-auto", "--pulse-memory-gb", "3"])
    options = PulseOptions(backbone="uvit-tiny", options=OPTIONS)
    line.args.world_size = 8
    made = small_plan("sequential", pipeline=4)
    assert list(contradictions(made, line, options, "--pulse-auto")) == []
    (fault,) = contradictions(replace(made, ema=False), line, options, "--pulse-auto")
    assert "no memory for an EMA of the weights. Give --pulse-ema-decay 0" in fault
    options = replace(options, ema_decay=0.0)
    assert list(contradictions(replace(made, ema=False), line, options, "--pulse-auto")) == []


def test_a_plan_that_names_code_runs_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Unless the command line names it; then it runs, and is no backbone."""
    name, ran = f"{tmp_path}/mine.py:build", tmp_path / "ran"
    (tmp_path / "mine.py").write_text(f"open({str(ran)!r}, 'w')\ndef build(): return 0\n")
    record = {"name": name, "family": "own", "options": {}}
    made = small_plan("sequential", pipeline=4)
    made = replace(made, backbone=record, profile=replace(made.profile, backbone=record))
    save_plan(made, tmp_path / "p.json")
    plan = ["--pulse-plan", str(tmp_path / "p.json"), "--pulse-data", "digits8", "--lr", "1"]
    plan += ["--train-iters", "5"]
    faults = refuse(monkeypatch, 8, [], plan)
    assert any(f"{name} is code" in fault for fault in faults) and not ran.exists()
    faults = refuse(monkeypatch, 8, ["--pulse-module", name], plan)
    assert any("returned int" in fault for fault in faults) and ran.exists()


def test_weights_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before a layer is built, with what else is wrong."""
    config = {"block_out_channels": [4], "down_block_types": ["DownBlock2D"], "in_channels": 1,
              "up_block_types": ["UpBlock2D"], "norm_num_groups": 2, "layers_per_block": 1,
              "out_channels": 1, "sample_size": 8, "add_attention": False}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "UNet2DModel", **config}))
    (tmp_path / "diffusion_pytorch_model.bin").write_bytes(b"")
    module = ["--pulse-module", f"diffusers:{tmp_path}", "--pulse-data", "digits8", "--lr", "1"]
    module += ["--micro-batch-size", "2", "--train-iters", "5", "--pulse-objective", "epsilon"]
    faults = refuse(monkeypatch, 1, [*module, "--no-such"], [])
    assert any("diffusion_pytorch_model.bin: it is empty" in fault for fault in faults), faults
    assert any("--no-such" in fault for fault in faults), faults


def test_unwritable_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    faults = refuse(monkeypatch, 1, ["--save", str(file / "x"), "--tensorboard-dir", str(file)])
    assert len(faults) == 2 and all("is a file" in fault for fault in faults)
    assert file.read_text() == "mine" and os.listdir(tmp_path) == ["file"]


def test_corrupt_latents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text("{not json")
    (fault,) = refuse(monkeypatch, 1, ["--pulse-data", f"latents:{tmp_path}"])
    assert "meta.json" in fault
    assert (tmp_path / "meta.json").read_text() == "{not json"


def test_checkpoints_that_do_not_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flags = ["--global-batch-size", "8", "--train-iters", "1", "--save-interval", "1"]
    run(1, *flags, "--save", str(tmp_path), "--pulse-ema-decay", "0")
    before = sorted(p for p in tmp_path.rglob("*"))
    load = ["--load", str(tmp_path)]
    (fault,) = refuse(
        monkeypatch, 1, [*load, "--pulse-option", "embed_dim=64", "--pulse-ema-decay", "0"]
    )
    assert "another configuration of uvit-tiny" in fault and "embed_dim 32 there, 64 here" in fault
    (fault,) = refuse(monkeypatch, 1, [*load, "--ckpt-step", "7", "--pulse-ema-decay", "0"])
    assert "iter_0000007 is not a complete" in fault
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("???")
    weights = ["--pretrained-checkpoint", str(tmp_path), "--pulse-ema-decay", "0"]
    (fault,) = refuse(monkeypatch, 1, weights)  # a run itself would go on: see test_integrity
    assert "does not name an iteration" in fault
    assert sorted(p for p in tmp_path.rglob("*")) == before


def differ() -> None:
    from tests.integration.runs import train

    lr = "1e-3" if os.environ["RANK"] == "0" else "1e-4"
    train([*GOOD, *pipeline(2), "--lr", lr])


def test_ranks_with_different_flags() -> None:
    with pytest.raises(RanksFailed) as error:
        run_ranks(2, differ)
    assert said_once(error.value, "rank 1 was started with --lr 0.0001, rank 0 with 0.001")


def plan_otherwise() -> None:
    from megatron_pulse.planner.program.plan import Plan
    from tests.integration.runs import train

    original = Plan.digest
    rank = os.environ["RANK"]
    Plan.digest = lambda self, *count: original(self, *count) + rank  # type: ignore[method-assign]
    train([*GOOD, *pipeline(2)])


def test_ranks_that_plan_differently() -> None:
    with pytest.raises(RanksFailed) as error:
        run_ranks(2, plan_otherwise)
    assert said_once(error.value, "rank 1 makes another plan than rank 0")


def test_sequence_parallelism_needs_a_sequence() -> None:
    from megatron_pulse.integration.setup import _divide
    from model_specs import load_backbone

    with pytest.raises(ValueError, match="unet-tiny has no token sequence"):
        _divide(load_backbone("unet-tiny"), 2)


def test_a_backbone_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = refuse(monkeypatch, 1, [], ["--train-iters", "1", "--pulse-data", "cifar"])
    for text in ("--pulse-backbone must name", "--micro-batch-size must be", "--lr", "'cifar'"):
        assert sum(text in fault for fault in faults) == 1, (text, faults)
    assert len(faults) == 4, faults


def test_the_record_is_json() -> None:
    from model_specs import load_backbone

    record = load_backbone("uvit-tiny", {"depth": "8"}).record
    assert json.loads(json.dumps(record))["options"]["depth"] == 8
