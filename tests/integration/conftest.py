"""Finished runs whose checkpoints several tests begin with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.integration.runs import run

BATCH, ITERATIONS, LR = 8, 6, 1e-3
COSINE = ["--lr-decay-style", "cosine"]
FIRST = [
    *("--global-batch-size", str(BATCH), "--train-iters", str(ITERATIONS), "--seed", "5"),
    *("--save-interval", "3", *COSINE),
]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with checkpoints of 3 and 6 steps."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    run(1, *FIRST, "--save", str(folder))
    return folder


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the distributed optimizer."""
    folder = tmp_path_factory.mktemp("sharded") / "run"
    run(1, *FIRST, "--save", str(folder), "--use-distributed-optimizer")
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A copy of ``saved`` to damage."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))
