"""Job shops as arrays, for compiled functions."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from megatron_pulse.planner.schedule.search.jobshop import JobShop


class Arrays(NamedTuple):
    """A job shop of n operations.

    ``edges[first[i]:first[i + 1]]`` are the predecessors of i, with ``lags``; they include the
    previous operation of its class.
    """

    duration: Any
    device: Any
    delta: Any
    cap: Any
    first: Any
    edges: Any
    lags: Any


def arrays(shop: JobShop) -> Arrays:
    """``shop`` for compiled functions; 64-bit integers throughout."""
    columns = shop.duration, shop.device, shop.delta, shop.cap
    duration, device, delta, cap = (np.array(values, dtype=np.int64) for values in columns)
    return Arrays(duration, device, delta, cap, *shop.waits)


def mirrored(shop: Arrays) -> Arrays:
    """The same job shop with time reversed."""
    count = len(shop.duration)
    waiting: Any = np.repeat(np.arange(count), np.diff(shop.first))
    order = np.argsort(shop.edges, kind="stable")
    first: Any = np.concatenate(([0], np.cumsum(np.bincount(shop.edges, minlength=count))))
    return shop._replace(
        delta=-shop.delta, first=first, edges=waiting[order], lags=shop.lags[order]
    )
