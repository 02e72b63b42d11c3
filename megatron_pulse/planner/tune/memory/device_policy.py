"""Activation policy of one device: the cheapest recomputation and offload that free enough memory.

Recomputation is a knapsack over bins of bytes, with full, selective or no recomputation per layer.
Time on the host link is limited too. A Lagrange multiplier prices a second of the link; bisection
finds the price at which the cheapest choice just fits the link. Of the layers chosen at a price,
those most expensive to recompute are offloaded. Then one or two layers at a time change their
policy, as long as the total work falls.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from megatron_pulse.backbone.activations import ActivationPolicies
from megatron_pulse.planner.tune.memory.recompute_knapsack import (
    LayerSavings,
    PolicyOption,
    Step,
    cheapest_steps,
    knapsack,
    relaxed_s,
)

PRICES = 8
"""Prices of a second on the host link that are tried."""


ROUNDS = 20
"""Maximum number of improvement steps of a choice."""

LEAST = 1e-9
"""Relative reduction of the work that counts as an improvement."""


def solve_activation_policy(
    layers: Sequence[LayerSavings], need: float, beside: float = 0.0, link_s: float = 0.0
) -> ActivationPolicies | None:
    """Free ``need`` bytes on a device in the fewest seconds of work.

    At most ``link_s`` seconds per microbatch go to the host link. A recomputed layer needs its
    ``transient`` bytes as far as they exceed ``beside``, the working memory that exists in any
    case. Returns None if all ``layers`` together do not free enough.

    The largest transient allowed is enumerated. Without offload the result is exact for each of
    these limits, up to rounding down to bins: at most len(layers) of ``BINS`` of the need.
    """
    if need < 1:
        return ActivationPolicies()
    best: tuple[float, ActivationPolicies] | None = None
    entered = [
        (0.0 if link_s > 0 else relaxed_s(steps, need + most - beside), most)
        for most, steps in _up_to(tuple(layers), beside)
    ]
    for least_s, most in sorted(entered):
        if best is not None and least_s >= best[0]:
            break
        allowed = [each.with_at_most(most) for each in layers if each.frees_memory]
        enough = need + most - beside
        for found in _candidates(allowed, enough, link_s):
            if link_s > 0:
                found = _improved(allowed, found, enough, link_s)
            seconds = sum(each.seconds for each in allowed if each.layer in found.recompute)
            seconds += sum(each.selective_s for each in allowed if each.layer in found.selective)
            if best is None or seconds < best[0]:
                best = seconds, found
    return None if best is None else best[1]


@lru_cache(maxsize=64)
def _up_to(layers: tuple[LayerSavings, ...], beside: float) -> list[tuple[float, list[Step]]]:
    """Each limit on the bytes in use, with the steps of the layers within the limit
    (``relaxed_s``)."""
    spare = [each for each in layers if each.frees_memory]
    transients = {t for layer in layers for t in (layer.transient, layer.selective_transient)}
    every = sorted({max(beside, transient) for transient in (beside, *transients)})
    return [(most, cheapest_steps(each.with_at_most(most) for each in spare)) for most in every]


def _improved(
    layers: Sequence[LayerSavings], choice: ActivationPolicies, need: float, link_s: float
) -> ActivationPolicies:
    """Local search: change the policy of one or two layers as long as the work falls."""
    options = np.array([[0.0, each.seconds, 0.0, each.selective_s] for each in layers])
    link = np.array([[0.0, 0.0, each.offload_s, 0.0] for each in layers])
    freed_bytes = np.array(
        [[0.0, each.num_bytes, each.offload_bytes, each.selective_bytes] for each in layers]
    )
    chosen = choice.recompute, choice.offload, choice.selective
    now = np.array([sum(w * (each.layer in c) for w, c in enumerate(chosen, 1)) for each in layers])
    rows, num_options = np.arange(len(layers)), len(chosen) + 1
    which: Any = np.repeat(rows, num_options)
    for _ in range(ROUNDS):
        own = options[rows, now], link[rows, now], freed_bytes[rows, now]
        left_s, surplus = link_s - own[1].sum(), own[2].sum() - need
        with np.errstate(invalid="ignore"):  # what cannot be is infinite, and no gain
            work, offload_s, freed = (
                (table - mine[:, None]).ravel()
                for table, mine in zip((options, link, freed_bytes), own, strict=True)
            )
            gains = work[:, None] + work
        possible = (which[:, None] != which) & (gains < -LEAST * (1 + own[0].sum()))
        possible &= offload_s[:, None] + offload_s <= left_s
        possible &= freed[:, None] + freed >= -surplus
        if not possible.any():
            break
        for at in divmod(int(np.where(possible, gains, np.inf).argmin()), len(which)):
            now[which[at]] = at % num_options
    parts = (
        frozenset(each.layer for each, n in zip(layers, now, strict=True) if n == option)
        for option in range(1, num_options)
    )
    return ActivationPolicies(*parts)


def _candidates(
    layers: Sequence[LayerSavings], need: float, link_s: float
) -> Iterator[ActivationPolicies]:
    """All that must be computed again; then of what is sufficient at a price of the link, and those
    that first fill the link."""
    every = knapsack(layers, need)
    if every is not None:
        yield _policies(every)
    if link_s <= 0:
        return
    for kept, host in _sufficient(layers, need, link_s):
        if (more := _cheapest_recompute(host, link_s)) is not None:
            recomputed = [option.layer for option in more]
            yield _policies([*kept, *more], [each for each in host if each not in recomputed])
    fits = [each for each in layers if 0 < each.offload_s <= link_s]
    for worth in (
        lambda e: e.seconds / e.offload_s,
        lambda e: e.seconds,
        lambda e: e.offload_bytes,
    ):
        left_s, left = link_s, need
        host = []
        for each in sorted(fits, key=worth, reverse=True):
            if each.offload_s <= left_s and left > 0:
                host.append(each)
                left_s, left = left_s - each.offload_s, left - each.offload_bytes
        rest = [each for each in layers if each not in host]
        found = knapsack(rest, left) if left > 0 else []
        if host and found is not None:
            yield _policies(found, host)


def _policies(
    options: Sequence[PolicyOption], host: Sequence[LayerSavings] = ()
) -> ActivationPolicies:
    return ActivationPolicies(
        frozenset(option.layer.layer for option in options if not option.is_selective),
        frozenset(each.layer for each in host),
        frozenset(option.layer.layer for option in options if option.is_selective),
    )


def _sufficient(
    layers: Sequence[LayerSavings], need: float, link_s: float
) -> Iterator[tuple[list[PolicyOption], list[LayerSavings]]]:
    """Recomputed and offloaded layers that free ``need`` at the least cost, for each price of the
    link."""
    own = {each.layer: each for each in layers}
    ratios = [each.seconds / each.offload_s for each in layers if 0 < each.offload_s < math.inf]
    high = max((ratio for ratio in ratios if ratio < math.inf), default=0.0) * 2 + 1.0
    low, price = 0.0, high
    for _ in range(PRICES):
        found = knapsack([_priced(each, price) for each in layers], need)
        if found is None:
            return
        kept, host = list[PolicyOption](), list[LayerSavings]()
        for option in found:
            layer = own[option.layer.layer]
            if option.is_selective or option.seconds == layer.seconds:
                kept.append(replace(option, layer=layer))
            else:
                host.append(layer)
        yield kept, host
        if sum(each.offload_s for each in host) > link_s:
            low = price
        else:
            high = price
        price = (low + high) / 2


def _priced(layer: LayerSavings, price: float) -> LayerSavings:
    """Copy whose full choice is recomputation, or offload at that price where offload costs less
    per byte."""
    away_s = price * layer.offload_s if layer.offload_bytes > 0 else math.inf
    if away_s * layer.num_bytes < layer.seconds * layer.offload_bytes:
        return replace(layer, seconds=away_s, num_bytes=layer.offload_bytes)
    return layer


def _cheapest_recompute(host: Sequence[LayerSavings], link_s: float) -> list[PolicyOption] | None:
    """Recompute the cheapest of the offloaded layers until the link has time for the rest.

    Returns None if the link has too little time whatever is recomputed.
    """
    must = [each for each in host if each.offload_s > link_s]
    if any(each.seconds == math.inf for each in must):
        return None
    over = sum(each.offload_s for each in host if each.offload_s <= link_s) - link_s
    found = [PolicyOption(each, each.seconds, each.num_bytes, False) for each in must]
    if over <= 0:
        return found
    may = [each for each in host if 0 < each.offload_s <= link_s and each.seconds < math.inf]
    recomputed = knapsack(
        [replace(e, num_bytes=e.offload_s, selective_bytes=0.0) for e in may], over
    )
    own = {each.layer: each for each in may}
    if recomputed is None:
        return None
    return found + [replace(option, layer=own[option.layer.layer]) for option in recomputed]
