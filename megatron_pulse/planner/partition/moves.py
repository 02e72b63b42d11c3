"""Where else a chain may be cut: one cut moved by some layers, or all, or two by one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise

FARTHEST = 4
"""Layers by which one cut is moved; blocks of a UNet have as many of which some take no time."""


def moves(cuts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """``cuts`` with one between two stages some layers further or less, the nearest first; then
    with all or two a layer further or less. Each stage keeps a layer."""
    inner = range(1, len(cuts) - 1)
    ones = [((k, step),) for far in range(1, FARTHEST + 1) for k in inner for step in (far, -far)]
    together = [tuple((k, step) for k in inner) for step in (1, -1) if len(inner) > 2]
    twos = [(*one, *other) for one, other in combinations(ones[: 2 * len(inner)], 2)]
    for steps in (*ones, *together, *twos):
        moved = list(cuts)
        for k, step in steps:
            moved[k] += step
        if all(a < b for a, b in pairwise(moved)) and tuple(moved) != cuts:
            yield tuple(moved)
