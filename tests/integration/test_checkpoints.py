"""Checkpoints do not know the layout that wrote them, and survive being killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.integration.runs import STEPS, Kill, alone, pipeline, run
from tests.ranks import RanksFailed, said_once


def saving(folder: Path) -> list[str]:
    """Flags that save every step."""
    return ["--save", str(folder), "--save-interval", "1"]


P1, P2 = [], pipeline(2)
ROW = pipeline(2, "--pulse-placement", "sequential")


@pytest.mark.parametrize(
    ("backbone", "optimizer", "layouts"),
    [
        ("unet", [], {"P=2 sequential": (2, ROW)}),
        (
            "uvit",
            ["--use-distributed-optimizer"],
            {"P=2 fold": (2, P2), "P=1": (1, P1), "P=2 sequential": (2, ROW)},
        ),
    ],
    ids=["plain", "distopt"],
)
def test_saved_at_four_resumed_anywhere(
    tmp_path: Path, backbone: str, optimizer: list[str], layouts: dict[str, tuple[int, list[str]]]
) -> None:
    whole = run(4, *STEPS, *pipeline(4), *optimizer, *saving(tmp_path), backbone=backbone)
    assert len(whole.losses) == 2
    for name, (num_ranks, flags) in layouts.items():
        resumed = run(
            num_ranks, *STEPS, *flags, *optimizer,
            "--load", str(tmp_path), "--ckpt-step", "1", backbone=backbone,
        )  # fmt: skip
        assert resumed.losses == whole.losses[1:], name
        assert resumed.grad_norms == whole.grad_norms[1:], name
        assert resumed.averages.keys() == whole.averages.keys(), name
        for key, value in whole.averages.items():
            assert resumed.averages[key].equal(value), (name, key)


def test_killed_in_mid_step_resumes_with_the_same_curve(tmp_path: Path) -> None:
    flags = [*STEPS, *pipeline(2), *saving(tmp_path)]
    uninterrupted = alone(*STEPS)
    with pytest.raises(RanksFailed) as killed:
        run(2, *flags, kill=Kill(rank=1, step=2))
    assert killed.value.exit_codes[1] == -signal.SIGKILL
    assert killed.value.exit_codes[0] == 1
    assert "rank 1 closed the connection" in killed.value.outputs[0]
    resumed = run(2, *flags)
    assert resumed.losses == uninterrupted.losses[1:]
    assert resumed.validation == uninterrupted.validation
    _damaged_is_refused_by_all_ranks(tmp_path, flags)
    again = run(2, *flags, "--train-iters", "3")
    assert again.losses[:1] == uninterrupted.losses[1:] and len(again.losses) == 2
    assert (tmp_path / "iter_0000002.damaged").is_dir() and (tmp_path / "iter_0000002").is_dir()


def _damaged_is_refused_by_all_ranks(folder: Path, flags: list[str]) -> None:
    """One flipped bit that only one rank reads; an intact step is named if a step was requested."""
    file = folder / "iter_0000002" / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(RanksFailed) as refused:
        run(2, *flags, "--train-iters", "3", "--load", str(folder), "--ckpt-step", "2")
    for text in (
        f"{file.parent} is damaged: __1_0.distcp: content differs from what was saved",
        "step 1 there is intact: name it (--ckpt-step 1 beside --load",
    ):
        assert said_once(refused.value, text)
    assert refused.value.exit_codes == [2, 2]
    assert "Traceback" not in "".join(refused.value.outputs)
