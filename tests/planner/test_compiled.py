"""Who compiles first lets the others wait, but not for ever."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megatron_pulse.planner.schedule import compiled
from megatron_pulse.planner.schedule.compiled import compiling


def test_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.tempfile, "gettempdir", lambda: str(tmp_path))
    with compiling():
        began = time.monotonic()
        with compiling(longest_s=0.3):  # as another process would
            assert time.monotonic() - began >= 0.3
    began = time.monotonic()
    with compiling(longest_s=100):
        assert time.monotonic() - began < 50


def test_without_a_folder_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.tempfile, "gettempdir", lambda: str(tmp_path / "none"))
    with compiling():
        assert not list(tmp_path.iterdir())
