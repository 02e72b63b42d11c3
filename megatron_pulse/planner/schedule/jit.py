"""Functions compiled by Numba, for loops that run a million times."""

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
    """Compile ``function`` at its first call, and cache the result on disk if possible."""
    return cast(F, _compiled(function, no_cfunc_wrapper=True))


def compiled_inner[F: Callable[..., Any]](function: F) -> F:
    """As ``compiled``, for functions that only compiled functions call.

    The wrapper for calls from Python, which takes about as long to compile as the function, is left
    out.
    """
    return cast(F, _compiled(function, no_cfunc_wrapper=True, no_cpython_wrapper=True))


def _compiled(function: Callable[..., Any], **options: bool) -> Any:
    try:
        made = njit(error_model="numpy", cache=True, **options)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache is writable
        return njit(error_model="numpy", **options)(function)
    # Numba checks only whether a function's own file changed. Functions that it calls are in other
    # files, and so are the classes of its arguments, without which the index cannot be read.
    if made is not function:  # identical if NUMBA_DISABLE_JIT is set
        made._cache._cache_file._version += f" {_sources()}"
    return made


@functools.cache
def _sources() -> str:
    """Digest of the files beside this one and below."""
    root = Path(__file__).parent
    files = sorted((str(path), path.stat()) for path in root.rglob("*.py"))
    about = [(path, found.st_mtime_ns, found.st_size) for path, found in files]
    return hashlib.sha256(repr(about).encode()).hexdigest()


@compiled_inner
def zeros(count: int) -> Any:
    """Integer zeros, compiled once: each use of NumPy's own would be compiled again."""
    values: Any = np.empty(count, np.int64)
    for i in range(count):
        values[i] = 0
    return values


@contextmanager
def compiling(longest_s: float = 60.0) -> Iterator[None]:
    """Context in which only one process of this user compiles; the next reads the cached result.

    Otherwise all ranks of a first run would compile the same functions on shared cores. A process
    goes on regardless after ``longest_s``.
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


RUN = 16
"""Length of the runs that are sorted by insertion before runs are merged."""


@compiled_inner
def stable_argsort(keys: Any, count: int) -> Any:
    """Indices below ``count`` in ascending order of their ``keys``; the sort is stable."""
    order, merged = zeros(count), zeros(count)
    for i in range(count):
        key, at = keys[i], i
        while at % RUN and keys[order[at - 1]] > key:
            order[at] = order[at - 1]
            at -= 1
        order[at] = i
    length = RUN
    while length < count:
        for begin in range(0, count, 2 * length):
            a, b = begin, min(begin + length, count)
            end_a, end_b = b, min(b + length, count)
            for at in range(begin, end_b):
                if b == end_b or (a < end_a and keys[order[a]] <= keys[order[b]]):
                    merged[at] = order[a]
                    a += 1
                else:
                    merged[at] = order[b]
                    b += 1
        order, merged = merged, order
        length *= 2
    return order
