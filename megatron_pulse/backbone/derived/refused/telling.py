"""Parts of torch that tell of each call while a module is traced."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_pulse.backbone.derived.reading import TORCH

_NOT_THE_MODEL = (TORCH, str(Path(__file__).parent), contextlib.__file__)


@contextmanager
def telling(owner: type, name: str, tell: Callable[[Any], None]) -> Iterator[None]:
    """Within, a method's first argument is told before each call."""
    method = getattr(owner, name)

    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        tell(first)
        return method(first, *args, **kwargs)

    with replaced(owner, name, call):
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within, an attribute of a class or a module is ``value``."""
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
    """The innermost line that runs just now and is neither torch's nor of these checks."""
    frames = [
        frame
        for frame in traceback.extract_stack()
        if not frame.filename.startswith(_NOT_THE_MODEL)
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}"
