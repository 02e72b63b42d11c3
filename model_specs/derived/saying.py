"""What is said while a module is made and derived, by the first rank alone."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer


def say(line: str) -> None:
    """Print ``line`` beside what a command prints."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)


@functools.cache
def say_once(line: str) -> None:
    """``say`` a line, unless it was said before."""
    say(line)


@contextmanager
def slowly(what: str, after_s: float = 4.0) -> Iterator[None]:
    """Within, say that ``what`` is under way, if it takes longer than ``after_s``."""
    timer = Timer(after_s, say, [f"{what} ..."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
