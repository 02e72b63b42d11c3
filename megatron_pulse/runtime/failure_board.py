"""Failure board, on which the first failing rank reports, for all others to repeat.

The board lives in the job's key-value store. Only the first failure counts; failures of other ranks
follow from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist

from megatron_pulse.runtime.watchdog.call_with_timeout import call_with_timeout

ANSWER_S = 3.0
"""Seconds for the store to answer; its host may be stopped or gone."""

_KEY = "megatron_pulse/first_failure"


class PulseError(RuntimeError):
    """Failure of a run; the message names rank, operation and peer."""


class FailureBoard:
    """The job's first failure, shared through ``store`` (a torch.distributed Store)."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._is_there = True

    def report(self, text: str) -> str:
        """Record ``text`` unless another rank was first; returns the first failure."""
        mine = f"rank {self._rank}: {text}"
        return self._asked(lambda: self._store.compare_set(_KEY, "", mine).decode(), mine)

    def is_first(self, text: str) -> tuple[bool, str]:
        """Report ``text``; returns whether this rank failed first, and the first failure."""
        first = self.report(text)
        return first.startswith(f"rank {self._rank}: "), first

    def first_failure(self, wait_s: float = 0.0) -> str | None:
        """First failure of the job, waiting up to ``wait_s`` seconds for one."""
        deadline = time.monotonic() + wait_s
        while True:
            if self._asked(lambda: self._store.check([_KEY]), False):
                return self._asked(lambda: str(self._store.get(_KEY).decode()), None)
            if not self._is_there:
                return None
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.05)

    def _asked[T](self, call: Callable[[], T], otherwise: T) -> T:
        """Answer of the store, or ``otherwise`` if it does not answer.

        After a failed attempt ``otherwise`` is returned at once, since the store died or stands
        still with its host.
        """
        if not self._is_there:
            return otherwise
        answer = call_with_timeout(ANSWER_S, lambda: (call(),))
        self._is_there = answer is not None
        return otherwise if answer is None else answer[0]


def default_board() -> FailureBoard:
    """Board of the default process group's job."""
    store = dist.distributed_c10d._get_default_store()
    return FailureBoard(store, dist.get_rank())
