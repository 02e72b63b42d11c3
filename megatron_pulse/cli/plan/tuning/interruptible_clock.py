"""Clock of an interruptible search, which then reports its result so far."""

from __future__ import annotations

import signal
import threading

from megatron_pulse.cli.flag_checks import warn
from megatron_pulse.planner.tune.search.budget import ProcessorClock


class InterruptibleClock:
    """Clock of a search that should end after ``seconds`` of process time (see ``ProcessorClock``).

    The first interrupt (Ctrl-C) after something was ``found`` ends the search soon. From then on, a
    second counts as another ``seconds``, so that any share of the limit is over. An interrupt
    before that, or a second one, raises KeyboardInterrupt.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.found = seconds, False
        self._own = ProcessorClock()
        self._interrupted_at: float | None = None

    def clock(self) -> float:
        """Seconds since an arbitrary origin."""
        now, since = self._own(), self._interrupted_at
        return now if since is None else now + self.seconds * (1 + now - since)

    def stopped(self) -> bool:
        """True if the search was interrupted."""
        return self._interrupted_at is not None

    @property
    def took_s(self) -> float | None:
        """Wall-clock seconds since the beginning, if interrupted."""
        return None if self._interrupted_at is None else self._own.wall_s

    @property
    def is_late(self) -> bool:
        """True if the wall-clock limit ended the search."""
        return self._own.is_late

    def __enter__(self) -> None:
        # Only the main thread gets interrupts.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._interrupted)

    def __exit__(self, *raised: object) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._before)

    def _interrupted(self, number: int, frame: object) -> None:
        if not self.found:
            warn("nothing that fits was found yet")
        if self.stopped() or not self.found:
            raise KeyboardInterrupt
        self._interrupted_at = self._own()
        warn("stopping with the best so far; Ctrl-C again ends without")
