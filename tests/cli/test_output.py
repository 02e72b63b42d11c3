"""Tables of commands, on a terminal and in a pipe."""

from __future__ import annotations

import io
import sys

import pytest

from megatron_pulse.cli.output import table

ROWS = [["layer", "ms", "stages"], ["down", "1.5", "0: in ... mid (layers 0-3)"], ["up", "10", ""]]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_table_in_a_pipe_is_plain_and_never_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setenv("COLUMNS", "20")
    assert table(ROWS, left=(0, -1), indent=2) == [
        "  layer   ms  stages",
        "  down   1.5  0: in ... mid (layers 0-3)",
        "  up      10",
    ]


def test_table_on_a_terminal_folds_text_and_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "28")
    monkeypatch.setattr(sys, "stdout", Terminal())
    titles, *rows = table(ROWS, left=(0, -1))
    assert "\x1b[1m" in titles and "layer" in titles
    assert rows == ["down   1.5  0: in ... mid", "            (layers 0-3)", "up      10"]
    monkeypatch.setenv("COLUMNS", "10")
    assert table(ROWS, left=(0, -1))[-1] == "up      10"
