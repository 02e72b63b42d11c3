"""Shapes of buckets: chosen from the aspect ratios of pictures, and the nearest of each picture.

All comparisons of aspect ratios are exact, so that every rank finds the same shapes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

import numpy as np

from megatron_pulse.errors import UserError

Size = tuple[int, int]
"""(height, width) in pixels."""
AUTO = "auto"
STEP = 64
"""Default multiple of the sides of buckets, in pixels."""
MOST_BUCKETS = 9
"""Default number of buckets, at most."""
_WIDEST = 2
"""Largest aspect ratio of a bucket that is chosen."""
_LEAST_AREA = 0.75
"""Smallest area of a bucket that is chosen, as a share of the resolution's."""
_WORTH = 0.002
"""Mean cropped fraction that further buckets must save."""


class NearestShape:
    """Index of the shape with the nearest log aspect ratio, for pictures of any size.

    Between two shapes the narrower one is chosen. Of shapes with one aspect ratio, the largest that
    does not enlarge the picture, or else the smallest.
    """

    def __init__(self, shapes: Sequence[Size]) -> None:
        by_ratio: dict[Fraction, list[int]] = {}
        for index, (height, width) in enumerate(shapes):
            by_ratio.setdefault(Fraction(width, height), []).append(index)
        self._shapes = shapes
        self._ratios = sorted(by_ratio)
        self._alike = [
            sorted(by_ratio[ratio], key=lambda i: (shapes[i], i)) for ratio in self._ratios
        ]
        self._known: dict[Size, int] = {}

    def __call__(self, size: Size) -> int:
        if size not in self._known:
            self._known[size] = self._find(*size)
        return self._known[size]

    def _find(self, height: int, width: int) -> int:
        ratio, place = Fraction(width, height), 0
        # Beyond the geometric mean of two ratios the second is nearer.
        while place + 1 < len(self._ratios) and ratio * ratio > (
            self._ratios[place] * self._ratios[place + 1]
        ):
            place += 1
        alike = self._alike[place]
        fitting = [i for i in alike if self._shapes[i][0] <= height and self._shapes[i][1] <= width]
        return (fitting or alike[:1])[-1]


def cropped_fraction(size: Size, shape: Size) -> float:
    """Fraction of a picture that is cut off where it is scaled to cover ``shape``."""
    (height, width), (rows, columns) = size, shape
    ratio = (width * rows) / (height * columns)
    return 1 - min(ratio, 1 / ratio)


def chosen_shapes(
    sizes: Mapping[Size, int], resolution: int, step: int = STEP, most: int = MOST_BUCKETS
) -> list[Size]:
    """At most ``most`` shapes of about ``resolution`` squared pixels for pictures of ``sizes``.

    ``sizes`` counts the pictures of each (height, width). Sides are multiples of ``step``, aspect
    ratios between 1:2 and 2:1. The shapes crop least on average; fewer are chosen if more would
    save almost nothing. Each has pictures. The one with most pictures is first.
    """
    candidates = sorted(_candidates(resolution, step), key=lambda shape: shape[1] / shape[0])
    if not sizes:
        return [(resolution, resolution)]
    return used_shapes(_least_cropped(candidates, sizes, most), sizes)


def used_shapes(shapes: Sequence[Size], sizes: Mapping[Size, int]) -> list[Size]:
    """Those of ``shapes`` that are the nearest of pictures, the most frequent first."""
    nearest, count_of = NearestShape(shapes), Counter[int]()
    for size, count in sizes.items():
        count_of[nearest(size)] += count
    order = sorted(count_of, key=lambda index: (-count_of[index], shapes[index]))
    return [shapes[index] for index in order]


def _candidates(resolution: int, step: int) -> Iterator[Size]:
    """Shapes of about the resolution's area."""
    area = resolution * resolution
    for width in range(step, _WIDEST * resolution + 1, step):
        height = area // width // step * step
        if height and width * height >= _LEAST_AREA * area:
            if max(width, height) <= _WIDEST * min(width, height):
                yield height, width


def _least_cropped(candidates: Sequence[Size], sizes: Mapping[Size, int], most: int) -> list[Size]:
    """Exact choice by dynamic programming over candidates in order of aspect ratio."""
    counted = sorted((math.log(width / height), n) for (height, width), n in sizes.items())
    at, weights = np.array([a for a, _ in counted]), np.array([n for _, n in counted], np.float64)
    ratios = [math.log(width / height) for height, width in candidates]
    sums = [
        np.concatenate([[0.0], np.cumsum(values)])
        for values in (weights, weights * np.exp(at), weights * np.exp(-at))
    ]

    def kept(first: float, last: float, ratio: float) -> float:
        """Number of pictures from ``first`` to ``last`` times their fraction kept at ``ratio``."""
        ends = [first, max(min(ratio, last), first), last]
        a, b, c = (int(np.searchsorted(at, end, side="right")) for end in ends)
        below = math.exp(-ratio) * (sums[1][b] - sums[1][a])
        above = math.exp(ratio) * (sums[2][c] - sums[2][b])
        return float(below + above)

    def kept_between(one: float, other: float) -> float:
        middle = (one + other) / 2
        return kept(one, middle, one) + kept(middle, other, other)

    between = {
        (i, j): kept_between(one, ratios[j])
        for i, one in enumerate(ratios)
        for j in range(i + 1, len(ratios))
    }
    best: list[dict[int, tuple[float, tuple[int, ...]]]] = [
        {i: (kept(-math.inf, ratio, ratio), (i,)) for i, ratio in enumerate(ratios)}
    ]
    for _ in range(min(most, len(ratios)) - 1):
        best.append(
            {
                j: max(
                    ((best[-1][i][0] + between[i, j], (*best[-1][i][1], j)) for i in best[-1]
                     if i < j),
                    key=lambda found: found[0],
                )
                for j in range(len(best), len(ratios))
            }
        )  # fmt: skip
    whole = [
        max(
            (
                (total + kept(ratios[j], math.inf, ratios[j]), chosen)
                for j, (total, chosen) in each.items()
            ),
            key=lambda found: found[0],
        )
        for each in best
    ]
    enough = max(total for total, _ in whole) - _WORTH * float(weights.sum())
    return [candidates[i] for i in next(chosen for total, chosen in whole if total >= enough)]


def read_shapes(text: str) -> list[Size]:
    """(height, width) of each of ``"512x768,768x512"``, which are width x height.

    Raises UserError for another form and for repetitions.
    """
    every = [part.strip().split("x") for part in text.split(",")]
    wrong = [
        "x".join(one)
        for one in every
        if len(one) != 2 or not all(side.isdecimal() and int(side) for side in one)
    ]
    if wrong:
        named = ", ".join(map(repr, wrong))
        raise UserError(f"{named}: shapes are WIDTHxHEIGHT in pixels, such as 512x768,768x512")
    shapes = [(int(height), int(width)) for width, height in every]
    if twice := [shape for shape, count in Counter(shapes).items() if count > 1]:
        raise UserError(f"{text!r} names {shown(twice[0])} twice")
    return shapes


def shown(shape: Size) -> str:
    """Shape for people: width x height."""
    return f"{shape[1]}x{shape[0]}"
