"""Runs that are told to stop, and runs that fail: what is saved, and what is said by whom."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import BASE, TINY, pipeline, train
from tests.ranks import RanksFailed, run_ranks, said_once

GOOD = [*TINY["uvit"], *BASE, *pipeline(2), "--global-batch-size", "4"]
LONG = [*GOOD, "--train-iters", "100000"]


def tell(ranks: tuple[int, ...], number: signal.Signals) -> None:
    if int(os.environ["RANK"]) in ranks:
        os.kill(os.getpid(), number)
        time.sleep(0.05)


def before_call(owner: Any, name: str, call: int, act: Callable[[], None]) -> None:
    """Have ``act`` run in the middle of the ``call``-th call of ``owner.name``."""
    original, num_calls = getattr(owner, name), 0

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == call:
            act()
        return original(*args, **kwargs)

    setattr(owner, name, wrapper)


# where the order comes, which ranks get it, the step that must be saved
MOMENTS: dict[str, tuple[tuple[int, ...], signal.Signals, int]] = {
    "in a step": ((1,), signal.SIGTERM, 2),
    "in a step, by Ctrl-C": ((0, 1), signal.SIGINT, 2),
    "in an evaluation": ((0,), signal.SIGHUP, 2),
    "while saving": ((1, 0), signal.SIGTERM, 3),
}


def told(moment: str, folder: str) -> tuple[list[float], str]:
    """Train, get the order at ``moment``; the losses, and what was printed."""
    import megatron.training.checkpointing as checkpointing

    from megatron_pulse.runtime.executor import Executor

    ranks, number, _ = MOMENTS[moment]
    flags = [*LONG, "--save", folder, "--save-interval", "3"]
    if moment.startswith("in a step"):
        before_call(Executor, "_backward", 6, lambda: tell(ranks, number))
    elif moment == "in an evaluation":
        flags += ["--eval-interval", "2", "--eval-iters", "1000000"]
        before_call(Executor, "run", 5, lambda: tell(ranks, number))
    else:
        before_call(checkpointing, "get_rng_state", 1, lambda: tell(ranks, number))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        losses = train(flags)["losses"]
    return losses, out.getvalue()


@pytest.mark.parametrize("moment", MOMENTS)
def test_told_to_stop_it_saves_and_says_so(moment: str, tmp_path: Path) -> None:
    _, number, step = MOMENTS[moment]
    (losses, first), (_, second) = run_ranks(2, told, moment, str(tmp_path))
    assert len(losses) == step
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(step)
    said = f"stopped ({number.name}) after step {step}: saved in {tmp_path}"
    assert first.count(said) == 1 and said not in second
    assert len(list(tmp_path.glob("iter_*"))) == 1  # not twice, where it came while saving


def told_in_start_up() -> None:
    from megatron_pulse.integration import pretrain

    def act() -> None:
        tell((1,), signal.SIGTERM)
        if os.environ["RANK"] == "1":
            time.sleep(60)  # the main thread is busy elsewhere

    before_call(pretrain, "check_world", 1, act)
    train(LONG)


def test_told_before_the_first_step_it_leaves_at_once_and_says_so() -> None:
    with pytest.raises(RanksFailed) as stopped:
        run_ranks(2, told_in_start_up)
    assert said_once(stopped.value, "stopped (SIGTERM) before the first step")
    assert stopped.value.exit_codes[1] == 128 + signal.SIGTERM
    assert "Traceback" not in "".join(stopped.value.outputs)


def fail(folder: str) -> None:
    from megatron_pulse.runtime.executor import Executor

    def act() -> None:
        if os.environ["RANK"] == "1":
            raise ArithmeticError("as tested")

    before_call(Executor, "_backward", 14, act)  # in step 4, after a checkpoint
    train([*LONG, "--save", folder, "--save-interval", "3"])


def test_a_failure_is_said_by_the_rank_that_met_it(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, fail, str(tmp_path))
    other, output = failed.value.outputs
    assert "Traceback" not in other and "stops" not in other and "rror" not in other
    assert output.count("Traceback") == 1 and output.count("ArithmeticError: as tested\n") >= 1
    assert output.count("rank 1 stops; first failure in this job: rank 1: ") == 1
    kept = [file.read_text() for file in sorted((tmp_path / "failures").iterdir())]
    assert len(kept) == 2 and "ArithmeticError" in kept[1] and "Traceback" in kept[0]


def refuse(lacks: tuple[int, ...]) -> None:
    missing = ["--pulse-data", "folder:/does/not/exist"]
    train([*LONG, *(missing if int(os.environ["RANK"]) in lacks else [])])


@pytest.mark.parametrize("lacks", [(0, 1), (1,), (0,)])
def test_a_refusal_is_said_once_by_who_has_it(lacks: tuple[int, ...]) -> None:
    with pytest.raises(RanksFailed) as refused:
        run_ranks(2, refuse, lacks)
    assert said_once(refused.value, "error: this run cannot start")
    assert said_once(refused.value, "/does/not/exist")
    if len(lacks) == 1:
        assert "/does/not/exist" in refused.value.outputs[lacks[0]]
    assert "Traceback" not in "".join(refused.value.outputs)


def complain() -> None:
    train([*LONG, "--train-itrs", "5"])


def test_the_parser_complains_once() -> None:
    with pytest.raises(RanksFailed) as refused:
        run_ranks(2, complain)
    assert said_once(refused.value, "--train-itrs")
