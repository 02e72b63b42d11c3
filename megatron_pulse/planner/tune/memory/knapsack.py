"""Which of a device's layers compute their activations again, or have them wait on the host, where
not all can be kept: with as little work, and time on the link, as will do.

A knapsack over bins of bytes for what to compute again. Time on the link to the host is short too:
a second of it gets a price (Lagrange), the one at which what is cheapest just fits; of what is then
spared the dearest to compute again goes to the host, and one or two layers are changed as long as
that takes less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

BINS = 4096
"""Into which the bytes to be spared are divided; what a layer spares is rounded down to them."""

PRICES = 8
"""Prices of a second on the link that are tried."""


ROUNDS = 20
"""Times that a choice is improved, at the most."""

LEAST = 1e-9
"""Share of the work that counts as less."""


@dataclass(frozen=True)
class Spared:
    """What computing a layer's activations again takes and spares: ``seconds`` of a microbatch,
    and ``num_bytes`` of all that are in flight; ``transient`` more bytes are in use meanwhile. On
    the host they spare ``away_bytes``, and take ``copying`` seconds of the link each way."""

    layer: int
    seconds: float
    num_bytes: float
    transient: float
    away_bytes: float = 0.0
    copying: float = math.inf


@dataclass(frozen=True)
class Relief:
    """The layers that compute ``again``, and those whose activations wait on the ``host``."""

    again: frozenset[int] = frozenset()
    host: frozenset[int] = frozenset()


def least_work(
    layers: Sequence[Spared], need: float, beside: float = 0.0, link_s: float = 0.0
) -> Relief | None:
    """How a device's ``layers`` spare ``need`` bytes in the fewest seconds of work, and no more
    than ``link_s`` on the link to the host.

    A layer that is computed again needs its ``transient`` bytes, as far as they are more than
    ``beside``, which are there in any case. None where all of them do not spare enough. For each of
    the largest transients that may be chosen up to, without the host exact but for what rounding
    down to bins loses: at most len(layers) of ``BINS`` of the need.
    """
    if need < 1:
        return Relief()
    best: tuple[float, Relief] | None = None
    for most in sorted({beside, *(max(beside, layer.transient) for layer in layers)}):
        allowed = [
            each if each.transient <= most else replace(each, seconds=math.inf)
            for each in layers
            if each.num_bytes > 0
        ]
        enough = need + most - beside
        for found in _reliefs(allowed, enough, link_s):
            if link_s > 0:
                found = _improved(allowed, found, enough, link_s)
            seconds = sum(each.seconds for each in allowed if each.layer in found.again)
            if best is None or seconds < best[0]:
                best = seconds, found
    return None if best is None else best[1]


def _improved(layers: Sequence[Spared], choice: Relief, need: float, link_s: float) -> Relief:
    """The choice with one or two layers' ways changed, as long as that takes less work."""
    ways = np.array([[0.0, each.seconds, 0.0] for each in layers])
    link = np.array([[0.0, 0.0, each.copying] for each in layers])
    spares = np.array([[0.0, each.num_bytes, each.away_bytes] for each in layers])
    now = np.array(
        [1 if each.layer in choice.again else 2 * (each.layer in choice.host) for each in layers]
    )
    rows = np.arange(len(layers))
    which: Any = np.repeat(rows, 3)
    for _ in range(ROUNDS):
        own = ways[rows, now], link[rows, now], spares[rows, now]
        left_s, surplus = link_s - own[1].sum(), own[2].sum() - need
        with np.errstate(invalid="ignore"):  # what cannot be is infinite, and no gain
            work, copying, freed = (
                (table - mine[:, None]).ravel()
                for table, mine in zip((ways, link, spares), own, strict=True)
            )
            gains = work[:, None] + work
        possible = (which[:, None] != which) & (gains < -LEAST * (1 + own[0].sum()))
        possible &= copying[:, None] + copying <= left_s
        possible &= freed[:, None] + freed >= -surplus
        if not possible.any():
            break
        for at in divmod(int(np.where(possible, gains, np.inf).argmin()), len(which)):
            now[which[at]] = at % 3
    parts = (
        frozenset(each.layer for each, n in zip(layers, now, strict=True) if n == way)
        for way in (1, 2)
    )
    return Relief(*parts)


def _reliefs(layers: Sequence[Spared], need: float, link_s: float) -> Iterator[Relief]:
    """All that must be computed again; then of what is sufficient at a price of the link, and those
    that first fill the link."""
    every = _knapsack([each for each in layers if each.seconds < math.inf], need)
    if every is not None:
        yield _relief(every, [])
    if link_s <= 0:
        return
    for again, host in _sufficient(layers, need, link_s):
        if (more := _cheapest_again(host, link_s)) is not None:
            yield _relief([*again, *more], [each for each in host if each not in more])
    fits = [each for each in layers if 0 < each.copying <= link_s]
    for worth in (lambda e: e.seconds / e.copying, lambda e: e.seconds, lambda e: e.away_bytes):
        left_s, left = link_s, need
        host = []
        for each in sorted(fits, key=worth, reverse=True):
            if each.copying <= left_s and left > 0:
                host.append(each)
                left_s, left = left_s - each.copying, left - each.away_bytes
        rest = [each for each in layers if each not in host and each.seconds < math.inf]
        kept = _knapsack(rest, left) if left > 0 else []
        if host and kept is not None:
            yield _relief(kept, host)


def _relief(again: Sequence[Spared], host: Sequence[Spared]) -> Relief:
    return Relief(*(frozenset(each.layer for each in part) for part in (again, host)))


def _sufficient(
    layers: Sequence[Spared], need: float, link_s: float
) -> Iterator[tuple[Sequence[Spared], Sequence[Spared]]]:
    """Those to be computed again, and those on the host, that spare ``need`` for the least, at
    various prices of a second on the link."""
    own = {each.layer: each for each in layers}
    ratios = [each.seconds / each.copying for each in layers if 0 < each.copying < math.inf]
    high = max((ratio for ratio in ratios if ratio < math.inf), default=0.0) * 2 + 1.0
    low, price = 0.0, high
    for _ in range(PRICES):
        priced = list(_priced(layers, price))
        found = _knapsack(priced, need)
        if found is None:
            return
        again = [own[each.layer] for each in found if each.seconds == own[each.layer].seconds]
        host = [own[each.layer] for each in found if each.seconds != own[each.layer].seconds]
        yield again, host
        if sum(each.copying for each in host) > link_s:
            low = price
        else:
            high = price
        price = (low + high) / 2


def _priced(layers: Sequence[Spared], price: float) -> Iterator[Spared]:
    """What may be computed again, or is dearer for its bytes than the link is, at its price."""
    for each in layers:
        away_s = price * each.copying if each.away_bytes > 0 else math.inf
        if away_s * each.num_bytes < each.seconds * each.away_bytes:
            yield replace(each, seconds=away_s, num_bytes=each.away_bytes)
        elif each.seconds < math.inf:
            yield each


def _cheapest_again(host: Sequence[Spared], link_s: float) -> list[Spared] | None:
    """Which of these are to be computed again, in the fewest seconds, if the link has so much time
    for the others; None if it has too little."""
    must = [each for each in host if each.copying > link_s]
    if any(each.seconds == math.inf for each in must):
        return None
    over = sum(each.copying for each in host if each.copying <= link_s) - link_s
    if over <= 0:
        return must
    may = [each for each in host if 0 < each.copying <= link_s and each.seconds < math.inf]
    again = _knapsack([replace(each, num_bytes=each.copying) for each in may], over)
    own = {each.layer: each for each in may}
    return None if again is None else [*must, *(own[each.layer] for each in again)]


def _knapsack(layers: Sequence[Spared], need: float) -> list[Spared] | None:
    """Those with the fewest seconds that together spare ``need``; None where all do not."""
    if sum(layer.num_bytes for layer in layers) < need:
        return None
    by_seconds = sorted(layers, key=lambda each: each.seconds / each.num_bytes)
    chosen = _without_surplus(_first_enough(by_seconds, need), need)
    size = need / BINS
    bins = [min(BINS, int(layer.num_bytes / size)) for layer in layers]
    if sum(bins) < BINS:
        return chosen
    least = np.full(BINS + 1, np.inf)  # seconds that spare so many bins or more
    least[0] = 0.0
    taken = []
    for layer, count in zip(layers, bins, strict=True):
        before = np.concatenate((np.full(count, least[0]), least[: BINS + 1 - count]))
        taken.append(before + layer.seconds < least)
        least = np.minimum(least, before + layer.seconds)
    found, left = [], BINS
    for i in reversed(range(len(layers))):
        if left > 0 and taken[i][left]:
            found.append(layers[i])
            left = max(0, left - bins[i])
    return min(_without_surplus(found, need), chosen, key=_seconds)


def _first_enough(layers: Sequence[Spared], need: float) -> list[Spared]:
    """The first that together spare ``need``."""
    found, spared = [], 0.0
    for layer in layers:
        if spared >= need:
            break
        found.append(layer)
        spared += layer.num_bytes
    return found


def _without_surplus(chosen: Sequence[Spared], need: float) -> list[Spared]:
    """Without those, the dearest first, that are not needed beside the others."""
    left, surplus = list(chosen), sum(layer.num_bytes for layer in chosen) - need
    for layer in sorted(chosen, key=lambda each: -each.seconds):
        if layer.num_bytes <= surplus:
            left.remove(layer)
            surplus -= layer.num_bytes
    return left


def _seconds(layers: Sequence[Spared]) -> float:
    return sum(layer.seconds for layer in layers)
