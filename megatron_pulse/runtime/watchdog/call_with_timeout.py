"""Time limits for calls that may block for ever: a store, a disk or a terminal that is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import overload


@overload
def call_with_timeout[T](limit_s: float, call: Callable[[], T]) -> T | None: ...
@overload
def call_with_timeout[T](limit_s: float, call: Callable[[], T], otherwise: T) -> T: ...
def call_with_timeout[T](
    limit_s: float, call: Callable[[], T], otherwise: T | None = None
) -> T | None:
    """Return the result of ``call``, or ``otherwise`` if it raises or exceeds ``limit_s`` seconds.

    The call runs in a separate daemon thread, which is abandoned at the limit.
    """
    found: list[T | None] = [otherwise]

    def run() -> None:
        try:
            found[0] = call()
        except Exception:
            pass  # treated as no answer

    thread = start_and_leave(run)
    thread.join(limit_s)
    return otherwise if thread.is_alive() else found[0]


def start_and_leave(call: Callable[[], object]) -> threading.Thread:
    """Run ``call`` in a daemon thread that need not be joined."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def backstop_timeout_s(limit_s: float) -> float:
    """Timeout in seconds for waits that the watchdog should diagnose first, with a limit of
    ``limit_s``.
    """
    return 2 * limit_s + 10
