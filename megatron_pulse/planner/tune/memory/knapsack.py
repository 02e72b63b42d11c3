"""Of which layers activations are not all kept, so that enough bytes are spared in the least time.

A knapsack over bins of bytes: of each layer all is computed again, what is cheap, or nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from typing import Any

import numpy as np

BINS = 4096
"""Into which the bytes to be spared are divided; what a layer spares is rounded down to them."""

type Step = tuple[float, float]
"""Seconds, and bytes that they spare."""


@dataclass(frozen=True)
class Spared:
    """What computing a layer's activations again takes and spares: ``seconds`` of a microbatch,
    and ``num_bytes`` of all that are in flight; ``transient`` more bytes are in use meanwhile. On
    the host they spare ``away_bytes``, and take ``copying`` seconds of the link each way. To
    compute again only what is cheap takes ``part_s``, spares ``part_bytes`` and has
    ``part_transient`` in use."""

    layer: int
    seconds: float
    num_bytes: float
    transient: float
    away_bytes: float = 0.0
    copying: float = math.inf
    part_s: float = math.inf
    part_bytes: float = 0.0
    part_transient: float = 0.0

    @cached_property
    def ways(self) -> list[SparingWay]:
        """All, or what is cheap, where that is possible and spares anything."""
        every = (
            SparingWay(self, self.seconds, self.num_bytes, False),
            SparingWay(self, self.part_s, self.part_bytes, True),
        )
        return [way for way in every if way.num_bytes > 0 and way.seconds < math.inf]

    @property
    def spares(self) -> bool:
        """Whether any of its ways spares bytes."""
        return self.num_bytes > 0 or self.part_bytes > 0

    def with_at_most(self, transient: float) -> Spared:
        """The same without what has more in use."""
        if max(self.transient, self.part_transient) <= transient:
            return self
        return self._with[self.transient <= transient, self.part_transient <= transient]

    @cached_property
    def _with(self) -> dict[tuple[bool, bool], Spared]:
        """The same with all of it, and with what is cheap, or without them."""
        return {
            (whole, part): replace(
                self,
                seconds=self.seconds if whole else math.inf,
                part_s=self.part_s if part else math.inf,
            )
            for whole, part in product((False, True), repeat=2)
        }

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """What its ways add to each other, from nothing to the one that spares most."""
        return tuple(_corners(self.ways))


@dataclass(frozen=True)
class SparingWay:
    """How a layer spares bytes: all of it computed again, or on the host at a price, or a part."""

    layer: Spared
    seconds: float
    num_bytes: float
    is_part: bool


def least_seconds(layers: Iterable[Spared], need: float) -> float:
    """In fewer nothing spares ``need`` bytes without the host, whatever is in use meanwhile;
    infinite where all of them do not spare enough."""
    return relaxed_s(cheapest_steps(layers), need)


def relaxed_s(steps: Iterable[Step], need: float) -> float:
    """The linear relaxation: the cheapest bytes first, of the last layer a part."""
    left, seconds = need, 0.0
    for step_s, num_bytes in steps:
        if left <= num_bytes:
            return seconds + max(0.0, left) * step_s / num_bytes
        left, seconds = left - num_bytes, seconds + step_s
    return math.inf if left >= 1 else seconds


def cheapest_steps(layers: Iterable[Spared]) -> list[Step]:
    """The layers' ``steps``, the cheapest bytes first."""
    steps = [step for layer in layers for step in layer.steps]
    return sorted(steps, key=lambda step: step[0] / step[1])


def _corners(ways: Iterable[SparingWay]) -> Iterator[Step]:
    """From corner to corner of the lower convex hull of a layer's ways."""
    hull = [(0.0, 0.0)]
    for way in sorted(ways, key=lambda way: (way.num_bytes, way.seconds)):
        here = way.seconds, way.num_bytes
        if here[1] == hull[-1][1]:
            continue
        while len(hull) > 1 and _slope(hull[-2], here) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(here)
    for before, after in pairwise(hull):
        yield after[0] - before[0], after[1] - before[1]


def _slope(before: tuple[float, float], after: tuple[float, float]) -> float:
    return (after[0] - before[0]) / (after[1] - before[1])


def knapsack(layers: Sequence[Spared], need: float) -> list[SparingWay] | None:
    """At most one way of each layer, with the fewest seconds, that together spare ``need``; None
    where all do not."""
    ways = [ways for layer in layers if (ways := layer.ways)]
    if sum(max(way.num_bytes for way in own) for own in ways) < need:
        return None
    chosen = _without_surplus(_first_enough(ways, need), need)
    size = need / BINS
    bins = [[min(BINS, int(way.num_bytes / size)) for way in own] for own in ways]
    if sum(map(max, bins)) < BINS:
        return chosen
    least = np.full(BINS + 1, np.inf)  # seconds that spare so many bins or more
    least[0] = 0.0
    taken = []
    for own, counts in zip(ways, bins, strict=True):
        before: Any = least
        way_of: Any = np.zeros(BINS + 1, np.int8)
        for number, (way, count) in enumerate(zip(own, counts, strict=True), 1):
            with_it = np.concatenate((np.full(count, before[0]), before[: BINS + 1 - count]))
            way_of[with_it + way.seconds < least] = number
            least = np.minimum(least, with_it + way.seconds)
        taken.append(way_of)
    found, left = list[SparingWay](), BINS
    for i in reversed(range(len(ways))):
        if left > 0 and (number := int(taken[i][left])):
            found.append(ways[i][number - 1])
            left = max(0, left - bins[i][number - 1])
    return min(_without_surplus(found, need), chosen, key=_seconds)


def _first_enough(ways: Iterable[Sequence[SparingWay]], need: float) -> list[SparingWay]:
    """The first for their seconds that together spare ``need``; of a layer the one that spares
    more, once it comes."""
    found, spared = dict[int, SparingWay](), 0.0
    every = [way for own in ways for way in own]
    for way in sorted(every, key=lambda way: way.seconds / way.num_bytes):
        if spared >= need:
            break
        before = found.get(way.layer.layer)
        if before is None or before.num_bytes < way.num_bytes:
            spared += way.num_bytes - (0.0 if before is None else before.num_bytes)
            found[way.layer.layer] = way
    return list(found.values())


def _without_surplus(chosen: Sequence[SparingWay], need: float) -> list[SparingWay]:
    """Without those, the dearest first, that are not needed beside the others; or with less of
    them, where that is enough."""
    left, surplus = list[SparingWay](), sum(way.num_bytes for way in chosen) - need
    for way in sorted(chosen, key=lambda each: -each.seconds):
        if way.num_bytes <= surplus:
            surplus -= way.num_bytes
            continue
        less = [w for w in way.layer.ways if w.is_part and w.seconds < way.seconds]
        if less and way.num_bytes - less[0].num_bytes <= surplus:
            surplus -= way.num_bytes - less[0].num_bytes
            way = less[0]
        left.append(way)
    return left


def _seconds(ways: Sequence[SparingWay]) -> float:
    return sum(way.seconds for way in ways)
