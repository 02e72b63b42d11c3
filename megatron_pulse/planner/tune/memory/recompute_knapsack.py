"""Knapsack over the layers of a device: free enough activation memory in the least time.

Each layer offers three choices: full recomputation, selective recomputation (cheap operations
only), or nothing. Bytes are counted in bins.
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
"""Bins that the bytes to free are divided into. The bytes freed by a layer are rounded down to
bins."""

type Step = tuple[float, float]
"""(seconds added, bytes freed)."""


@dataclass(frozen=True)
class LayerSavings:
    """Costs and savings of the activation policies of one layer.

    Full recomputation adds ``seconds`` per microbatch, frees ``num_bytes`` summed over the
    in-flight microbatches, and has ``transient`` further bytes in use while the layer runs. Offload
    to the host frees ``offload_bytes`` and occupies the host link for ``offload_s`` seconds in each
    direction. Selective recomputation adds ``selective_s``, frees ``selective_bytes`` and has
    ``selective_transient`` bytes in use.
    """

    layer: int
    seconds: float
    num_bytes: float
    transient: float
    offload_bytes: float = 0.0
    offload_s: float = math.inf
    selective_s: float = math.inf
    selective_bytes: float = 0.0
    selective_transient: float = 0.0

    @cached_property
    def options(self) -> list[PolicyOption]:
        """Full and selective recomputation, as far as each is possible and frees anything."""
        every = (
            PolicyOption(self, self.seconds, self.num_bytes, False),
            PolicyOption(self, self.selective_s, self.selective_bytes, True),
        )
        return [option for option in every if option.num_bytes > 0 and option.seconds < math.inf]

    @property
    def frees_memory(self) -> bool:
        """True if any policy frees bytes."""
        return self.num_bytes > 0 or self.selective_bytes > 0

    def with_at_most(self, transient: float) -> LayerSavings:
        """Copy without the policies that have more than ``transient`` bytes in use."""
        if max(self.transient, self.selective_transient) <= transient:
            return self
        return self._with[self.transient <= transient, self.selective_transient <= transient]

    @cached_property
    def _with(self) -> dict[tuple[bool, bool], LayerSavings]:
        """Copies with or without full recomputation, and with or without selective
        recomputation."""
        return {
            (whole, selective): replace(
                self,
                seconds=self.seconds if whole else math.inf,
                selective_s=self.selective_s if selective else math.inf,
            )
            for whole, selective in product((False, True), repeat=2)
        }

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Increments along the lower convex hull of the policies, from nothing to the most bytes
        freed."""
        return tuple(_corners(self.options))


@dataclass(frozen=True)
class PolicyOption:
    """One policy of a layer: full recomputation, priced offload in its place, or selective
    (``is_selective``)."""

    layer: LayerSavings
    seconds: float
    num_bytes: float
    is_selective: bool


def least_seconds(layers: Iterable[LayerSavings], need: float) -> float:
    """Lower bound on the seconds in which ``layers`` free ``need`` bytes without offload.

    Bytes in use while layers run are ignored. Infinite if all layers together do not free enough.
    """
    return relaxed_s(cheapest_steps(layers), need)


def relaxed_s(steps: Iterable[Step], need: float) -> float:
    """Seconds of the linear relaxation of the knapsack: cheapest bytes first, a fraction of the
    last step."""
    left, seconds = need, 0.0
    for step_s, num_bytes in steps:
        if left <= num_bytes:
            return seconds + max(0.0, left) * step_s / num_bytes
        left, seconds = left - num_bytes, seconds + step_s
    return math.inf if left >= 1 else seconds


def cheapest_steps(layers: Iterable[LayerSavings]) -> list[Step]:
    """Steps of all layers, sorted by seconds per byte freed."""
    steps = [step for layer in layers for step in layer.steps]
    return sorted(steps, key=lambda step: step[0] / step[1])


def _corners(options: Iterable[PolicyOption]) -> Iterator[Step]:
    """Steps between the corners of the lower convex hull of a layer's policies."""
    hull = [(0.0, 0.0)]
    for option in sorted(options, key=lambda option: (option.num_bytes, option.seconds)):
        here = option.seconds, option.num_bytes
        if here[1] == hull[-1][1]:
            continue
        while len(hull) > 1 and _slope(hull[-2], here) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(here)
    for before, after in pairwise(hull):
        yield after[0] - before[0], after[1] - before[1]


def _slope(before: tuple[float, float], after: tuple[float, float]) -> float:
    return (after[0] - before[0]) / (after[1] - before[1])


def knapsack(layers: Sequence[LayerSavings], need: float) -> list[PolicyOption] | None:
    """Choose at most one policy per layer that together free ``need`` bytes in the fewest seconds.

    Returns None if all layers together do not free enough.
    """
    options = [options for layer in layers if (options := layer.options)]
    if sum(max(option.num_bytes for option in own) for own in options) < need:
        return None
    chosen = _without_surplus(_first_enough(options, need), need)
    size = need / BINS
    bins = [[min(BINS, int(option.num_bytes / size)) for option in own] for own in options]
    if sum(map(max, bins)) < BINS:
        return chosen
    least = np.full(BINS + 1, np.inf)  # fewest seconds that free at least n bins
    least[0] = 0.0
    taken = []
    for own, counts in zip(options, bins, strict=True):
        before: Any = least
        option_of: Any = np.zeros(BINS + 1, np.int8)
        for number, (option, count) in enumerate(zip(own, counts, strict=True), 1):
            with_it = np.concatenate((np.full(count, before[0]), before[: BINS + 1 - count]))
            option_of[with_it + option.seconds < least] = number
            least = np.minimum(least, with_it + option.seconds)
        taken.append(option_of)
    found, left = list[PolicyOption](), BINS
    for i in reversed(range(len(options))):
        if left > 0 and (number := int(taken[i][left])):
            found.append(options[i][number - 1])
            left = max(0, left - bins[i][number - 1])
    return min(_without_surplus(found, need), chosen, key=_seconds)


def _first_enough(options: Iterable[Sequence[PolicyOption]], need: float) -> list[PolicyOption]:
    """Greedy solution by seconds per byte. A later, larger policy of a layer replaces an earlier
    one."""
    found, freed = dict[int, PolicyOption](), 0.0
    every = [option for own in options for option in own]
    for option in sorted(every, key=lambda option: option.seconds / option.num_bytes):
        if freed >= need:
            break
        before = found.get(option.layer.layer)
        if before is None or before.num_bytes < option.num_bytes:
            freed += option.num_bytes - (0.0 if before is None else before.num_bytes)
            found[option.layer.layer] = option
    return list(found.values())


def _without_surplus(chosen: Sequence[PolicyOption], need: float) -> list[PolicyOption]:
    """Drop policies that the others make unnecessary, the most expensive first.

    Full recomputation becomes selective where selective still frees enough.
    """
    left, surplus = list[PolicyOption](), sum(option.num_bytes for option in chosen) - need
    for option in sorted(chosen, key=lambda each: -each.seconds):
        if option.num_bytes <= surplus:
            surplus -= option.num_bytes
            continue
        less = [w for w in option.layer.options if w.is_selective and w.seconds < option.seconds]
        if less and option.num_bytes - less[0].num_bytes <= surplus:
            surplus -= option.num_bytes - less[0].num_bytes
            option = less[0]
        left.append(option)
    return left


def _seconds(options: Sequence[PolicyOption]) -> float:
    return sum(option.seconds for option in options)
