"""Cuts that estimates prefer, and what simulations make of them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.layouts import FOLD_EXACT, LOOP, ROW
from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.partition.find import Goal, find_partition
from megatron_pulse.planner.tune.config import Choices, Config, configs
from megatron_pulse.planner.tune.estimate import even_cuts
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.search.search import search
from megatron_pulse.profile.profile import Profile
from tests.planner.tune.problems import cluster, profile


def heavy_first(seed: int, num_layers: int, num_skips: int) -> Profile:
    """A chain whose first layers have four times the parameters."""
    chain = profile(random.Random(seed), num_layers, num_skips)
    layers = [
        replace(layer, parameters=layer.parameters * (4 if i < num_layers // 4 else 1))
        for i, layer in enumerate(chain.layers)
    ]
    return replace(chain, layers=tuple(layers))


def test_light_cuts_end_a_step_sooner_and_are_the_best_of_their_weight() -> None:
    """Beside all cuts of two stages: none has less to do and no more to sum, and the soonest is
    nearly that of all."""
    choices = Choices(pipeline=(2,), tensor=(1,), micro_batch_size=(1,), max_in_flight=(False,))
    found = 0
    for seed in range(12):
        evaluator = Evaluator(heavy_first(seed, 16, 4), cluster(2, 2, inter_gbs=0.3), 16)
        config = next(c for c in configs(4, 2, 16, True, choices) if c.layout == ROW)
        costs, own = evaluator.costs.chain(config), evaluator.feasible.best(config)
        every = {}
        for cuts in [Partition(config.placement, (0, i, 16)) for i in range(1, 16)]:
            load_s = max(evaluator.partitioner.goal(config).evaluate(costs, cuts).load_s)
            step_s = evaluator.estimator.cut_estimate(config, evaluator.cut(config, cuts))
            every[cuts] = max(cuts.per_stage(costs.parameters)), load_s, step_s
        light = evaluator.balancer.balanced_partitions(config)
        for cuts in light:
            held, load_s, step_s = every[cuts]
            assert step_s < every[own.partition][2]
            assert not any(h <= held and s < load_s * (1 - 1e-9) for h, s, _ in every.values())
        soonest = min(every[cuts][2] for cuts in (own.partition, *light))
        assert soonest <= 1.0001 * min(step_s for _, _, step_s in every.values())
        found += len(light)
    assert found > 8


def test_cuts_do_not_avoid_messages_that_are_hidden() -> None:
    """Links that are less busy than the devices leave cuts balanced: the busiest device has no more
    load than with cuts that ignore messages."""
    choices = Choices(pipeline=(4,), tensor=(1,), micro_batch_size=(1,), max_in_flight=(False,))
    gained = 0
    for seed in range(12):
        evaluator = Evaluator(profile(random.Random(seed), 16, 0), cluster(2, 4, inter_gbs=1.0), 16)
        every = (c for c in configs(8, 4, 16, False, choices) if c.layout == ROW)
        config = next(c for c in every if not c.pp_before_dp)
        goal, costs = evaluator.partitioner.goal(config), evaluator.costs.chain(config)
        slowest = max(
            (evaluator.costs.ranks(config).link(d, d + 1) for d in range(3)),
            key=lambda link: link.time_s(1),
        )
        busy = [
            evaluator.cut(config, find_partition(costs, config.placement, each)).busy_s(False)
            for each in (goal, replace(goal, link=slowest), replace(goal, link=Link()))
        ]
        assert busy[0] <= 1.02 * min(busy)
        gained += busy[0] < 0.98 * busy[1]
    assert gained > 2


def test_no_step_is_estimated_shorter_with_a_light_cut_moved() -> None:
    choices = Choices(pipeline=(4,), tensor=(1,), micro_batch_size=(1,), max_in_flight=(False,))
    found = 0
    for seed in range(12):
        evaluator = Evaluator(heavy_first(seed, 20, 6), cluster(2, 4, inter_gbs=0.3), 16)
        config = next(c for c in configs(8, 4, 16, True, choices) if c.layout == FOLD_EXACT)
        for cuts in evaluator.balancer.balanced_partitions(config)[:1]:
            least_s = evaluator.estimator.cut_estimate(config, evaluator.cut(config, cuts))
            for moved in evaluator.partitioner.neighbour_partitions(config, cuts):
                stages = evaluator.cut(config, moved)
                if evaluator.stages.fits(stages):
                    assert evaluator.estimator.cut_estimate(config, stages) >= (1 - 1e-4) * least_s
                    found += 1
    assert found > 50


@pytest.mark.parametrize("seed", [25, 29])
def test_cuts_of_the_least_load_are_not_the_only_ones_tried(seed: int) -> None:
    """More even stages wait less for each other: by level cuts, and by near ones."""
    chain = profile(random.Random(seed), 16, 0, saved_mb=40.0)
    evaluator = Evaluator(chain, cluster(1, 2, intra_gbs=5.0), 8)
    evaluator.effort = 1
    config = Config(2, 1, 1, 1, LOOP, max_in_flight=True)
    own = evaluator.evaluate(config)
    assert search(evaluator, [config]).outcomes[0].step_s < 0.97 * own.step_s
    loads, largest = [], []
    near, level = (
        evaluator.partitioner.near_optimal_partitions(config),
        evaluator.partitioner.even_stage_partitions(config),
    )
    for cuts in (own.stages.partition, *near, *level):
        found = Goal().evaluate(evaluator.costs.chain(config), cuts)
        loads.append(max(found.load_s))
        largest.append(max(found.stage_s))
    assert loads[0] <= min(loads) * (1 + 1e-9) and largest[2] <= min(largest) * (1 + 1e-9)


@settings(max_examples=100)
@given(st.lists(st.floats(0.0, 5.0), min_size=1, max_size=30), st.integers(1, 30))
def test_even_cuts_leave_no_stage_empty(work: list[float], num_stages: int) -> None:
    num_stages = min(num_stages, len(work))
    cuts = even_cuts(work, num_stages)
    assert cuts[0] == 0 and cuts[-1] == len(work) and len(cuts) == num_stages + 1
    assert all(a < b for a, b in zip(cuts, cuts[1:], strict=False))
