"""Functions compiled by numba, for the loops that run a million times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from numba import njit


def compiled[F: Callable[..., Any]](function: F) -> F:
    """``function``, compiled at its first call; on disk from then on where that can be written."""
    try:
        return cast(F, njit(cache=True)(function))
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return cast(F, njit(function))
