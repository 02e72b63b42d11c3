"""Which of a device's layers compute their activations again, or what is cheap of them, or have
them wait on the host, where not all can be kept: with as little work, and time on the link, as will
do.

A knapsack over bins of bytes for what to compute again: of each layer all, what is cheap, or
nothing. Time on the link to the host is short too: a second of it gets a price (Lagrange), the one
at which what is cheapest just fits; of what is then spared the dearest to compute again goes to the
host, and one or two layers are changed as long as that takes less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from megatron_pulse.planner.tune.memory.knapsack import (
    Spared,
    SparingWay,
    Step,
    cheapest_steps,
    knapsack,
    relaxed_s,
)
from megatron_pulse.planner.tune.memory.relief import Relief

PRICES = 8
"""Prices of a second on the link that are tried."""


ROUNDS = 20
"""Times that a choice is improved, at the most."""

LEAST = 1e-9
"""Share of the work that counts as less."""


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
    entered = [
        (0.0 if link_s > 0 else relaxed_s(steps, need + most - beside), most)
        for most, steps in _up_to(tuple(layers), beside)
    ]
    for least_s, most in sorted(entered):
        if best is not None and least_s >= best[0]:
            break
        allowed = [each.with_at_most(most) for each in layers if each.spares]
        enough = need + most - beside
        for found in _reliefs(allowed, enough, link_s):
            if link_s > 0:
                found = _improved(allowed, found, enough, link_s)
            seconds = sum(each.seconds for each in allowed if each.layer in found.again)
            seconds += sum(each.part_s for each in allowed if each.layer in found.selective)
            if best is None or seconds < best[0]:
                best = seconds, found
    return None if best is None else best[1]


@lru_cache(maxsize=64)
def _up_to(layers: tuple[Spared, ...], beside: float) -> list[tuple[float, list[Step]]]:
    """Each of the most bytes that may be in use, and what bounds the layers that have no more
    (``relaxed_s``)."""
    spare = [each for each in layers if each.spares]
    transients = {t for layer in layers for t in (layer.transient, layer.part_transient)}
    every = sorted({max(beside, transient) for transient in (beside, *transients)})
    return [(most, cheapest_steps(each.with_at_most(most) for each in spare)) for most in every]


def _improved(layers: Sequence[Spared], choice: Relief, need: float, link_s: float) -> Relief:
    """The choice with one or two layers' ways changed, as long as that takes less work."""
    ways = np.array([[0.0, each.seconds, 0.0, each.part_s] for each in layers])
    link = np.array([[0.0, 0.0, each.copying, 0.0] for each in layers])
    spares = np.array([[0.0, each.num_bytes, each.away_bytes, each.part_bytes] for each in layers])
    chosen = choice.again, choice.host, choice.selective
    now = np.array([sum(w * (each.layer in c) for w, c in enumerate(chosen, 1)) for each in layers])
    rows, num_ways = np.arange(len(layers)), len(chosen) + 1
    which: Any = np.repeat(rows, num_ways)
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
            now[which[at]] = at % num_ways
    parts = (
        frozenset(each.layer for each, n in zip(layers, now, strict=True) if n == way)
        for way in range(1, num_ways)
    )
    return Relief(*parts)


def _reliefs(layers: Sequence[Spared], need: float, link_s: float) -> Iterator[Relief]:
    """All that must be computed again; then of what is sufficient at a price of the link, and those
    that first fill the link."""
    every = knapsack(layers, need)
    if every is not None:
        yield _relief(every)
    if link_s <= 0:
        return
    for kept, host in _sufficient(layers, need, link_s):
        if (more := _cheapest_again(host, link_s)) is not None:
            again = [way.layer for way in more]
            yield _relief([*kept, *more], [each for each in host if each not in again])
    fits = [each for each in layers if 0 < each.copying <= link_s]
    for worth in (lambda e: e.seconds / e.copying, lambda e: e.seconds, lambda e: e.away_bytes):
        left_s, left = link_s, need
        host = []
        for each in sorted(fits, key=worth, reverse=True):
            if each.copying <= left_s and left > 0:
                host.append(each)
                left_s, left = left_s - each.copying, left - each.away_bytes
        rest = [each for each in layers if each not in host]
        found = knapsack(rest, left) if left > 0 else []
        if host and found is not None:
            yield _relief(found, host)


def _relief(ways: Sequence[SparingWay], host: Sequence[Spared] = ()) -> Relief:
    return Relief(
        frozenset(way.layer.layer for way in ways if not way.is_part),
        frozenset(each.layer for each in host),
        frozenset(way.layer.layer for way in ways if way.is_part),
    )


def _sufficient(
    layers: Sequence[Spared], need: float, link_s: float
) -> Iterator[tuple[list[SparingWay], list[Spared]]]:
    """Those to be computed again, and those on the host, that spare ``need`` for the least, at
    various prices of a second on the link."""
    own = {each.layer: each for each in layers}
    ratios = [each.seconds / each.copying for each in layers if 0 < each.copying < math.inf]
    high = max((ratio for ratio in ratios if ratio < math.inf), default=0.0) * 2 + 1.0
    low, price = 0.0, high
    for _ in range(PRICES):
        found = knapsack([_priced(each, price) for each in layers], need)
        if found is None:
            return
        kept, host = list[SparingWay](), list[Spared]()
        for way in found:
            layer = own[way.layer.layer]
            if way.is_part or way.seconds == layer.seconds:
                kept.append(replace(way, layer=layer))
            else:
                host.append(layer)
        yield kept, host
        if sum(each.copying for each in host) > link_s:
            low = price
        else:
            high = price
        price = (low + high) / 2


def _priced(layer: Spared, price: float) -> Spared:
    """To be computed again, or on the host at that price of the link, where that is cheaper for its
    bytes."""
    away_s = price * layer.copying if layer.away_bytes > 0 else math.inf
    if away_s * layer.num_bytes < layer.seconds * layer.away_bytes:
        return replace(layer, seconds=away_s, num_bytes=layer.away_bytes)
    return layer


def _cheapest_again(host: Sequence[Spared], link_s: float) -> list[SparingWay] | None:
    """Which of these are to be computed again, in the fewest seconds, if the link has so much time
    for the others; None if it has too little."""
    must = [each for each in host if each.copying > link_s]
    if any(each.seconds == math.inf for each in must):
        return None
    over = sum(each.copying for each in host if each.copying <= link_s) - link_s
    found = [SparingWay(each, each.seconds, each.num_bytes, False) for each in must]
    if over <= 0:
        return found
    may = [each for each in host if 0 < each.copying <= link_s and each.seconds < math.inf]
    again = knapsack([replace(e, num_bytes=e.copying, part_bytes=0.0) for e in may], over)
    own = {each.layer: each for each in may}
    if again is None:
        return None
    return found + [replace(way, layer=own[way.layer.layer]) for way in again]
