"""Validation: the same number in every layout, without effect on training, and its target."""

from __future__ import annotations

import argparse
import contextlib
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megatron_pulse.integration.checkpoint.saved_run import read_saved_run
from megatron_pulse.integration.checkpoint.starting_point import StartingPoint, finished
from megatron_pulse.integration.loss_curve import read_scalars
from megatron_pulse.integration.pretrain import next_commands
from model_specs import load_backbone
from tests.integration.runs import BASE, TINY, assert_same, pipeline, run, train
from tests.ranks import run_ranks

FLAGS = ["--global-batch-size", "8", "--train-iters", "2", "--eval-interval", "1"]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of 24 training and 13 validation pictures."""
    folder = tmp_path_factory.mktemp("pictures")
    draw = np.random.default_rng(0)
    for name, count in (("train", 24), ("held", 13)):
        (folder / name).mkdir()
        for i in range(count):
            pixels = draw.integers(0, 256, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    own = f"folder:{folder / 'held'}"
    return ["--pulse-data", f"folder:{folder / 'train'}", "--pulse-validation-data", own]


@pytest.mark.parametrize(
    ("num_ranks", "more"),
    [
        (2, pipeline(2)),
        (2, ["--eval-micro-batch-size", "1"]),
        (4, pipeline(2, "--micro-batch-size", "4")),
    ],
)
def test_validation_loss_is_that_of_every_layout(
    pictures: list[str], num_ranks: int, more: list[str]
) -> None:
    """13 samples at 8 times, which no batch divides."""
    flags = [*pictures, *FLAGS, "--pulse-validation-times", "8", "--train-iters", "1"]
    alone, other = run(1, *flags), run(num_ranks, *flags, *more)
    assert list(alone.by_time[0]) == ["loss", *(f"loss at {i / 8:g}" for i in range(8))]
    assert len(alone.by_time) == len(other.by_time) == 1
    assert other.by_time[0] == pytest.approx(alone.by_time[0], rel=1e-6)


def test_validation_leaves_training_alone(pictures: list[str]) -> None:
    """On two ranks, with workers and dropped labels."""
    flags = [*pictures, *FLAGS, *pipeline(2), "--num-workers", "1"]
    evaluated, other = run(2, *flags), run(2, *flags, "--eval-iters", "0")
    assert len(evaluated.validation) == 2 and not other.validation
    other.validation = evaluated.validation
    assert_same(evaluated, other)


def logged(flags: list[str]) -> tuple[int, str]:
    """Number of steps of a training, and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        losses = train([*TINY["uvit"], *BASE, *flags])["losses"]
    return len(losses), out.getvalue()


def test_a_run_of_videos_ends_with_the_command_of_an_animation(tmp_path: Path) -> None:
    said = next_commands(tmp_path / "run", load_backbone("suv-tiny"), "pipeline")
    drawn = '--prompt "a red bird" --encoders pipeline -o samples.gif'
    assert f"sample:  pulse sample --load {tmp_path / 'run'} {drawn}\n" in said


def test_validation_target_saves_and_finishes_the_run(pictures: list[str], tmp_path: Path) -> None:
    """A rerun makes no step, and draws the last pictures if they are missing."""
    folder, sheet = tmp_path / "run", tmp_path / "run/samples/step_1/sheet.png"
    board = ["--tensorboard-dir", str(tmp_path / "board"), "--save", str(folder)]
    flags = [*pictures, *FLAGS, *pipeline(2), *board, "--train-iters", "9"]
    flags += ["--pulse-validation-target", "1e3"]
    flags += ["--pulse-sample-every", "4", "--pulse-sample-steps", "2"]
    found = run_ranks(2, logged, flags)
    said = "".join(text for _, text in found)
    assert [steps for steps, _ in found] == [1, 1]
    assert said.count("reached the target 1000 at iteration 1\n") == 1
    assert "loss at 0.875 value" in said and "PPL" not in said
    assert (folder / "latest_checkpointed_iteration.txt").read_text().strip() == "1"
    assert f"sample:  pulse sample --load {folder}" in said and sheet.exists()
    curves = read_scalars(tmp_path / "board")
    of_times = [curves[f"loss at {i / 8:g} validation"].values[0] for i in range(8)]
    assert curves["loss validation"].values == pytest.approx([sum(of_times) / 8])

    sheet.unlink()
    files = {path: path.stat().st_mtime_ns for path in folder.glob("iter_*/*")}
    found = run_ranks(2, logged, flags)
    assert [steps for steps, _ in found] == [0, 0] and sheet.exists()
    assert files == {path: path.stat().st_mtime_ns for path in folder.glob("iter_*/*")}
    loss = f"{curves['loss validation'].values[0]:.6g}"
    assert f"run is finished: it holds validation loss {loss}" in "".join(t for _, t in found)

    saved = read_saved_run(folder)
    start, args = StartingPoint(saved, f"--save {folder}", True), saved.arguments
    changed = {"pulse_validation_target": 0.01, "eval_iters": 99, "train_iters": 1}
    assert "Lower --pulse-validation-target or leave it out" in str(finished(start, args))
    for name, value in changed.items():  # a stricter target, another validation, the last step
        now = argparse.Namespace(**{**vars(args), name: value})
        assert (finished(start, now) is None) == (name != "train_iters"), name
