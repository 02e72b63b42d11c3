"""Starting points of a run (--save alone, --load, --pretrained-checkpoint), with changed flags."""

from __future__ import annotations

import argparse
import io
import math
import shutil
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from megatron_pulse.integration.checkpoint.folders import LATEST, CheckpointError
from megatron_pulse.integration.checkpoint.starting_point import find_start
from megatron_pulse.integration.flags.startup_checks import FlagError
from megatron_pulse.integration.setup import read_command_line
from tests.integration.conftest import BATCH, COSINE, LR
from tests.integration.runs import BASE, TINY, Run, assert_same, pipeline, run, train
from tests.integration.test_bad_input import GOOD, refuse
from tests.ranks import RanksFailed, run_ranks

SEED = ["--seed", "5"]


def cosine(done: float, lr: float = LR) -> float:
    """The rate after that share of a decay to nothing."""
    return lr * 0.5 * (1 + math.cos(math.pi * done))


def column(result: Run, name: str) -> list[float]:
    return [step[name] for step in result.steps]


def said(monkeypatch: pytest.MonkeyPatch, *flags: str) -> str:
    """The line that a run with these flags begins with."""
    from megatron_pulse.integration.checkpoint.resume_checks import NewRun, describe
    from megatron_pulse.integration.setup import prepare

    monkeypatch.setattr(sys, "argv", ["pretrain_diffusion.py", *GOOD, *SEED, *COSINE, *flags])
    line, options, given = read_command_line()
    args = line.args
    _, data, start = prepare(line, options, given)
    assert start is not None
    records = data.record(whole=True)
    return describe(start, NewRun(args, options, args.pulse_record, data=records))


@pytest.mark.parametrize("optimizer", ["plain", "distributed"])
def test_other_rate_batch_and_end(
    optimizer: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All flags of the optimizer and its schedule hold from the first step on."""
    folder = request.getfixturevalue("saved" if optimizer == "plain" else "sharded")
    more = ["--use-distributed-optimizer"] if optimizer == "distributed" else []
    flags = [
        *("--global-batch-size", "16", "--train-iters", "8", "--lr", "1e-4"),
        *("--adam-beta2", "0.9", "--weight-decay", "0.5", *more),
    ]
    resumed = run(1, *SEED, *COSINE, *flags, "--save", str(folder), "--save-interval", "100")
    shutil.rmtree(folder / "iter_0000008")
    (folder / "latest_checkpointed_iteration.txt").write_text("6")
    assert column(resumed, "iteration") == [6, 7]
    assert column(resumed, "samples") == [6 * BATCH, 6 * BATCH + 16]
    assert column(resumed, "lr") == pytest.approx([cosine(6 / 8, 1e-4), cosine(7 / 8, 1e-4)])
    assert column(resumed, "adam_steps") == [6, 7]
    assert column(resumed, "weight_decay") == [0.5, 0.5]
    assert column(resumed, "betas") == [(0.9, 0.9)] * 2
    line = said(monkeypatch, *flags, "--load", str(folder))
    assert f"continues from iteration 6 of {folder}; from here on: " in line
    for change in (
        "--train-iters 8 (was 6)",
        "--lr 0.0001 (was 0.001)",
        "--global-batch-size 16 (was 8)",
        "--adam-beta2 0.9 (was 0.999)",
        "--weight-decay 0.5 (was 0.01)",
    ):
        assert change in line
    assert "--seed" not in line and "--min-lr" not in line


def _saved_by_a_gpu(argv: list[str]) -> None:
    """A run whose checkpoints have a GPU's generators, of 16 bytes."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.training import checkpointing

    original, of_a_gpu = checkpointing.get_rng_state, torch.zeros(16, dtype=torch.uint8)

    def get_rng_state(*args: Any, **kwargs: Any) -> Any:
        tracker = get_cuda_rng_tracker()
        states, get = tracker.get_states(), torch.cuda.get_rng_state
        tracker.set_states(dict.fromkeys(states, of_a_gpu))
        torch.cuda.get_rng_state = lambda *device: of_a_gpu
        try:
            return original(*args, **kwargs)
        finally:
            torch.cuda.get_rng_state = get
            tracker.set_states(states)

    checkpointing.get_rng_state = get_rng_state
    train(argv)


def test_generators_of_another_kind_of_device(tmp_path: Path) -> None:
    """A run that was saved on a GPU goes on here, as if never stopped."""
    flags = ["--global-batch-size", str(BATCH), *SEED, "--lr-decay-style", "constant"]
    save = ["--save", str(tmp_path), "--save-interval", "2"]
    whole = run(1, *flags, "--train-iters", "4")
    first = [*TINY["uvit"], *BASE, *flags, *save, "--train-iters", "2"]
    run_ranks(1, _saved_by_a_gpu, first)
    assert run(1, *flags, *save, "--train-iters", "4").losses == whole.losses[2:]


def test_what_is_missing_at_another_layout_is_told_where_it_counts(saved: Path) -> None:
    with pytest.raises(RanksFailed) as failed:
        run(2, *SEED, *COSINE, *pipeline(2), "--train-iters", "12", "--load", str(saved),
            "--global-batch-size", str(BATCH), "--dist-ckpt-strictness", "raise_all")  # fmt: skip
    said = str(failed.value)
    assert "is refused by --dist-ckpt-strictness" in said and "rng_state" in said


def test_counted_in_samples(saved: Path) -> None:
    """--train-samples ends after so many in all, whatever the batches were."""
    flags = ["--global-batch-size", "16", "--train-samples", "80", "--load", str(saved)]
    resumed = run(1, *SEED, *COSINE, *flags)
    assert column(resumed, "samples") == [48, 64]
    assert column(resumed, "lr") == pytest.approx([cosine(48 / 80), cosine(64 / 80)])


def test_counted_from_another_step(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--override-ckpt-iteration: data and schedule are those of that step."""
    flags = ["--load", str(saved), "--override-ckpt-iteration", "4", "--train-iters", "6"]
    resumed = run(1, *SEED, *COSINE, *flags, "--global-batch-size", str(BATCH))
    assert column(resumed, "iteration") == [4, 5] and column(resumed, "samples") == [32, 40]
    assert column(resumed, "lr") == pytest.approx([cosine(4 / 6), cosine(5 / 6)])
    (fault,) = refuse(monkeypatch, 1, [*SEED, *flags, "--global-batch-size", "16"])
    assert "must stay 8" in fault
    (fault,) = refuse(monkeypatch, 1, [*SEED, "--pretrained-checkpoint", *flags[1:]])
    assert "a run continued with --load" in fault


def test_the_saved_schedule_where_it_is_asked_for(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [
        *("--train-iters", "5", "--lr", "1e-4", "--load", str(saved), "--ckpt-step", "3"),
        *("--use-checkpoint-opt_param-scheduler", "--global-batch-size", str(BATCH)),
    ]
    resumed = run(1, *SEED, *COSINE, *flags)
    assert column(resumed, "lr") == pytest.approx([cosine(3 / 6), cosine(4 / 6)])
    assert "--lr 0.0001 (still 0.001)" in said(monkeypatch, *flags)


@pytest.mark.parametrize(
    ("before", "now", "iteration", "place"),
    [
        ({}, {}, 4, 24),
        ({}, {"global_batch_size": 16}, 4, 48),
        ({"train_samples": 90}, {"train_samples": 99, "global_batch_size": 16}, 4, 24),
        ({}, {"train_samples": 99, "global_batch_size": 16}, 4, 24),
        ({"train_samples": 90}, {"global_batch_size": 16}, 4, 48),
        ({}, {}, 8, 56),
        ({}, {}, 2, 8),
        ({}, {"train_samples": 99}, 0, 0),
    ],
)
def test_place_in_schedule_counts_steps_that_were_made(
    before: dict[str, int], now: dict[str, int], iteration: int, place: int
) -> None:
    """Four steps of eight, of which one was skipped, by all units and batches; and counted from
    other steps."""
    from megatron_pulse.integration.checkpoint.lr_schedule import schedule_position, steps_made

    args = {"train_samples": None, "global_batch_size": 8, "consumed_train_samples": 32}
    saved = {
        "iteration": 4,
        "args": argparse.Namespace(**args | before),
        "opt_param_scheduler": {"num_steps": 24},
    }
    now = {**now, "consumed_train_samples": iteration * 8, "curr_iteration": iteration}
    resumed = argparse.Namespace(**args | now)
    assert schedule_position(saved, resumed, iteration) == place
    made = steps_made(argparse.Namespace(num_steps=place), resumed)
    assert made == max(0, iteration - 1)


def test_schedule_after_skipped_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another batch, the checkpoint's schedule and a new optimizer leave the rate where it was."""
    decay, warmup, save = 20, 6, tmp_path / "first"
    shape = ["--lr-decay-style", "linear", "--lr-decay-iters", str(decay)]
    shape += ["--lr-warmup-iters", str(warmup)]
    fp16 = [*SEED, "--fp16", "--hysteresis", "1", "--initial-loss-scale", str(2**18)]
    first = run(1, *fp16, *shape, "--global-batch-size", "8", "--train-iters", "8",
                "--save", str(save), "--no-save-optim")  # fmt: skip
    made = sum(norm is not None for norm in first.grad_norms)
    assert warmup - 2 < made < 8
    rate = LR * min(made / warmup, (decay - made) / (decay - warmup))
    more = [*fp16, "--load", str(save), "--no-load-optim", "--train-iters", "9"]
    more += ["--global-batch-size", "16"]
    assert column(run(1, *more, *shape), "lr") == pytest.approx([rate])
    kept = ["--use-checkpoint-opt_param-scheduler", "--lr", "1e-5"]
    assert column(run(1, *more, *kept), "lr") == pytest.approx([rate])
    line = said(monkeypatch, *more, *shape)
    assert "--train-iters 9 (was 8)" in line and "--lr-" not in line
    by_samples = ["--train-samples", "99", *kept, "--load", str(save), "--no-load-optim"]
    (fault,) = refuse(monkeypatch, 1, [*fp16, *by_samples], GOOD[:-2])
    assert (
        "its learning-rate schedule counts --train-iters" in fault
        and "out and give the schedule" in fault
    )


def test_a_new_optimizer_goes_on_with_the_schedule(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--no-load-optim, which is what a checkpoint without the optimizer's state asks for."""
    flags = ["--global-batch-size", str(BATCH), "--train-iters", "8"]
    bare = tmp_path / "bare"
    fresh = run(
        1, *SEED, *COSINE, *flags, "--load", str(saved), "--save", str(bare),
        "--no-load-optim", "--use-distributed-optimizer", "--no-save-optim",
    )  # fmt: skip
    assert column(fresh, "iteration") == [6, 7]
    assert column(fresh, "adam_steps") == [0, 1]
    assert column(fresh, "lr") == pytest.approx([cosine(6 / 8), cosine(7 / 8)])
    further = [*SEED, *flags, "--train-iters", "9", "--save", str(bare)]
    (fault,) = refuse(monkeypatch, 1, further)
    assert "without optimizer state" in fault
    assert "--no-load-optim" in fault and f"--pretrained-checkpoint {bare}" in fault
    assert "continues from iteration 8" in said(monkeypatch, *further, "--no-load-optim")


def test_finished(saved: Path) -> None:
    """The same command again: no error, no step, and how to go on."""
    before = sorted(saved.rglob("*"))
    ends = {
        "--train-iters 6": "iteration 6, and --train-iters 6 leaves no step. Raise --train-iters",
        "--train-iters 4": "iteration 6, and --train-iters 4 leaves no step. Raise --train-iters",
        "--train-samples 55": "48 samples, and --train-samples 55 leaves no step. Raise --train-s",
    }
    for text, done in zip(
        run_ranks(1, said_at_end, saved, list(ends))[0], ends.values(), strict=True
    ):
        assert f"{saved} is finished: it holds {done}" in text
    assert sorted(saved.rglob("*")) == before


def said_at_end(saved: Path, ends: list[str]) -> list[str]:
    """Output of continuing ``saved`` with each of these flags."""
    from megatron_pulse.integration import pretrain

    said = []
    for end in ends:
        flags = [*TINY["uvit"], *BASE, *SEED, "--global-batch-size", str(BATCH), *end.split()]
        sys.argv = ["x", *flags, "--save", str(saved)]
        with redirect_stdout(io.StringIO()) as output:
            pretrain.main()
        said.append(output.getvalue())
    return said


def test_folders_that_are_no_place_to_begin(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished run for another folder, published weights, a variable that is not set."""
    other = ["--save", str(tmp_path / "other"), "--train-iters", "6"]
    (fault,) = refuse(monkeypatch, 1, [*SEED, "--load", str(saved), *other])
    assert "leaves no steps for --save" in fault and "--pretrained-checkpoint" in fault
    published = tmp_path / "published"
    (published / "unet").mkdir(parents=True)
    (published / "unet/config.json").write_text("{}")
    for door in ("--save", "--load", "--pretrained-checkpoint"):
        (fault,) = refuse(monkeypatch, 1, [*SEED, door, str(published)])
        assert f"pulse import --from {published}" in fault.replace("'", ""), door
        (fault,) = refuse(monkeypatch, 1, [*SEED, door, ""])
        assert f"{door} is empty" in fault


def test_save_refuses_a_run_whose_steps_are_not_told(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run had restarted from step 1; remains of a killed first save are overwritten."""
    latest = copy / LATEST
    latest.unlink()
    first, last = steps = [copy / "iter_0000003", copy / "iter_0000006"]
    for step in steps:
        (step / "metadata.json").unlink()
    aside = copy / "iter_0000006.damaged"

    def refused() -> str:
        with pytest.raises(CheckpointError) as error:
            find_start(args)
        return str(error.value)

    args = argparse.Namespace(
        load=None, pretrained_checkpoint=None, save=str(copy), finetune=False, ckpt_step=None
    )
    (fault,) = refuse(monkeypatch, 1, [*SEED, "--save", str(copy)])
    assert fault == refused()
    assert f"--save {copy} holds a damaged run: iter_0000003, iter_0000006" in fault
    assert (
        f"without {LATEST} and any metadata.json; restore the files, or start a new run with "
        "another"
    ) in fault
    shutil.rmtree(first)
    assert "damaged run: iter_0000006, without" in refused()
    last.rename(aside)
    assert "damaged run: iter_0000006.damaged, without" in refused()
    aside.rename(last)
    (last / ".metadata").unlink()
    assert find_start(args) is None
    (copy / "release").mkdir()
    (copy / "release/metadata.json").touch()
    assert refused().count("release, without latest_checkpointed_iteration.txt; restore") == 1


def test_auto_compares_with_what_a_run_begins_with_before_it_measures(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*flags: str) -> str:
        line = ["pretrain_diffusion.py", *GOOD, *SEED, "--pulse-auto", *flags]
        monkeypatch.setattr(sys, "argv", line)
        monkeypatch.setenv("WORLD_SIZE", "1")
        with pytest.raises(FlagError) as error:
            read_command_line()
        (fault,) = error.value.faults
        return fault

    weights = ["--pretrained-checkpoint", str(saved)]
    assert "uvit-tiny: embed_dim 32 there, 64" in refused(
        *weights, "--pulse-option", "embed_dim=64"
    )
    assert "with --optimizer adam" in refused("--load", str(saved), "--optimizer", "sgd")
    other = ["--save", str(tmp_path / "other")]
    assert "leaves no steps for --save" in refused("--load", str(saved), *other)
    good = ["p.py", *GOOD, *SEED, "--pulse-auto", *weights]
    monkeypatch.setattr(sys, "argv", good)
    assert read_command_line()[0].faults == ()


def test_where_no_step_is_whole_all_are_named(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason of each, and what to do, whatever asks for the run."""

    def refused(*flags: str) -> str:
        (fault,) = refuse(monkeypatch, 1, [*SEED, *flags])
        return fault

    first, last = steps = [copy / "iter_0000003", copy / "iter_0000006"]
    texts = [(step / "metadata.json").read_text() for step in steps]
    for step in steps:
        (step / "metadata.json").unlink()
    fault = refused("--save", str(copy))
    assert f"--save: no checkpoint in {copy} is intact (2 faults):" in fault
    assert f"{last} is not a complete torch_dist checkpoint (it has no metadata.json)" in fault
    assert f"{first} is half-written" in fault
    assert (
        "restore the files, or start a new run with another --save"
    ) in fault and "--pretrained-ch" in fault
    again = ["--load", str(copy), "--save", str(copy)]
    assert refused(*again) == fault.replace("--save: ", "--load: ", 1)
    (copy / LATEST).unlink()
    assert "holds a damaged run: iter_0000003, iter" in refused("--load", str(copy))
    assert ". To start a run there" not in refused(*again)
    for step, text in zip(steps, texts, strict=True):
        (step / "metadata.json").write_text(text)
        (step / "__0_0.distcp").unlink()
    fault = refused("--save", str(copy))
    assert "is intact (3 faults):" in fault and f"{copy} has no {LATEST}" in fault
    for step in steps:
        assert f"{step} is damaged (__0_0.distcp: No such file or directory)" in fault


@pytest.mark.parametrize("door", ["--load", "--pretrained-checkpoint", "--save"])
def test_another_backbone(saved: Path, door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other heads leave every shape as it is."""
    (fault,) = refuse(monkeypatch, 1, [*SEED, door, str(saved), "--pulse-option", "num_heads=2"])
    assert f"{door} {saved}: it holds another configuration of uvit-tiny" in fault
    assert "num_heads 4 there, 2 here" in fault


@pytest.mark.parametrize("door", ["--load", "--pretrained-checkpoint"])
def test_a_named_folder_holds_something(
    copy: Path, door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(folder: Path, *flags: str) -> str:
        (fault,) = refuse(monkeypatch, 1, [*SEED, door, str(folder), *flags])
        return fault

    assert "there is no such folder" in refused(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "there is no latest_checkpointed_iteration.txt" in refused(tmp_path / "empty")
    missing = refused(copy, "--ckpt-step", "5")
    assert "iter_0000005 is not a complete torch_dist checkpoint; complete steps: 3, 6" in missing
    (copy / "iter_0000006" / "metadata.json").unlink()
    assert "iter_0000006 is not a complete" in refused(copy, "--ckpt-step", "6")
    (copy / "iter_0000003" / "common.pt").write_bytes(b"")
    assert "common.pt: not part of the saved checkpoint" in refused(copy, "--ckpt-step", "3")


def test_contradictions(
    copy: Path, sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags that say two things about where to begin, and folders that would be overwritten."""
    new, there = str(tmp_path / "new"), str(copy)
    for flags, reason in (
        (["--load", new, "--save", new], "give --save alone"),
        (["--load", there, "--pretrained-checkpoint", there], "give one"),
        (["--load", there, "--finetune", "--save", there], "overwrite itself with a new run"),
        (["--finetune"], "--finetune needs --load"),
        (["--ckpt-step", "3"], "needs --load or"),
        (["--ckpt-step", "3", "--save", there], f"needs the folder of that step: --load {there}"),
        (["--save", there, "--seed", "6"], "a run with --seed 5, not 6"),
        (["--save", there, "--use-distributed-optimizer"], "without --use-distributed-optimizer"),
        (["--load", str(sharded)], "with --use-distributed-optimizer. Give it"),
        (["--save", there, "--optimizer", "sgd"], "with --optimizer adam. Give the same"),
        (["--save", there, "--bf16"], "trained in fp32, but this run is in bf16"),
    ):
        (fault,) = refuse(monkeypatch, 1, [*SEED, *flags])
        assert reason in fault
    other = tmp_path / "other"
    shutil.copytree(copy, other)
    (fault,) = refuse(monkeypatch, 1, [*SEED, "--load", there, "--save", str(other)])
    assert f"--save {other} already holds a run" in fault and "Leave --load out" in fault
    latest = copy / "latest_checkpointed_iteration.txt"
    (copy / "iter_0000003").rename(copy / "release")
    latest.write_text("release")
    (fault,) = refuse(monkeypatch, 1, [*SEED, "--save", there])
    assert "holds published weights and no run" in fault
    assert not Path(new).exists()


def test_what_is_said_of_other_data_and_seeds(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--load", str(saved), "--train-iters", "9"]
    line = said(monkeypatch, *flags, "--seed", "6", "--pulse-class-dropout", "0.2")
    assert "--seed 6 (was 5)" in line and "--pulse-class-dropout 0.2 (was 0.1)" in line
    layout = ["--micro-batch-size", "4", "--pulse-placement", "sequential"]
    line = said(monkeypatch, *flags, *layout)
    assert line.endswith("from here on: --train-iters 9 (was 6)")
    begun = ["--pretrained-checkpoint", str(saved), "--seed", "6", "--save", str(tmp_path / "x")]
    line = said(monkeypatch, *begun)
    assert line == f"starts with the weights in {saved / 'iter_0000006'}"


def test_data_that_changed_are_said_and_moved_labels_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos, kept = tmp_path / "photos", tmp_path / "kept"
    for i in range(20):
        path = photos / ("cat" if i < 10 else "dog") / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), 10 * i).save(path)
    batch = ["--global-batch-size", "8", "--pulse-data", f"folder:{photos}"]
    run(1, *SEED, *COSINE, *batch, "--train-iters", "1", "--save", str(kept))
    load = [*batch, "--load", str(kept), "--train-iters", "9"]
    assert said(monkeypatch, *load).endswith("from here on: --train-iters 9 (was 1)")
    Image.new("L", (8, 8), 255).save(photos / "dog" / "new.png")
    line = said(monkeypatch, *load)
    assert (
        "; from here on: --train-iters 9 (was 1), samples: 19 for training, 2 for validation"
        in line
    )
    assert "(was 18 and 2), 1 added, 0 removed" in line
    (photos / "dog").rename(photos / "ant")
    (fault,) = refuse(monkeypatch, 1, [*SEED, *COSINE, *load])
    assert "cat is class 1 (was 0). Restore the names of the class folders" in fault
    assert f"--pretrained-checkpoint {kept}" in fault
    line = said(monkeypatch, *batch, "--pretrained-checkpoint", str(kept), "--train-iters", "9")
    assert line.endswith("; from here on: labels: cat is class 1 (was 0)")


def test_pretrained_weights_count_until_there_is_a_checkpoint(saved: Path, tmp_path: Path) -> None:
    """The same command twice: first it takes weights, then it goes on with its own run."""
    save = tmp_path / "run"
    flags = [
        *("--pretrained-checkpoint", str(saved), "--ckpt-step", "3"),
        *("--global-batch-size", str(BATCH), "--save", str(save), "--save-interval", "100"),
    ]
    begun = run(2, *flags, *pipeline(2), "--train-iters", "2")
    assert column(begun, "iteration") == [0, 1] and column(begun, "samples") == [0, BATCH]
    continued = run(1, *flags, "--train-iters", "3")
    assert column(continued, "iteration") == [2] and column(continued, "adam_steps") == [2]
    whole = run(
        1, *flags[:4], "--global-batch-size", str(BATCH), "--train-iters", "3"
    )  # nothing saved
    assert begun.losses + continued.losses == whole.losses


@pytest.mark.parametrize("flags", ["--sgd-momentum 0.9", "--sgd-momentum 0 --bf16"])
def test_resume_of_sgd_equals_a_run_without_a_stop(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With momenta, and without any state; another momentum is refused."""
    sgd = ["--optimizer", "sgd", *flags.split(), "--global-batch-size", str(BATCH)]
    save = ["--save", str(tmp_path / "run"), "--save-interval", "2"]
    whole = run(1, *sgd, "--train-iters", "4", *save)
    again = ["--train-iters", "4", "--load", str(tmp_path / "run"), "--ckpt-step", "2"]
    rest = run(1, *sgd, *again)
    assert_same(rest, replace(whole, losses=whole.losses[2:], grad_norms=whole.grad_norms[2:]))
    (fault,) = refuse(monkeypatch, 1, [*sgd, *again, "--sgd-momentum", "0.5"])
    assert f"it was trained with {flags.removesuffix(' --bf16')}. Give the same" in fault


def test_averages_can_begin_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--global-batch-size", str(BATCH), "--save-interval", "1", "--save"]
    none = [*flags, str(tmp_path / "none"), "--train-iters", "1", "--pulse-ema-decay", "0"]
    before = run(1, *none)
    assert not before.averages
    more = ["--load", str(tmp_path / "none"), "--train-iters", "2", "--pulse-ema-decay", "0.15"]
    after = run(1, *flags, str(tmp_path / "some"), *more)
    for name, average in after.averages.items():
        expected = before.weights[name].lerp(after.weights[name], 0.85)
        torch.testing.assert_close(average, expected, rtol=1e-6, atol=1e-8)
    assert after.averages.keys() == after.weights.keys()
    assert "EMA of the weights, starting with these weights" in said(monkeypatch, *more)


def test_options_that_are_newer_than_the_checkpoint(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option that the record does not know has its default."""
    from megatron_pulse.integration.checkpoint import saved_run

    args = saved_run.read_saved_run(saved).arguments
    old = argparse.Namespace(**vars(args))
    old.pulse_record = {**args.pulse_record, "options": dict(args.pulse_record["options"])}
    del old.pulse_record["options"]["final_conv"], old.pulse_class_dropout
    common = {"args": old}
    monkeypatch.setattr(
        saved_run.dist_checkpointing, "load_common_state_dict", lambda folder: common
    )
    line = said(monkeypatch, "--load", str(saved), "--train-iters", "6")
    assert line.startswith("continues from iteration 6")
