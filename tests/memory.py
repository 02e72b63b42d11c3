"""Memory of processes that live long, and of those that are forked from them, at less cost."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
from pathlib import Path

_LARGE = 2**21
_MADV_COLLAPSE = 25  # linux/mman.h, since Linux 6.1


def collect_seldom() -> None:
    """What there is now is no garbage and is not looked through; what comes, in larger lots than of
    700 objects: looking for circles takes a tenth of all tests."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def in_large_pages() -> None:
    """Have this process' own memory in large pages, where Linux can: a fork copies the table of
    pages, which takes a third of the time then. Nothing changes elsewhere."""
    with contextlib.suppress(OSError, AttributeError):
        advise = ctypes.CDLL(None).madvise
        for line in Path("/proc/self/maps").read_text().splitlines():
            own = re.fullmatch(r"(\w+)-(\w+) rw-p \w+ 00:00 0\s*(\[heap\])?", line)
            if own is None:
                continue
            first, end = int(own[1], 16), int(own[2], 16)
            first, end = -(-first // _LARGE) * _LARGE, end // _LARGE * _LARGE
            if end > first:
                advise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_COLLAPSE)
