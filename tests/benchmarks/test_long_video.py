"""Context parallelism beside pipelines and FSDP2, as the benchmark compares them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.profile.context_costs import ContextCosts, LayerContextCosts, RankShare
from tests.benchmarks.long_video import row, sharded
from tests.planner.tune.problems import cluster, profile

ALL = RankShare(0.0, 1.0)


def test_all_that_fit_are_beside_each_other() -> None:
    """Only ranks that share tokens have room for a layer's activations."""
    chain = profile(random.Random(0), 6, 0, saved_mb=20_000.0, even=True)
    layer = LayerContextCosts(ALL, ALL, ALL, 2_000_000, 8_000_000, 1)
    layers = tuple(replace(own, sharded_parameters=0) for own in chain.layers)
    chain = replace(chain, layers=layers, context=ContextCosts((8,), (layer,) * 6))
    found = row("chain", chain, cluster(1, 8), 1.0)
    assert found["no CP"] is None and found["FSDP2"] is None
    others = [found[name] for name in ("no pipeline", "CP + FSDP2")]
    assert all(others)
    assert found["x fastest other"] == found["ours"] / max(others) >= 1
    assert "K=" in found["the pick"]


def test_sharded_ranks_that_exchange_nothing_take_as_long_for_a_part_of_a_sample() -> None:
    """Eight parts of a sample of each device are the work of its samples."""
    chain = profile(random.Random(0), 6, 0, megabytes=0.0)
    times = {
        size: tuple(replace(r, forward_s=size * 1e-3, input_grad_s=size * 1e-3) for r in rows)
        for size, rows in chain.times.items()
    }
    layer = LayerContextCosts(ALL, ALL, ALL, 0)
    chain = replace(chain, times=times, context=ContextCosts((8,), (layer,) * 6))
    where = cluster(1, 8)
    where = replace(where, intra_node=replace(where.intra_node, bandwidth_gbs=1e6, latency_us=0.0))
    evaluator = Evaluator(chain, where, 8)
    whole, parts = sharded(evaluator, (1,)), sharded(evaluator, (8,))
    assert whole is not None and parts is not None
    assert whole == pytest.approx(parts, rel=0.01)
