"""Job shops as arrays, and functions compiled by numba, for the loops that run a million times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
from numba import njit

from megatron_pulse.planner.schedule.search.jobshop import JobShop


class Arrays(NamedTuple):
    """A job shop of n operations; ``edges[first[i]:first[i + 1]]`` (and ``lags``) wait for i's
    sources, the operation before it in its own class included."""

    duration: Any
    device: Any
    delta: Any
    cap: Any
    first: Any
    edges: Any
    lags: Any


def arrays(shop: JobShop) -> Arrays:
    """``shop`` for compiled functions; 64-bit integers throughout."""
    sizes = [len(edges) for edges in shop.before]
    return Arrays(
        *(
            np.array(values, dtype=np.int64)
            for values in (
                shop.duration,
                shop.device,
                shop.delta,
                shop.cap,
                np.concatenate(([0], np.cumsum(sizes))),
                [j for edges in shop.before for j, _ in edges],
                [lag for edges in shop.before for _, lag in edges],
            )
        )
    )


def compiled[F: Callable[..., Any]](function: F) -> F:
    """``function``, compiled at its first call; on disk from then on where that can be written."""
    try:
        return cast(F, njit(cache=True)(function))
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return cast(F, njit(function))
