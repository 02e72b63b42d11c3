"""Checkpoints do not know the layout that wrote them, and survive being killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.integration.runs import Kill, pipeline, run
from tests.ranks import RanksFailed

STEPS = ["--global-batch-size", "8", "--train-iters", "10"]


def saving(folder: Path) -> list[str]:
    """Flags that save every five steps."""
    return ["--save", str(folder), "--save-interval", "5"]


@pytest.mark.parametrize(
    "optimizer", [[], ["--use-distributed-optimizer"]], ids=["plain", "distopt"]
)
def test_saved_at_four_resumed_anywhere(tmp_path: Path, optimizer: list[str]) -> None:
    whole = run(4, *STEPS, *pipeline(4), *optimizer, *saving(tmp_path))
    assert len(whole.losses) == 10
    layouts = {
        "P=2 fold": (2, pipeline(2)),
        "P=1": (1, []),
        "P=2 sequential": (2, pipeline(2, "--pulse-placement", "sequential")),
    }
    for name, (num_ranks, flags) in layouts.items():
        resumed = run(
            num_ranks, *STEPS, *flags, *optimizer,
            "--load", str(tmp_path), "--ckpt-step", "5",
        )  # fmt: skip
        assert resumed.losses == whole.losses[5:], name
        assert resumed.grad_norms == whole.grad_norms[5:], name
        for key, value in whole.averages.items():
            assert resumed.averages[key].equal(value), (name, key)


def test_unet_resumes_at_another_size(tmp_path: Path) -> None:
    folder = str(tmp_path)
    whole = run(4, *STEPS, *pipeline(4), *saving(tmp_path), backbone="unet")
    resumed = run(2, *STEPS, *pipeline(2), "--load", folder, "--ckpt-step", "5", backbone="unet")
    assert resumed.losses == whole.losses[5:]
    assert resumed.grad_norms == whole.grad_norms[5:]


def test_killed_in_mid_step_resumes_with_the_same_curve(tmp_path: Path) -> None:
    flags = [*STEPS, *pipeline(2), *saving(tmp_path)]
    uninterrupted = run(2, *STEPS, *pipeline(2))
    with pytest.raises(RanksFailed) as killed:
        run(2, *flags, kill=Kill(rank=1, step=8))
    assert killed.value.exit_codes[1] == -signal.SIGKILL
    assert killed.value.exit_codes[0] == 1
    assert "rank 1 closed the connection" in killed.value.outputs[0]
    resumed = run(2, *flags)
    assert resumed.losses == uninterrupted.losses[5:]
    assert resumed.validation == uninterrupted.validation
