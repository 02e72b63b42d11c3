"""Ranks of these tests exchange messages as NCCL would (``nccl_double``); others use plain gloo.

An environment variable selects one mode for all tests, or gloo if empty. Tests that measure times
never use late workers::

    PULSE_TESTS_CHANNELS=late .venv/bin/python -m pytest tests/runtime
"""

from __future__ import annotations

import os
from zlib import crc32

import pytest

from tests.runtime.nccl_double import LATE, MODES, VARIABLE

_TIMED = {"test_emulated", "test_probe", "test_trace"}
"""Files of tests that measure times, which the double's workers would lengthen."""


@pytest.fixture(autouse=True)
def _channels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vary the workers among tests: one per channel, one for all channels, or late ones."""
    if request.path.stem in _TIMED:
        if os.environ.get(VARIABLE) == LATE:
            monkeypatch.delenv(VARIABLE)
    elif VARIABLE not in os.environ:
        monkeypatch.setenv(VARIABLE, MODES[crc32(request.node.name.encode()) % 3])
