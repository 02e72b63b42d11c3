"""Runs under torchrun whose plan renumbers the launcher's processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from megatron_pulse.planner.layout.layouts import ROW
from megatron_pulse.planner.tune.config import Config
from tests.integration.runs import BASE
from tests.integration.test_device_order import ordered_plan
from tests.launch.sessions import BIN, session
from tests.launch.test_endings import saved


def reversed_run(folder: Path, *flags: str) -> list[str | Path]:
    """Two ranks, in the reversed order, for many steps."""
    plan = ordered_plan(folder / "plan.json", Config(2, 1, 1, 2, ROW), (1, 0))
    return [
        *(BIN / "pulse", "run", "--nproc-per-node", "2", "launch/pretrain_diffusion.py"),
        *(*BASE, "--pulse-plan", plan, "--train-iters", "100000", *flags),
    ]


def test_killed_rank_is_named_by_its_number_in_the_plan(tmp_path: Path) -> None:
    save = ["--save", str(tmp_path / "run"), "--save-interval", "3"]
    with session(reversed_run(tmp_path, *save)) as run:
        run.wait_for("iteration        4/")
        os.kill(run.children()[0], signal.SIGKILL)
        assert run.ended() == 1
        said = run.said()
        assert said.count("pulse run: rank 1 (launcher's rank 0) exited on SIGKILL") == 1
        assert said.count("rank 0 stops; first failure in this job: rank 0: ") == 1
        assert "Traceback" not in said
        assert saved(tmp_path / "run") >= 3


@pytest.mark.parametrize("number", [0, 1])
def test_stopped_rank_is_named_by_its_number_in_the_plan(tmp_path: Path, number: int) -> None:
    """The launcher's rank 0 hosts the store."""
    with session(reversed_run(tmp_path, "--pulse-timeout-s", "4")) as run:
        run.wait_for("iteration        4/")
        pid = run.children()[number]
        os.kill(pid, signal.SIGSTOP)
        assert run.ended() == 1
        assert f"; rank {1 - number} (process {pid} on " in run.said()
        assert "no response (process stopped, or node or link down)" in run.said()
