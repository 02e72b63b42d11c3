"""The benchmark of real layers: every way of it trains alike, and folding sends less."""

from __future__ import annotations

import argparse

import pytest

from tests.benchmarks.network import unavailable
from tests.benchmarks.real import MEGATRON, compare


@pytest.mark.parametrize("ranks", [2, 4])
def test_relayed_skips_have_the_gradients_of_direct_ones(ranks: int) -> None:
    """``measure`` compares them before it measures."""
    args = argparse.Namespace(ranks=ranks, width=8, skips=True, microbatches=2 * ranks, repeats=1)
    ways = compare(args, None)["ways"]
    assert set(ways) == {"ours, sequential, 1F1B", "ours, fold exact", MEGATRON}


@pytest.mark.skipif(bool(why := unavailable()), reason=why)
def test_a_fold_sends_less_than_megatron_relays() -> None:
    args = argparse.Namespace(ranks=2, width=64, skips=True, microbatches=4, repeats=3)
    ways = compare(args, 100.0)["ways"]
    assert 0 < 2 * ways["ours, fold exact"]["sent_bytes"] < ways[MEGATRON]["sent_bytes"]
