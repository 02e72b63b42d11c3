"""A sample of mutated files; ``python -m tests.benchmarks.mutations`` runs thousands."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from megatron_pulse.cli.main import main
from tests.benchmarks.mutate import dump, mutate_bytes, mutate_cells, mutate_tree, tree
from tests.benchmarks.mutation_targets import TARGETS
from tests.benchmarks.mutations import run
from tests.ranks import run_ranks

LIGHT = [name for name, target in TARGETS.items() if not target.heavy]


def test_mutated_files_are_refused_or_are_what_they_say() -> None:
    (cases,) = run_ranks(1, run, range(3 * len(LIGHT)), 7, LIGHT)
    assert not [case for case in cases if case.failed]
    assert {case.outcome for case in cases} == {"accepted", "refused"}
    assert {case.target for case in cases} == set(LIGHT)


def test_a_flipped_bit_is_refused() -> None:
    hashed = [name for name in LIGHT if TARGETS[name].hashed]
    (cases,) = run_ranks(1, run, range(len(hashed)), 7, hashed, False, True)
    assert [case.outcome for case in cases] == ["refused"] * len(hashed)


def test_mutations_change_files_in_every_way() -> None:
    rng, value = random.Random(0), {"a": [1, 2.5, {"b": "text"}], "c": True, "d": None}
    hows, texts = set(), set()
    for _ in range(500):
        changed = tree(value)
        hows.add(mutate_tree(changed, rng))
        texts.add(dump(changed))
    assert len(hows) == 10 and len(texts) > 100
    assert any(text.count('"a"') == 2 for text in texts) and any("NaN" in text for text in texts)
    content = dump(tree(value)).encode()
    assert len({mutate_bytes(content, rng)[1] for _ in range(500)}) == 13
    assert any(len(mutate_cells("0F0,0B0\n1F0,1B0\n", rng)[0]) > 131_073 for _ in range(100))


def test_a_long_stage_is_scheduled_soon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole times are shown as a grid, a column for each unit: not of a hundred million."""
    (tmp_path / "t.json").write_text('{"forward": [1, 99999999], "backward": [2, 2]}')
    argv = ["schedule", "--times", str(tmp_path / "t.json"), "--placement", "sequential"]
    assert main([*argv, "-p", "2", "-m", "1", "--solver", "none", "--seconds", "0.1"]) == 0
    assert len(capsys.readouterr().out) < 10_000
