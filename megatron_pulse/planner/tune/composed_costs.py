"""Chain costs on unlike devices, from the costs of the whole chain on each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megatron_pulse.backbone.costs import ChainCosts

_SECONDS = (
    *("forward_s", "backward_s", "weight_grad_s", "split_forward_s", "split_backward_s"),
    "recompute_s",
)
"""Columns of a chain's costs that depend on the device."""


def composed(costs: Sequence[ChainCosts]) -> ChainCosts:
    """Costs of a cut chain: the seconds of layer i are those of ``costs[i]``."""
    first = costs[0]
    if all(each is first for each in costs):
        return first
    return _with_seconds(first, lambda name: [getattr(c, name)[i] for i, c in enumerate(costs)])


def of_any(costs: Sequence[ChainCosts], choose: Callable[..., float]) -> ChainCosts:
    """Costs whose seconds are ``choose`` (max, min) of those of several devices, per layer."""
    if len(costs) == 1:
        return costs[0]
    columns = {name: [getattr(each, name) for each in costs] for name in _SECONDS}
    return _with_seconds(
        costs[0], lambda name: [choose(own) for own in zip(*columns[name], strict=True)]
    )


def _with_seconds(costs: ChainCosts, of: Callable[[str], Sequence[float]]) -> ChainCosts:
    changed: dict[str, Any] = {n: tuple(of(n)) for n in _SECONDS if getattr(costs, n)}
    return replace(costs, **changed)
