"""Hooks into torch for tracing: patched methods, source lines of callers, and grouped faults."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_pulse.tracing.graph_analysis import TORCH

_NOT_THE_MODEL = (TORCH, str(Path(__file__).parent), contextlib.__file__)


@contextmanager
def telling(owner: type, name: str, tell: Callable[[Any], None]) -> Iterator[None]:
    """Call ``tell`` with a method's first argument before each call, within the context."""
    method = getattr(owner, name)

    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        tell(first)
        return method(first, *args, **kwargs)

    with replaced(owner, name, call):
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a class or module by ``value`` within the context."""
    inherited = name not in vars(owner)
    kept = None if inherited else vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, kept)


def caller() -> str:
    """Innermost source line on the stack outside torch and these checks."""
    frames = [
        frame
        for frame in traceback.extract_stack()
        if not frame.filename.startswith(_NOT_THE_MODEL)
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}"


def alike(faults: Iterable[str]) -> Iterator[str]:
    """Merge faults that differ only in block numbers: the first of each, with a count."""
    kinds: dict[str, set[str]] = {}
    firsts: dict[str, str] = {}
    for fault in faults:
        kind = _NUMBERED.sub("#", fault)
        kinds.setdefault(kind, set()).add(fault)
        firsts.setdefault(kind, fault)
    for kind, first in firsts.items():
        more = len(kinds[kind]) - 1
        yield f"{first} (and of {more} more like it)" if more else first


_NUMBERED = re.compile(r"\b\d+(?=\.)|(?<=\.)\d+\b")
"""Block numbers in names."""


def passes(error: Exception, faults: Iterable[str]) -> bool:
    """True if an exception passed through a line that one of ``faults`` names."""
    lines = {
        f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)
    }
    return any(line in _LINE.findall(fault) for fault in faults for line in lines)


_LINE = re.compile(r"[^ ]+:\d+\b")
