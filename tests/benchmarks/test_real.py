"""The benchmark of real layers: every way of it trains alike, and folding sends less."""

from __future__ import annotations

import pytest

from tests.benchmarks.network import unavailable
from tests.benchmarks.real import MEGATRON, compare


@pytest.mark.parametrize("ranks", [2, 4])
def test_relayed_skips_have_the_gradients_of_direct_ones(ranks: int) -> None:
    """``measure`` compares them before it measures."""
    ways = compare(ranks, 8, True, 2 * ranks, 1, None)
    assert set(ways) == {"ours, sequential, 1F1B", "ours, fold exact", MEGATRON}


@pytest.mark.skipif(bool(why := unavailable()), reason=why)
def test_a_fold_sends_less_than_megatron_relays() -> None:
    ways = compare(2, 64, True, 4, 3, 100.0)
    assert 0 < 2 * ways["ours, fold exact"]["MB"] < ways[MEGATRON]["MB"]
