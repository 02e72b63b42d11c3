"""Where else a chain may be cut: one cut moved by some layers, or it and its mirror, or others; and
to go on from cut to cut as long as it gets better, or to others."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from heapq import heappop, heappush
from itertools import combinations, pairwise

FARTHEST = 4
"""Layers by which one cut is moved; blocks of a UNet have as many of which some take no time."""

type Move = tuple[tuple[int, int], ...]
"""Cuts, and by how many layers each is moved"""


def moves(cuts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """``cuts`` with one between two stages some layers further or less, the nearest first, and so
    with its mirror in a fold, which keeps skips where they are; then with all, two, or two and
    their mirrors a layer further or less. Each stage keeps a layer."""
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


def descended[T](
    start: T,
    moved: Callable[[T], Iterable[T]],
    value: Callable[[T], float],
    looks: Iterator[object],
    gain: float = 1e-9,
) -> T:
    """``start`` with something ``moved``, and that again, as long as its ``value`` falls by that
    share of it, to 0 at the least: each time the first that does so. Each value takes one of
    ``looks``; when there is none any more it is left at that."""
    best, least = start, value(start)
    while least > 0:
        for other, _ in zip(moved(best), looks, strict=False):
            if (found := value(other)) < (1 - gain) * least:
                best, least = other, found
                break
        else:
            break
    return best


def farther[T: Hashable](
    start: T, moved: Callable[[T], Iterable[T]], value: Callable[[T], float]
) -> Iterator[T]:
    """``start``, and what it comes to when something is ``moved``, and again, each once: the next
    is always one more move of what has the least ``value`` so far."""
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
    """``cuts`` moved in each way that leaves every stage a layer."""
    for move in every:
        moved = list(cuts)
        for k, step in move:
            moved[k] += step
        if all(a < b for a, b in pairwise(moved)) and tuple(moved) != cuts:
            yield tuple(moved)
