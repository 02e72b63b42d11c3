"""Of which layers of a chain on one device activations are computed again, in the least time, so
that what is held fits at every moment.

A backward lets go of a layer's activations as it passes: what is made anew of an early layer is
there when those of later ones are gone. Forward and back, with P(i) held of layers 0 to i::

    layer       0     1     2     2     1     0
    held       P(0)  P(1)  P(2)  P(2)  P(1)  P(0)
    made anew                    m(2)  m(1)  m(0)

so a choice fits where P(i) and P(i) + m(i) have room, for every i. Dynamic programming over P,
layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

BINS = 512
"""Of the most room: of choices for the first layers that hold about as much the cheapest is kept.
What is held is counted to the byte."""


class Room(NamedTuple):
    """Bytes for activations while a layer runs: of it and those before it (``held``); and in its
    backward, of these and what is made anew of its own (``making``)."""

    held: float
    making: float


class Handling(NamedTuple):
    """A way to handle a layer's activations: seconds more, bytes ``held`` until the backward, those
    ``made`` anew there. ``shared`` less are held where both it and the layer before are ``again``.
    """

    seconds: float
    held: float
    made: float = 0.0
    again: bool = False
    shared: float = 0.0


def least_in_turn(layers: Sequence[Sequence[Handling]], rooms: Sequence[Room]) -> list[int] | None:
    """Which handling each layer has, by its number, so that all have room in the fewest seconds;
    None where none do."""
    size = max(room.held for room in rooms) / BINS
    if size <= 0:
        size = 1.0  # there is only room for nothing
    # Of each choice so far: seconds, bytes held, and whether the last layer is computed again.
    seconds: Any = np.zeros(1)
    held: Any = np.zeros(1)
    again: Any = np.zeros(1, bool)
    taken: list[tuple[Any, Any]] = []
    for ways, room in zip(layers, rooms, strict=True):
        parts = []
        for number, way in enumerate(ways):
            now = held + way.held - (way.shared * again if way.again else 0.0)
            fits = np.flatnonzero((now <= room.held) & (now + way.made <= room.making))
            own = np.full(len(fits), number), np.full(len(fits), way.again)
            parts.append((seconds[fits] + way.seconds, now[fits], own[1], own[0], fits))
        seconds, held, again, numbers, before = map(np.concatenate, zip(*parts, strict=True))
        if not len(seconds):
            return None
        keep = _undominated(seconds, held, again, size)
        seconds, held, again = seconds[keep], held[keep], again[keep]
        taken.append((numbers[keep], before[keep]))
    at = int(np.lexsort((held, seconds))[0])
    found = []
    for numbers, before in reversed(taken):
        found.append(int(numbers[at]))
        at = int(before[at])
    return found[::-1]


def _undominated(seconds: Any, held: Any, again: Any, size: float) -> Any:
    """Those beside which none alike holds as little for as few seconds; of a bin the cheapest."""
    kept = []
    for alike in (np.flatnonzero(again), np.flatnonzero(~again)):
        order = alike[np.lexsort((seconds[alike], held[alike]))]
        least = np.minimum.accumulate(seconds[order])
        better: Any = np.ones(len(order), bool)
        better[1:] = least[1:] < least[:-1]
        order = order[better]  # the more is held, the fewer seconds
        bins = (held[order] / size).astype(np.int64)
        kept.append(order[np.append(bins[1:] != bins[:-1], True)[: len(order)]])
    return np.concatenate(kept)
