"""Output of a run: short by default, complete on request."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
from pathlib import Path

import pytest
import torch

from megatron_pulse.integration.loop.log_filter import (
    LineFilter,
    with_whole_intervals,
)
from tests.integration.runs import BASE, TINY, train
from tests.ranks import run_ranks

NUM_STEPS = 20
GROWING_SCALE = [
    *("--fp16", "--initial-loss-scale", str(2**20), "--loss-scale-window", "1"),
    *("--hysteresis", "1", "--train-iters", "9"),
]
"""Flags of a loss scale that steps exceed by turns."""
NEEDED_BY_FEW = {"mlxtend", "pandas", "scipy.stats", "sklearn", "wandb"}
"""Packages that a rank which needs none of them would spend its start on."""


def fine_tuned(argv: list[str]) -> str:
    """Output of a rank whose run begins with weights of another layout."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        train([*TINY["uvit"], *BASE, "--global-batch-size", "2", *argv])
    return out.getvalue()


def said(argv: list[str]) -> tuple[str, str, set[str]]:
    """(stdout, stderr) of one rank's run, and what it imported of ``NEEDED_BY_FEW``."""
    import megatron.core.timers as timers
    import megatron.training.arguments as arguments

    from tests.preload import IMPORTED

    arguments.parse_args = None  # the flags have been read: nobody does so anew
    for name in NEEDED_BY_FEW:  # which others than this run may have had need of
        sys.modules.pop(name, None)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        train([*TINY["uvit"], *BASE, "--global-batch-size", "2", *argv])
    assert timers.wandb is sys.modules.get("wandb"), "timers would not write to it"
    return out.getvalue(), err.getvalue(), NEEDED_BY_FEW & (sys.modules.keys() | IMPORTED)


def logs(*runs: list[str]) -> list[tuple[str, str, set[str]]]:
    """Output of each run, in order, from fresh processes."""
    return [run_ranks(1, said, argv)[0] for argv in runs]


def scalars(folder: Path, tag: str) -> list[float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [event.value for event in events.Scalars(tag)]


def test_the_log_of_twenty_steps_is_short_and_whole(tmp_path: Path) -> None:
    save, board = tmp_path / "run", tmp_path / "tensorboard"
    steps = ["--train-iters", str(NUM_STEPS), "--eval-interval", "10"]
    steps += ["--lr-decay-style", "linear"]
    ((out, err, imported),) = logs([*steps, "--save", str(save), "--seed", "77",
                          "--tensorboard-dir", str(board)])  # fmt: skip
    assert not imported
    lines = out.splitlines()
    assert len(lines) < 2 * NUM_STEPS + 25, out
    logged = re.findall(r"^iteration +(\d+)/ +20 \|", out, re.MULTILINE)
    assert [int(step) for step in logged] == list(range(1, NUM_STEPS + 1))
    losses = [float(loss) for loss in re.findall(r" \| loss (\S+) \|", out)]
    assert losses == pytest.approx(scalars(board, "loss"), rel=1e-5)  # each of its own step
    rates = [float(rate) for rate in re.findall(r" lr (\S+) \|", out)]
    used = [1e-3 * (1 - step / NUM_STEPS) for step in range(NUM_STEPS)]
    assert rates == pytest.approx(used) == scalars(board, "learning-rate")  # each of its own step
    assert "PPL" not in out
    assert re.findall(r"validation loss at iteration (\d+)", out) == ["10", "20"]
    assert "successfully saved checkpoint from iteration      20" in out
    assert f"arguments: {save / 'arguments.txt'}" in out
    assert "\r" not in err  # no bar where nobody watches
    written = (save / "arguments.txt").read_text()
    assert re.search(r"^seed +77$", written, re.MULTILINE)
    assert len(written.splitlines()) > 500

    start = ["--pretrained-checkpoint", str(save), "--train-iters", "1", "--eval-iters", "0"]
    fold = ["--pipeline-model-parallel-size", "2"]
    tuned = "".join(run_ranks(2, fine_tuned, [*start, *fold]))
    assert f"starts with the weights in {save}" in tuned and "successfully loaded" in tuned
    for alarming in ("could not find", "will be ignored", "metadata", "version", "mismatch"):
        assert alarming not in tuned, tuned


def test_what_flags_ask_for_is_said(tmp_path: Path) -> None:
    steps = ["--train-iters", "2", "--eval-iters", "0"]
    timers = ["--timing-log-level", "1", "--log-memory-interval", "1"]
    wandb = ["--wandb-project", "p", "--wandb-exp-name", "e", "--wandb-save-dir", str(tmp_path)]
    wandb += ["--tensorboard-dir", str(tmp_path)]
    (some, _, imported), (every, *_), (rarely, *_), (skipping, *_) = logs(
        [*steps, *timers, *wandb],
        [*steps, "--pulse-verbose"],
        [*steps, "--log-interval", "50"],
        [*GROWING_SCALE, "--eval-iters", "0", "--tensorboard-dir", str(tmp_path / "fp16")],
    )
    made = ["skipped steps" not in x for x in skipping.splitlines() if x.startswith("iteration")]
    assert not made[0] and not made[-1] and any(made)  # before and after steps that are made
    losses = [float(loss) for loss in re.findall(r" \| loss (\S+) \|", skipping)]
    assert losses == pytest.approx(scalars(tmp_path / "fp16", "loss"), rel=1e-5)
    assert re.findall(r"iteration +(\d+)/ +2 \|", rarely) == ["1"], "a sign that it trains"
    assert imported == {"wandb"}
    assert "optimizer" in some and "time across ranks" in some
    assert "[Rank 0]" in some and "memory (MB)" in some
    assert "end of arguments" not in some and "end of arguments" in every
    assert "time to initialize megatron" in every and "time to initialize" not in some


def test_only_whole_lines_of_noise_are_left_out() -> None:
    stream = io.StringIO()
    log = LineFilter(stream)
    log.write("done with set")
    log.write("up ...\n a line with done with setup in it\n\n")
    log.write("validation loss at iteration 3 | loss value: 1.2 | loss PPL: 3.3 | \nnot ")
    assert stream.getvalue().startswith(" a line with done with setup in it\nvalidation loss")
    assert stream.getvalue().endswith("loss value: 1.2 | \n")
    log.finish()
    assert stream.getvalue().endswith("\nnot \n")


STEP = (
    " [2026-01-01 00:00:00.000000] iteration        4/      20 | consumed samples: 8 | "
    "elapsed time per iteration (ms): 9.1 | learning rate: 3.000000E-03 | global batch size:     2 "
    "| loss: 1.234567E-01 | loss scale: {scale} | grad norm: 0.5 | number of skipped iterations: "
    "  {skipped} | number of nan iterations:   0 |\n"
)


def test_line_of_a_step_is_short_and_has_the_throughput() -> None:
    stream = io.StringIO()
    log = LineFilter(stream)
    log.write(" throughput: 7.5 samples/s | 0:00:10 left\n" + STEP.format(scale=1.0, skipped=0))
    log.write(STEP.format(scale=512.0, skipped=2))
    start = "iteration        4/      20 | lr 0.003 | loss 0.123457 | "
    assert stream.getvalue().splitlines() == [
        f"{start}grad norm 0.5 | 7.5 samples/s | 0:00:10 left",
        f"{start}loss scale 512 | grad norm 0.5 | skipped steps 2",
    ]


def test_losses_of_skipped_steps_count_only_where_no_other_is() -> None:
    """Mean of the made steps of an interval, or of the skipped ones if none was made."""
    said = {}

    def training_log(losses, totals, rate, iteration, scale, memory, skipped, **named):  # type: ignore[no-untyped-def]
        """Sums and means of Megatron's."""
        made = totals["advanced iterations"] = totals.get("advanced iterations", 0) + 1 - skipped
        if not skipped:
            totals["loss"] = totals.get("loss", 0.0) + losses["loss"]
        if iteration % 3 == 0 or named["is_first_iteration"]:
            said[iteration] = float(totals["loss"]) / max(1, made)
        if iteration % 3 == 0:
            totals.update({"advanced iterations": 0, "loss": torch.tensor(0.0)})

    log = with_whole_intervals(training_log, argparse.Namespace(log_interval=3))
    totals: dict[str, object] = {}
    for iteration, skipped in enumerate([1, 0, 0, 1, 0, 1, 1, 1, 1], start=1):
        losses = {"loss": torch.tensor(float(iteration))}
        log(losses, totals, 0, iteration, 1, 0, skipped, is_first_iteration=iteration == 1)
    assert said == {1: 1.0, 3: 2.5, 6: 5.0, 9: 8.0}


@pytest.mark.parametrize(("interval", "apart"), [(1, []), (2, [3]), (3, []), (5, [3])])
def test_sums_go_on_after_the_first_step_only_within_an_interval(
    interval: int, apart: list[int]
) -> None:
    """Megatron keeps a first step that it says apart, of a run that was resumed at step 2 too."""
    kept = []

    def training_log(*args: object, is_first_iteration: bool) -> None:
        if is_first_iteration:
            kept.append(args[3])

    log = with_whole_intervals(training_log, argparse.Namespace(log_interval=interval))
    for iteration in range(3, 12):
        log({}, {}, 0.0, iteration, 1.0, 0, 0, is_first_iteration=iteration == 3)
    assert kept == apart
