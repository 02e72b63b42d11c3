"""What a test must leave as it was: pytest's own process, which the next tests share."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_forks: list[int] = []
os.register_at_fork(after_in_parent=lambda: _forks.append(os.getpid()))
# Where pytest is and its clock; what scikit-learn and torch set when they are imported.
_FREE = {
    "variable PYTEST_CURRENT_TEST", f"signal {signal.SIGALRM}",
    "variable KMP_INIT_AT_FORK", "variable KMP_DUPLICATE_LIB_OK",
    "variable TORCHINDUCTOR_CACHE_DIR",
}  # fmt: skip


def _state() -> dict[str, Any]:
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    found: dict[str, Any] = {"folder": os.getcwd()}
    found |= {f"variable {name}": value for name, value in os.environ.items()}
    found |= {f"limit {name}": resource.getrlimit(getattr(resource, name)) for name in limits}
    found |= {f"signal {number}": signal.getsignal(number) for number in signal.valid_signals()}
    return {k: v for k, v in found.items() if k not in _FREE}


@contextmanager
def unchanged() -> Iterator[None]:
    """AssertionError if the block changes this process or forks it.

    A fork of a process with threads may hang, and what it dies of is this process's end: what
    must fork, be killed or be limited runs in ``run_ranks``, or as a command.
    """
    before, num_forks = _state(), len(_forks)
    yield
    after = _state()
    changed = [
        f"{what}: {before.get(what)} -> {after.get(what)}"
        for what in sorted(before.keys() | after.keys())
        if before.get(what) != after.get(what)
    ]
    assert not changed, "left changed in pytest's process: " + "; ".join(changed)
    assert len(_forks) == num_forks, "it forked pytest's process: call run_ranks (tests/ranks.py)"
