"""Checkpoints in Weights & Biases: logged when all ranks have ended them, whichever is late."""

from __future__ import annotations

import contextlib
import io
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import BASE, TINY, pipeline, train
from tests.ranks import run_ranks


def logged(argv: list[str]) -> tuple[list[tuple[str, str, str]], str]:
    """The artifacts of a run, by name, version and the newest checkpoint then, and what is said.

    The name of the newest checkpoint is written late.
    """
    import wandb

    from megatron_pulse.integration.checkpoint.saving import AtomicTracker

    open_, init, found, out = AtomicTracker.open, wandb.init, [], io.StringIO()

    def late(self: Any, path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode == "w":
            time.sleep(0.5)
        return open_(self, path, mode, *args, **kwargs)

    AtomicTracker.open = late  # type: ignore[method-assign]

    def begin(**settings: Any) -> Any:
        run = init(**settings)
        run.log_artifact = log_artifact
        return run

    def log_artifact(artifact: Any, aliases: list[str]) -> None:
        (newest,) = (e.local_path for e in artifact.manifest.entries.values() if e.local_path)
        found.append((artifact.name, aliases[0], Path(newest).read_text()))

    wandb.init = begin
    with contextlib.redirect_stdout(out):
        train([*TINY["uvit"], *BASE, "--global-batch-size", "4", "--eval-iters", "0", *argv])
    return found, out.getvalue()


@pytest.mark.parametrize("how", [[], ["--async-save"]], ids=["sync", "async"])
def test_checkpoint_is_logged_after_its_name_is_written(how: list[str], tmp_path: Path) -> None:
    save = tmp_path / "first try"
    wandb = ["--wandb-project", "p", "--wandb-exp-name", "e", "--tensorboard-dir", str(tmp_path)]
    flags = [*pipeline(2), *wandb, *how, "--save", str(save), "--save-interval", "1"]
    (first, _), (last, _) = run_ranks(2, logged, [*flags, "--train-iters", "2"])
    assert not first
    assert last == [("first-try", f"iter_{step:07}", str(step)) for step in (1, 2)]
    if not how:
        ((_, said),) = run_ranks(1, logged, [*wandb, "--save", str(save), "--train-iters", "3"])
        assert "loaded checkpoint" in said
        assert "in wandb" not in said and "W&B" not in said
