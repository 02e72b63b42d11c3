"""Neighbourhood of a partition, and two local searches over it: descent and best-first."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from heapq import heappop, heappush
from itertools import combinations, pairwise

FARTHEST = 4
"""Largest number of layers by which one cut moves.

The limit bridges a block of a UNet, some of whose layers take no time.
"""

type Move = tuple[tuple[int, int], ...]
"""Pairs (cut, number of layers by which it moves)."""


def neighbours(cuts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Neighbours of ``cuts``, the most similar first. Each stage keeps a layer.

    First one cut moves by up to ``FARTHEST`` layers, alone or with its mirror, which keeps skips of
    a fold collocated. Then all cuts, two cuts, or two cuts and their mirrors move by one layer.
    """
    last = len(cuts) - 1
    inner = range(1, last)

    def mirrored(k: int, step: int) -> Move:
        return ((k, step), (last - k, -step))

    for far in range(1, FARTHEST + 1):
        for step in (far, -far):
            yield from _moved(cuts, (((k, step),) for k in inner))
            yield from _moved(cuts, (mirrored(k, step) for k in inner if 2 * k < last))
    if len(inner) > 2:
        yield from _moved(cuts, (tuple((k, step) for k in inner) for step in (1, -1)))
    ones = [(k, step) for k in inner for step in (1, -1)]
    pairs = [(a, b) for a, b in combinations(ones, 2) if b != mirrored(*a)[1]]
    yield from _moved(cuts, pairs)
    halves = [mirrored(*one) for one in ones if 2 * one[0] < last]
    yield from _moved(cuts, ((*a, *b) for a, b in combinations(halves, 2)))


def descent[T](
    start: T,
    moved: Callable[[T], Iterable[T]],
    value: Callable[[T], float],
    looks: Iterator[object],
    gain: float = 1e-9,
) -> T:
    """First-improvement descent from ``start`` over the neighbours that ``moved`` returns.

    A step must lower ``value`` by at least the share ``gain``. Each evaluation takes one of
    ``looks``. The search ends at a local optimum, at value 0, or when ``looks`` are exhausted.
    """
    best, least = start, value(start)
    while least > 0:
        for other, _ in zip(moved(best), looks, strict=False):
            if (found := value(other)) < (1 - gain) * least:
                best, least = other, found
                break
        else:
            break
    return best


def best_first[T: Hashable](
    start: T, moved: Callable[[T], Iterable[T]], value: Callable[[T], float]
) -> Iterator[T]:
    """Best-first search from ``start``: yield each element once.

    The next element is always one more neighbour of the element with the least ``value`` so far.
    """
    found = [(value(start), 0, iter(moved(start)))]
    known = {start}
    yield start
    while found:
        other = next((one for one in found[0][-1] if one not in known), None)
        if other is None:
            heappop(found)
            continue
        heappush(found, (value(other), len(known), iter(moved(other))))
        known.add(other)
        yield other


def _moved(cuts: tuple[int, ...], every: Iterable[Move]) -> Iterator[tuple[int, ...]]:
    """Apply each move; yield the results that leave every stage at least one layer."""
    for move in every:
        moved = list(cuts)
        for k, step in move:
            moved[k] += step
        if all(a < b for a, b in pairwise(moved)) and tuple(moved) != cuts:
            yield tuple(moved)
