"""Functions compiled by numba, for the loops that run a million times."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
from numba import njit


def compiled[F: Callable[..., Any]](function: F) -> F:
    """``function``, compiled at its first call; on disk from then on where that can be written."""
    return cast(F, _compiled(function, no_cfunc_wrapper=True))


def part[F: Callable[..., Any]](function: F) -> F:
    """The same for what only compiled functions call: compiling its way out to Python would take
    about as long as the function."""
    return cast(F, _compiled(function, no_cfunc_wrapper=True, no_cpython_wrapper=True))


def _compiled(function: Callable[..., Any], **options: bool) -> Any:
    try:
        made = njit(error_model="numpy", cache=True, **options)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return njit(error_model="numpy", **options)(function)
    # numba asks whether a function's own file has changed. What it calls is in others, and so are
    # the classes of what it is given, without which not even the index can be read.
    if made is not function:  # as it is where NUMBA_DISABLE_JIT is set
        made._cache._cache_file._version += f" {_sources()}"
    return made


@functools.cache
def _sources() -> str:
    """Another for other files beside this one and below."""
    root = Path(__file__).parent
    files = sorted((str(path), path.stat()) for path in root.rglob("*.py"))
    about = [(path, found.st_mtime_ns, found.st_size) for path, found in files]
    return hashlib.sha256(repr(about).encode()).hexdigest()


@part
def zeros(count: int) -> Any:
    """As many whole numbers, compiled once: each use of numpy's own would compile it again."""
    values: Any = np.empty(count, np.int64)
    for i in range(count):
        values[i] = 0
    return values


@contextmanager
def compiling(longest_s: float = 60.0) -> Iterator[None]:
    """One process of this user at a time: the next then reads what the first has compiled.

    The ranks of a first run would otherwise all compile the same on the cores that they share.
    Who has waited for ``longest_s`` goes on regardless.
    """
    path = Path(tempfile.gettempdir()) / f"megatron_pulse-compiling-{os.getuid()}"
    try:
        file = path.open("a")
    except OSError:
        yield
        return
    with file:
        until = time.monotonic() + longest_s
        while time.monotonic() < until:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
        yield
