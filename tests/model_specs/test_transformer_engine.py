"""Families with Transformer Engine's layers, as far as they can be looked at without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.tiny import FAMILIES

SOURCES = Path(sys.prefix) / "transformer-engine"


def test_every_family_has_the_same_parameters_with_its_classes() -> None:
    """Names, shapes, dtypes, and what Megatron notes of each (tensor parallelism and the like)."""
    if not SOURCES.is_dir():
        pytest.skip("its sources are not there: tests/run.sh fetches them")
    command = [sys.executable, "-m", "tests.model_specs.te_families", str(SOURCES)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found.keys() == FAMILIES.keys()
    for family, of in found.items():
        assert of["local"] == of["transformer_engine"], family
        assert {"TEColumnParallelLinear", "TERowParallelLinear"} <= set(of["classes"]), family
