"""Job shops as arrays, for compiled functions."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

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
