"""ProgressLine lines, on a terminal and in a pipe."""

from __future__ import annotations

import contextlib
import os
import pty
import queue
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import megatron_pulse as pulse
from megatron_pulse import progress
from megatron_pulse.cli.main import main
from megatron_pulse.progress import ProgressLine, show_details, track, write_above


class Terminal:
    """Standard error as a terminal, and what was written to it.

    A thread reads all along: who writes to a full terminal waits.
    """

    def __init__(self, reads: int) -> None:
        self._reads, self._read = reads, queue.SimpleQueue[str]()
        threading.Thread(target=self._take, daemon=True).start()

    def _take(self) -> None:
        with contextlib.suppress(OSError):  # nobody writes any more
            while taken := os.read(self._reads, 65536):
                self._read.put(taken.decode())

    def read_until(self, wanted: str) -> str:
        """Text from the last call on, up to ``wanted``."""
        said, until = "", time.monotonic() + 100
        while wanted not in said and time.monotonic() < until:
            with contextlib.suppress(queue.Empty):
                said += self._read.get(timeout=0.1)
        assert wanted in said
        return said

    def read_nothing(self) -> None:
        with pytest.raises(queue.Empty):
            self._read.get(timeout=0.3)


@contextmanager
def standard_error_on_a_terminal() -> Iterator[Terminal]:
    reads, writes = pty.openpty()
    with pytest.MonkeyPatch.context() as patch, open(writes, "w") as stream:
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", "120")
        patch.setattr(sys, "stderr", stream)
        yield Terminal(reads)
    os.close(reads)


def test_line_says_what_how_far_and_the_best() -> None:
    with standard_error_on_a_terminal() as terminal:
        with ProgressLine("tuning", 28, "s", delay_s=0.0) as line:
            line.note = "best 71.4 samples/s"
            line.advance(7)
            said = terminal.read_until("best 71.4 samples/s")
            assert re.search(r"tuning.* 7 of 28 s, 00:0\d, 00:\d\d left", said)
            write_above(sys.stderr, "a line of the log\n")
            assert "\x1b[2K" in terminal.read_until("a line of the log").split("a line")[0]
            print("warning: beside", file=sys.stderr)
            terminal.read_until("warning: beside")
        assert progress._live is None
        terminal.read_until("\x1b[2K")  # the line is gone


def test_calm_line_is_drawn_as_work_advances() -> None:
    with standard_error_on_a_terminal() as terminal:
        with ProgressLine("training", 3, "steps", calm=True, delay_s=0.0) as line:
            terminal.read_nothing()
            line.advance()
            line.advance()
            progress._live.refresh()  # type: ignore[union-attr]
            terminal.read_until("2 of 3 steps")
            assert show_details(sys.stderr, ["loss 0.5", "lr 0.1"])
            progress._live.refresh()  # type: ignore[union-attr]
            terminal.read_until("loss 0.5   lr 0.1")
        assert not show_details(sys.stderr, ["no line"])
        assert progress._live is None


def test_a_search_shows_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = tmp_path / "times.json"
    times.write_text('{"forward": [1, 1, 1, 1], "backward": [2, 2, 2, 3]}')
    asked = f"schedule --times {times} -p 2 -m 8 --solver none --seconds 1 --no-cache"
    monkeypatch.setattr(progress, "DELAY_S", 0.0)
    with standard_error_on_a_terminal() as terminal:
        assert main(asked.split()) == 0
        terminal.read_until("searching a schedule")
    assert "\x1b" not in capsys.readouterr().out


def test_search_of_a_step_shows_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY_S", 0.0)
    chain = pulse.chain([torch.nn.Identity] * 4, pulse.TensorSpec((2,)), [(0, 3)])
    plan = pulse.make_plan(chain, pulse.weighted_costs(chain, [1.0] * 4), pulse.fold(2))
    with standard_error_on_a_terminal() as terminal:
        plan.step(3)
        terminal.read_until("searching a schedule of 3 microbatches")


def test_nothing_is_drawn_in_a_pipe_or_when_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "DELAY_S", 0.0)
    assert list(track(range(3), "counting")) == [0, 1, 2]
    assert not capsys.readouterr().err
    with standard_error_on_a_terminal() as terminal:
        assert list(track(range(3), "counting", silent=True)) == [0, 1, 2]
        terminal.read_nothing()
