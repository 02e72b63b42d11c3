"""Tests that would endanger those after them are found."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.process import unchanged
from tests.ranks import run_ranks


def set_a_variable() -> None:
    os.environ["PULSE_LEFT_BEHIND"] = "1"


def go_elsewhere() -> None:
    os.chdir("/")


def listen() -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)


def limit() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


def fork() -> None:
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join()


def expect(act: Callable[[], None], fault: str) -> None:
    with pytest.raises(AssertionError, match=fault), unchanged():
        act()


@pytest.mark.parametrize(
    ("act", "fault"),
    [
        (set_a_variable, "variable PULSE_LEFT_BEHIND: None -> 1"),
        (go_elsewhere, "folder: .* -> /"),
        (listen, "signal 15: "),
        (limit, "limit RLIMIT_NOFILE: .* -> .64, 64."),
        (fork, "it forked pytest's process"),
    ],
)
def test_what_a_test_leaves_behind_is_said(act: Callable[[], None], fault: str) -> None:
    run_ranks(1, expect, act, fault)


def test_what_a_test_tidies_away_is_fine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with unchanged(), monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setenv("PULSE_LEFT_BEHIND", "1")
