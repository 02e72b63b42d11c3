"""Families with Transformer Engine's layers, as far as they can be looked at without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.tiny import FAMILIES

SOURCES = Path(sys.prefix) / "transformer-engine"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Results of another process in which Transformer Engine can be imported."""
    if not SOURCES.is_dir():
        pytest.skip("its sources are not there: tests/run.sh fetches them")
    command = [sys.executable, "-m", "tests.model_specs.engine", str(SOURCES)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr[-4000:]
    printed: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return printed


def test_every_family_has_the_same_parameters_with_its_classes(found: dict[str, Any]) -> None:
    """Names, shapes, dtypes, and what Megatron notes of each (tensor parallelism and the like)."""
    assert found["families"].keys() == FAMILIES.keys()
    for family, of in found["families"].items():
        assert of["local"] == of["transformer_engine"], family
        assert {"TEColumnParallelLinear", "TERowParallelLinear"} <= set(of["classes"]), family


def test_its_weight_gradients_that_wait_are_the_same_to_the_last_bit(found: dict[str, Any]) -> None:
    """By its own Python, over products that torch computes."""
    for way, of in found["layers"].items():
        assert of["waited"] == of["expected"], way
        assert not of["differs"], way


def test_its_split_steps_are_the_whole_ones_to_the_last_bit(found: dict[str, Any]) -> None:
    for step, differs in found["steps"].items():
        assert not differs, step


def test_a_bias_that_it_would_not_train_is_told(found: dict[str, Any]) -> None:
    assert found["untrained"] == [
        "block.fc1: Transformer Engine has no gradient of bias while weight is frozen. Train or "
        "freeze both, or use --transformer-impl local"
    ]
