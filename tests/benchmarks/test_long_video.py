"""Context parallelism beside pipelines and FSDP2, as the benchmark compares them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from megatron_pulse.planner.tune.context_rank import sent_bytes
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.profile.context_costs import ContextCosts, LayerContextCosts, RankShare
from tests.benchmarks.long_video import row, sharded
from tests.benchmarks.long_video_run import RANKS, Emulated, Scale, node
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


def test_emulated_exchanges_have_the_predicted_bytes_and_seconds() -> None:
    """An emulated operation does not sleep for the exchanges that it makes."""
    chain = profile(random.Random(0), 6, 0, saved_mb=9_000.0, even=True)
    layer = LayerContextCosts(ALL, ALL, ALL, 2_000_000, 8_000_000, 1)
    chain = replace(chain, context=ContextCosts((8,), (layer,) * 6))
    evaluator = Evaluator(chain, node(2.5, 24.0), 8)
    found = evaluator.fsdp_baseline((1,), (2, 4))
    assert found is not None
    scale = Scale.of_step(found.step_s)
    backbone: Any = None  # of pipelines alone
    contestant = Emulated(evaluator, backbone, scale).sharded("CP + FSDP2", found)
    sharing, way = contestant.sharing, contestant.sharding
    assert sharing is not None and way is not None and sharing.size == found.context
    units = range(len(way.units))
    sent = RANKS * scale.divisor * sharing.passes(way.count, units)
    redone = found.fitted.activations.recompute
    predicted, _ = sent_bytes(chain, found.context, 1, found.fitted.activations)
    assert sent == pytest.approx(8 * predicted, rel=1e-3) and predicted > 0 and redone
    real = found.fitted.sharding.units
    exchanged_s = sum(unit.forward_exchange_s + unit.backward_exchange_s for unit in real)
    computed_s = sum(unit.forward_s + unit.backward_s for unit in real)
    slept_s = sum(unit.forward_s + unit.backward_s for unit in way.units)
    assert slept_s == pytest.approx(scale.time * (computed_s - exchanged_s))


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
