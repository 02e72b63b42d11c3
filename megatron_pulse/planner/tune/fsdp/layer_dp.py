"""Dynamic program: the cheapest recomputation of a chain on one device that fits at every moment.

A backward frees a layer's activations as it passes. Recomputed activations of an early layer exist
when those of later layers are gone. With P(i) bytes held for layers 0 to i, forward and back::

    layer        0     1     2     2     1     0
    held        P(0)  P(1)  P(2)  P(2)  P(1)  P(0)
    recomputed                    m(2)  m(1)  m(0)

A choice fits if there is room for P(i) and for P(i) + m(i), for every i. The state of the dynamic
program is P, layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

BINS = 512
"""Bins of the largest room. Among choices for the first layers in the same bin only the cheapest is
kept. Held bytes themselves are exact."""


class ActivationRoom(NamedTuple):
    """Bytes available for activations while a layer runs.

    ``held`` is the limit for the layer and all earlier ones. ``making`` is the limit in the layer's
    backward, where the recomputed activations of the layer count too.
    """

    held: float
    making: float


class LayerPolicy(NamedTuple):
    """Activation policy of a layer: added seconds, bytes ``held`` until the backward, bytes
    ``made`` there.

    ``shared`` bytes fewer are held if both this layer and the one before are recomputed
    (``recomputed``).
    """

    seconds: float
    held: float
    made: float = 0.0
    recomputed: bool = False
    shared: float = 0.0


def cheapest_recompute(
    layers: Sequence[Sequence[LayerPolicy]], rooms: Sequence[ActivationRoom]
) -> list[int] | None:
    """Index of each layer's policy so that all layers have room in the fewest seconds; None if none
    fits."""
    size = max(room.held for room in rooms) / BINS
    if size <= 0:
        size = 1.0  # no room: only zero bytes fit
    # States: seconds, bytes held, and whether the last layer is recomputed.
    seconds: Any = np.zeros(1)
    held: Any = np.zeros(1)
    recomputed: Any = np.zeros(1, bool)
    taken: list[tuple[Any, Any]] = []
    for policies, room in zip(layers, rooms, strict=True):
        parts = []
        for number, policy in enumerate(policies):
            now = held + policy.held - (policy.shared * recomputed if policy.recomputed else 0.0)
            fits = np.flatnonzero((now <= room.held) & (now + policy.made <= room.making))
            own = np.full(len(fits), number), np.full(len(fits), policy.recomputed)
            parts.append((seconds[fits] + policy.seconds, now[fits], own[1], own[0], fits))
        seconds, held, recomputed, numbers, before = map(np.concatenate, zip(*parts, strict=True))
        if not len(seconds):
            return None
        keep = _pareto_front(seconds, held, recomputed, size)
        seconds, held, recomputed = seconds[keep], held[keep], recomputed[keep]
        taken.append((numbers[keep], before[keep]))
    at = int(np.lexsort((held, seconds))[0])
    found = []
    for numbers, before in reversed(taken):
        found.append(int(numbers[at]))
        at = int(before[at])
    return found[::-1]


def _pareto_front(seconds: Any, held: Any, recomputed: Any, size: float) -> Any:
    """Indices of the states on the Pareto front of held bytes and seconds, the cheapest of each
    bin."""
    kept = []
    for alike in (np.flatnonzero(recomputed), np.flatnonzero(~recomputed)):
        order = alike[np.lexsort((seconds[alike], held[alike]))]
        least = np.minimum.accumulate(seconds[order])
        better: Any = np.ones(len(order), bool)
        better[1:] = least[1:] < least[:-1]
        order = order[better]  # ascending in bytes held, descending in seconds
        bins = (held[order] / size).astype(np.int64)
        kept.append(order[np.append(bins[1:] != bins[:-1], True)[: len(order)]])
    return np.concatenate(kept)
