"""Calls that may block for ever (a store whose host is gone, a disk, a terminal), with a limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import overload


@overload
def within[T](limit_s: float, call: Callable[[], T]) -> T | None: ...
@overload
def within[T](limit_s: float, call: Callable[[], T], otherwise: T) -> T: ...
def within[T](limit_s: float, call: Callable[[], T], otherwise: T | None = None) -> T | None:
    """What ``call`` returns; ``otherwise`` if it raises, or has not returned in ``limit_s``.

    It runs in a thread of its own, which is left alone where it takes longer.
    """
    found: list[T | None] = [otherwise]

    def run() -> None:
        try:
            found[0] = call()
        except Exception:
            pass  # as good as no answer

    thread = start_and_leave(run)
    thread.join(limit_s)
    return otherwise if thread.is_alive() else found[0]


def start_and_leave(call: Callable[[], object]) -> threading.Thread:
    """Run ``call`` in a thread that nobody need wait for."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def backstop_s(limit_s: float) -> float:
    """The limit of waits of which the watch, before, says more than they could."""
    return 2 * limit_s + 10
