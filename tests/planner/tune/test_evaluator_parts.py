"""The objects that an evaluator is composed of, each alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron_pulse.planner.layout.layouts import FOLD_EXACT, ROW
from megatron_pulse.planner.partition.volume import relayed
from megatron_pulse.planner.tune.config import Config, Recompute
from megatron_pulse.planner.tune.estimate import Estimator
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.layer_costs import LayerCosts
from megatron_pulse.planner.tune.memory.config_policy import ActivationPlanner
from megatron_pulse.planner.tune.partitions.feasible import FeasiblePartitioner
from megatron_pulse.planner.tune.partitions.gradient_balance import GradientBalancer
from megatron_pulse.planner.tune.partitions.least_load import Partitioner
from megatron_pulse.planner.tune.stages import StageBuilder
from tests.planner.tune.problems import cluster, profile

BATCH = 16
CHAIN = profile(random.Random(4), 12, 5)
CONFIG = Config(2, 2, 1, 1, FOLD_EXACT, recompute=Recompute.NEEDED)
MACHINE = cluster(1, 4, memory_gb=3.0)


def test_parts_compute_the_same_alone_as_within_an_evaluator() -> None:
    """Each is constructed from those that it uses, and from nothing else."""
    costs = LayerCosts(CHAIN, MACHINE, BATCH)
    builder = StageBuilder(costs)
    planner = ActivationPlanner(builder)
    estimator, partitioner = Estimator(planner), Partitioner(planner)
    feasible = FeasiblePartitioner(partitioner)
    balancer = GradientBalancer(feasible, estimator)
    whole = Evaluator(CHAIN, MACHINE, BATCH)
    assert costs.chain(CONFIG) == whole.costs.chain(CONFIG)
    stages = feasible.best(CONFIG)
    assert stages.activations.recomputes and builder.fits(stages)
    assert stages == whole.feasible.best(CONFIG) == whole.cut(CONFIG, stages.partition)
    assert stages.activations == planner.policies(CONFIG, stages.partition)
    assert stages == builder.build(CONFIG, stages.partition, stages.activations)
    assert estimator.bound(CONFIG, stages) == whole.bound(CONFIG)
    assert builder.problem(CONFIG, 4, stages) == whole.problem(CONFIG, 4)
    assert balancer.quick_partitions(CONFIG) == whole.balancer.quick_partitions(CONFIG)
    neighbours = partitioner.neighbour_partitions(CONFIG, stages.partition)
    assert list(neighbours) == list(
        whole.partitioner.neighbour_partitions(CONFIG, stages.partition)
    )


@pytest.mark.parametrize("tensor", [1, 2])
def test_transformed_costs_are_those_of_every_chain_on_every_cluster(tensor: int) -> None:
    """Also on the other cluster of ``Evaluator.on``."""
    config = Config(2, 1, tensor, 1, ROW)
    plain = Evaluator(CHAIN, MACHINE, BATCH)
    of = Evaluator(CHAIN, MACHINE, BATCH, transform=relayed).on(cluster(1, 4))
    assert of.costs.chain(config) == relayed(plain.costs.chain(config)) != plain.costs.chain(config)
    cuts = plain.partitioner.unconstrained_partition(config)
    assert of.cut(config, cuts).busy_s(False) >= plain.cut(config, cuts).busy_s(False)
    assert of.cut(config, cuts).costs.skips == ()


def test_local_search_for_memory_ends_once_stopped() -> None:
    """No moved cuts are examined; the stages fit either way."""
    config = replace(CONFIG, data=1, layout=ROW)
    asked = {True: 0, False: 0}
    for answer in asked:
        builder = StageBuilder(LayerCosts(CHAIN, cluster(1, 2, memory_gb=2.5), BATCH))

        def stopped(answer: bool = answer) -> bool:
            asked[answer] += 1
            return answer

        feasible = FeasiblePartitioner(Partitioner(ActivationPlanner(builder)), stopped)
        assert builder.fits(feasible.best(config))
    assert 0 < asked[True] < asked[False]
