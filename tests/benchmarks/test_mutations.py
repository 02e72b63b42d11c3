"""A sample of damaged files; ``python -m tests.benchmarks.mutations`` runs thousands."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from megatron_pulse.cli.main import main
from tests.benchmarks.mutated_files import TARGETS
from tests.benchmarks.mutations import damaged, run
from tests.ranks import run_ranks

LIGHT = [name for name, target in TARGETS.items() if not target.heavy]


def test_damaged_files_are_refused_or_are_what_they_say() -> None:
    (cases,) = run_ranks(1, run, range(3 * len(LIGHT)), 7, LIGHT)
    assert not [case for case in cases if case.failed]
    assert {case.outcome for case in cases} == {"accepted", "refused"}
    assert {case.target for case in cases} == set(LIGHT)


def test_a_flipped_bit_is_refused() -> None:
    hashed = [name for name in LIGHT if TARGETS[name].hashed]
    (cases,) = run_ranks(1, run, range(len(hashed)), 7, hashed, False, True)
    assert [case.outcome for case in cases] == ["refused"] * len(hashed)


def test_damages_change_files_in_every_way(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"a": [1, 2.5, {"b": "text"}], "c": True}))
    (tmp_path / "a.csv").write_text("0F0,0B0\n1F0,1B0\n")
    for name, ways in (("a.json", 19), ("a.csv", 14)):
        found = [damaged(tmp_path / name, random.Random(number)) for number in range(500)]
        assert len({part for _, how in found for part in how.split(", ")}) >= ways
        assert len({content for content, _ in found}) > 150
        assert any(len(content) > 131_073 for content, _ in found)
        if name == "a.json":
            assert any(content.count(b'"a"') == 2 for content, _ in found)
            assert any(b"NaN" in content for content, _ in found)


def test_a_long_stage_is_scheduled_soon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole times are shown as a grid, a column for each unit: not of a hundred million."""
    (tmp_path / "t.json").write_text('{"forward": [1, 99999999], "backward": [2, 2]}')
    argv = ["schedule", "--times", str(tmp_path / "t.json"), "--placement", "sequential"]
    assert main([*argv, "-p", "2", "-m", "1", "--solver", "none", "--seconds", "0.1"]) == 0
    assert len(capsys.readouterr().out) < 10_000
