"""Lists of faults: all that a reader can use, and no more."""

from __future__ import annotations

from pathlib import Path

import megatron_pulse
from megatron_pulse.faults import listed


def test_a_short_list_is_whole() -> None:
    faults = [f"times[{i}] is missing" for i in range(40)]
    assert listed(faults).splitlines() == ["", *(f"  - {fault}" for fault in faults)]


def test_the_same_fault_is_said_once_and_counted() -> None:
    assert listed(["a is 1", "b is 2", "a is 1"]) == "\n  - a is 1 (2 times)\n  - b is 2"


def test_many_alike_are_counted_and_others_stay_visible() -> None:
    faults = [f"times.{i} is {'x' * (i % 3)!r}; allowed is a number" for i in range(201)]
    lines = listed(["first", *faults, "last is -1.5e+9"]).splitlines()[1:]
    assert lines[0] == "  - first" and lines[-1] == "  - last is -1.5e+9"
    assert lines[1:4] == [f"  - {fault}" for fault in faults[:3]]
    assert lines[4] == "  - and 198 more like it" and len(lines) == 6


def test_many_unlike_end_with_their_number() -> None:
    names = [f"{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(100)]
    lines = listed(names).splitlines()[1:]
    assert len(lines) == 41 and lines[-1] == "  - and 60 more"


def test_every_list_of_faults_is_made_in_one_place() -> None:
    root = Path(megatron_pulse.__file__).parent
    makers = [p for p in root.rglob("*.py") if "  - {" in p.read_text(encoding="utf-8")]
    assert makers == [root / "faults.py"], "use megatron_pulse.faults.listed"


def test_a_fault_that_quotes_a_damaged_file_is_cut() -> None:
    said = listed([f"beta_end is {'x' * 200_000!r}"])
    assert len(said) < 5000 and said.endswith(" ...")
