"""How cuts of a derived chain are compared with those of the same backbone's own."""

from __future__ import annotations

import pytest

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.layout.placement import Partition, fold
from tests.benchmarks.derived import busiest, of_parts, with_times_of


def chain(*seconds: float) -> ChainCosts:
    """Backwards take twice as long."""
    zeros = (0,) * len(seconds)
    names = tuple(f"layer{i}" for i in range(len(seconds)))
    return ChainCosts(names, seconds, tuple(2 * s for s in seconds), zeros, zeros, zeros)


HOMES = [[0], [1], [1, 2], [2], [3]]
"""The middle one of the derived layers has parameters of two of the others."""


def test_layers_share_what_the_other_s_take() -> None:
    hand, derived = chain(1, 4, 3, 2), chain(5, 1, 1, 2, 7)
    shared = with_times_of(hand, derived, HOMES)
    assert shared.forward_s == pytest.approx((1, 2, 2 + 1, 2, 2))
    assert shared.backward_s == pytest.approx((2, 4, 4 + 2, 4, 4))
    ours = Partition(fold(2), (0, 1, 2, 4, 5))
    link_ms = 2 * 3 * 5e-3  # messages of no bytes, there and back
    assert busiest(shared, ours)[0] == pytest.approx(3e3 * 7, abs=link_ms)
    with pytest.raises(AssertionError, match="layer4"):
        with_times_of(chain(1, 4, 3, 2, 1), derived, HOMES)


def test_cuts_are_where_the_derived_chain_has_them() -> None:
    assert of_parts(Partition(fold(2), (0, 1, 2, 3, 4)), HOMES).cuts == (0, 1, 3, 4, 5)
