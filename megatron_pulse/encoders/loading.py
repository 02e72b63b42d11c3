"""Weights that come from a folder as a whole, or not at all."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from megatron_pulse.faults import UserError

_NAMED = 3


@contextmanager
def silently(logs: Any) -> Iterator[None]:
    """Within, ``logs`` (transformers' or diffusers' ``utils.logging``) says errors only."""
    before = logs.get_verbosity()
    logs.set_verbosity_error()
    try:
        yield
    finally:
        logs.set_verbosity(before)


def require_all(missing: Collection[str]) -> None:
    """Raise UserError for tensors that the files lack: the libraries would draw them at random,
    other ones in every process."""
    if missing:
        named = ", ".join(sorted(missing)[:_NAMED]) + (", ..." if len(missing) > _NAMED else "")
        raise UserError(f"its weights lack {len(missing)} tensors ({named}): fetch them anew")
