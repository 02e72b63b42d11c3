"""Messages on stderr while a module is made and exported, from rank 0 only."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer


def say(line: str) -> None:
    """Print ``line`` on stderr, on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)


@functools.cache
def say_once(line: str) -> None:
    """Print ``line`` as ``say`` does, at most once per process."""
    say(line)


@contextmanager
def report_if_slow(what: str, after_s: float = 4.0) -> Iterator[None]:
    """Print that ``what`` is in progress if the block takes longer than ``after_s`` seconds."""
    timer = Timer(after_s, say, [f"{what} ..."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
