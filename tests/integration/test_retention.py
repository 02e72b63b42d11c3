"""Retention of checkpoints while training: last, every Kth, best; never the only whole one."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path

import pytest

from megatron_pulse.cli.main import main
from megatron_pulse.integration.checkpoint.folders import (
    BEST,
    BEST_RECORD,
    BestCheckpoint,
    CheckpointError,
    complete_checkpoints,
    read_best,
    step_folder,
)
from megatron_pulse.integration.checkpoint.saved_run import read_saved_run
from megatron_pulse.integration.checkpoint.selection.pruning import set_removed
from megatron_pulse.integration.checkpoint.selection.retention import KeepPolicy, Retention
from megatron_pulse.integration.checkpoint.selection.stored_checkpoints import REMOVED, stored_in
from megatron_pulse.integration.checkpoint.starting_point import find_best, find_start
from megatron_pulse.integration.flags.parse import parse
from tests.integration.runs import BASE, TINY, pipeline, train
from tests.integration.test_async_saving import newest_whole, write_late
from tests.integration.test_bad_input import refuse
from tests.ranks import run_ranks

STEPS = ["--global-batch-size", "8", "--seed", "5", "--eval-interval", "1", "--save-interval", "1"]
FLAGS = [*TINY["uvit"], *BASE, *STEPS]
LOSSES = {1: 0.5, 2: 0.2, 3: 0.4, 4: 0.3, 5: 0.45, 6: 0.5}


def with_losses(flags: list[str], losses: dict[int, float]) -> str:
    """A run whose validation losses are these."""
    import torch
    from megatron.training.global_vars import get_args

    from megatron_pulse.integration.loop.validation import ValidationLosses

    ValidationLosses.result = lambda validation: {  # type: ignore[method-assign]
        "loss": torch.tensor(losses[get_args().curr_iteration + 1])
    }
    if "--async-save" in flags:
        write_late()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        train([*FLAGS, *flags])
    return out.getvalue()


@pytest.mark.parametrize("how", [[], ["--async-save"]], ids=["sync", "async"])
def test_retention_keeps_last_every_and_best(how: list[str], tmp_path: Path) -> None:
    keep = ["--pulse-keep-last", "1", "--pulse-keep-best", "--save-retain-interval", "3"]
    flags = [*pipeline(2), *how, *keep, "--save", str(tmp_path)]
    said, other = run_ranks(2, with_losses, [*flags, "--train-iters", "5"], LOSSES)
    assert complete_checkpoints(tmp_path) == [2, 3, 5]
    assert newest_whole(tmp_path) == 5
    assert "best checkpoint: step 2, validation loss 0.2\n" in said
    assert "step 4, validation" not in said and "best checkpoint" not in other
    best = read_best(tmp_path)
    assert best is not None
    assert (best.step, best.validation_loss) == (2, pytest.approx(0.2)) and best.validation
    assert not list(tmp_path.glob(f"*{REMOVED}"))
    assert read_saved_run(tmp_path, BEST).iteration == 2
    (tmp_path / f"iter_0000001{REMOVED}").mkdir()  # as a kill leaves it
    other = Retention(tmp_path, KeepPolicy(best=True, validation="another"), 0)
    assert other._best is None  # its losses are not compared with those of another validation
    better = {**LOSSES, 6: 0.1}
    said, _ = run_ranks(2, with_losses, [*flags, "--train-iters", "6"], better)
    assert "best checkpoint: step 6, validation loss 0.1\n" in said
    assert complete_checkpoints(tmp_path) == [3, 6]
    assert not list(tmp_path.glob(f"*{REMOVED}"))


def test_best_is_listed_pruned_around_and_found_by_name(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointError, match="records no best checkpoint: .*--pulse-keep-best"):
        read_saved_run(copy, BEST)
    BestCheckpoint(3, 0.25).write(copy)
    assert [one.step for one in stored_in(copy) if one.is_best] == [3]
    assert main(["checkpoint", "prune", str(copy), "--keep", "1"]) == 0
    assert complete_checkpoints(copy) == [3, 6]
    assert main(["checkpoint", "list", str(copy)]) == 0
    assert "the best" in capsys.readouterr().out
    args = parse(["--load", str(copy), "--ckpt-step", BEST]).args
    assert list(find_best(args)) == [] and args.ckpt_step == 3
    assert find_start(args).saved.iteration == 3  # type: ignore[union-attr]
    sampled = ["sample", "--load", str(copy), "--iteration", BEST, "--per-class", "1"]
    sampled += ["--classes", "0", "--steps", "1", "-o", str(copy / "one.png"), "--json"]
    assert main(sampled) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"].endswith(step_folder(3))
    (copy / BEST_RECORD).write_text(json.dumps({"step": 0, "validation_loss": 0.25}))
    with pytest.raises(CheckpointError, match="step is 0; allowed is a whole number, 1 or more"):
        read_saved_run(copy, BEST)


def applied(folder: Path, step: int, policy: KeepPolicy) -> list[int]:
    """Steps that stay when ``step`` has just been saved."""
    retention = Retention(folder, policy, rank=0)
    retention.apply(step)
    retention.join()
    return complete_checkpoints(folder)


def test_retention_removes_nothing_if_the_new_one_is_not_whole(copy: Path) -> None:
    shard = copy / step_folder(6) / "__0_0.distcp"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    shutil.copytree(copy / step_folder(3), copy / step_folder(1))
    assert applied(copy, 6, KeepPolicy(last=1)) == [1, 3, 6]
    shutil.rmtree(copy / step_folder(1))
    shard.write_bytes(content)
    shutil.copytree(copy / step_folder(6), copy / step_folder(9))  # of a run that went back
    assert applied(copy, 6, KeepPolicy()) == [3, 6, 9]
    assert applied(copy, 6, KeepPolicy(last=2)) == [3, 6, 9]
    assert applied(copy, 6, KeepPolicy(every=3)) == [3, 6, 9]
    assert applied(copy, 6, KeepPolicy(every=2)) == [6, 9]


def test_killed_between_rename_and_deletion_leaves_no_half_a_step(copy: Path) -> None:
    oldest = stored_in(copy)[0]
    set_removed(oldest)
    assert complete_checkpoints(copy) == [6] and newest_whole(copy) == 6
    assert applied(copy, 6, KeepPolicy(last=1)) == [6]
    assert not list(copy.glob(f"*{REMOVED}"))


def test_flags_of_retention_that_cannot_work_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps = ["--global-batch-size", "8", "--train-iters", "2"]
    lost = refuse(monkeypatch, 1, [*steps, "--pulse-keep-last", "2", "--pulse-keep-best"])
    assert [fault.split(" was given")[0] for fault in lost] == [
        "--pulse-keep-last", "--pulse-keep-best",
    ]  # fmt: skip
    save = [*steps, "--save", str(tmp_path), "--pulse-keep-best"]
    (fault,) = refuse(monkeypatch, 1, [*save, "--save-interval", "3", "--eval-interval", "2"])
    assert "Make it a multiple of --eval-interval, 2" in fault
    (fault,) = refuse(monkeypatch, 1, [*save, "--eval-iters", "0"])
    assert "--pulse-keep-best compares validation losses" in fault
    fault, *_ = refuse(monkeypatch, 1, [*steps, "--ckpt-step", "best", "--load", str(tmp_path)])
    assert "--ckpt-step best" in fault and "records no best checkpoint" in fault
