"""One place where a failing rank says what happened, so that all others can repeat it.

The board lives in the job's key-value store. The first failure wins: what follows on other ranks
is its consequence.
"""

from __future__ import annotations

import time

import torch.distributed as dist

_KEY = "megatron_pulse/first_failure"


class PulseError(RuntimeError):
    """A run failed; the message names rank, operation and peer."""


class FailureBoard:
    """The job's first failure, shared through ``store`` (a torch.distributed Store)."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store = store
        self._rank = rank

    def report(self, text: str) -> str:
        """Record ``text`` unless another rank was first; returns the first failure."""
        try:
            return str(self._store.compare_set(_KEY, "", f"rank {self._rank}: {text}").decode())
        except (RuntimeError, dist.DistStoreError):
            return f"rank {self._rank}: {text}"  # the store died with the rank that hosted it

    def is_first(self, text: str) -> tuple[bool, str]:
        """Whether this rank failed first, after reporting ``text``; and the first failure."""
        first = self.report(text)
        return first.startswith(f"rank {self._rank}: "), first

    def first_failure(self, wait_s: float = 0.0) -> str | None:
        """The first failure of the job, waiting up to ``wait_s`` seconds for one."""
        deadline = time.monotonic() + wait_s
        while True:
            try:
                if self._store.check([_KEY]):
                    return str(self._store.get(_KEY).decode())
            except (RuntimeError, dist.DistStoreError):
                return None
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.05)


def default_board() -> FailureBoard:
    """The board of the default process group's job."""
    store = dist.distributed_c10d._get_default_store()
    return FailureBoard(store, dist.get_rank())
