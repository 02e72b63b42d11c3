"""Steps by other cuts, beside their simulations and their bounds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice

import numpy as np
import pytest

from megatron_pulse.planner.layout.layouts import LAYOUTS
from megatron_pulse.planner.tune.config import Choices, Recompute
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.fixed_order_estimate import FixedOrder
from megatron_pulse.planner.tune.layer_costs import UnfitError
from tests.planner.tune.problems import cluster, profile, random_evaluator


def parts_s(outcome: Outcome) -> float:
    """A step, if it is not held to its bound."""
    parts = outcome.pipeline_s + outcome.reduce_s + outcome.optimizer_s
    return parts + outcome.first_pass_s


@pytest.mark.parametrize("seed", range(8))
def test_own_cuts_take_what_was_simulated_and_others_no_less_than_their_bound(seed: int) -> None:
    plain, found = random_evaluator(seed)
    of = plain.profile, plain.cluster, plain.global_batch_size, plain.costs.sequence_parallel
    share = 0.5 * (seed % 2)
    evaluator, looked = Evaluator(*of, self_conditioning=share), 0
    evaluator.effort = plain.effort
    for config in found[:: max(1, len(found) // 16)]:
        for quick in (True, False):
            try:
                outcome = evaluator.evaluate(config, quick=quick)
            except UnfitError:
                continue
            in_order, looked = FixedOrder(evaluator, outcome), looked + 1
            assert in_order.step_s(outcome.stages) == pytest.approx(parts_s(outcome), rel=1e-12)
            moved = evaluator.partitioner.neighbour_partitions(config, outcome.stages.partition)
            for cuts in islice(moved, 12):
                stages = evaluator.cut(config, cuts)
                if evaluator.stages.fits(stages):
                    bound = evaluator.bound(config, stages)
                    assert evaluator.estimator.timed_estimate(config, stages) >= bound * (1 - 1e-9)
                    if not outcome.extrapolated and not share:
                        assert in_order.step_s(stages) >= bound * (1 - 1e-9)
    assert looked > 3


def alike(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation."""
    ranks = [np.argsort(np.argsort(each)) for each in (first, second)]
    return float(np.corrcoef(*ranks)[0, 1])


def test_moved_cuts_are_ranked_as_simulations_rank_them_better_than_by_estimates() -> None:
    found = []
    for seed in range(6):
        chain = profile(random.Random(seed), 20, 9, megabytes=4.0)
        evaluator = Evaluator(chain, cluster(4, 2, inter_gbs=20.0), 64)
        choices = Choices(pipeline=(4,), tensor=(1,), micro_batch_size=(2,), split=(False,))
        config = next(
            config
            for config in evaluator.candidates(choices)
            if config.layout == LAYOUTS["fold soft"] and config.recompute is Recompute.NEVER
        )
        outcome = evaluator.evaluate(config, quick=True)
        in_order = FixedOrder(evaluator, outcome)
        moved = islice(
            evaluator.partitioner.neighbour_partitions(config, outcome.stages.partition), 60
        )
        every = [
            stages for cuts in moved if evaluator.stages.fits(stages := evaluator.cut(config, cuts))
        ]
        took = [evaluator.evaluate(config, quick=True, stages=s).step_s for s in every]
        found.append(
            (
                alike(took, [in_order.step_s(s) for s in every]),
                alike(took, [evaluator.estimator.cut_estimate(config, s) for s in every]),
            )
        )
    played, estimated = np.mean(found, axis=0)
    assert played > 0.7 and played > estimated + 0.02, found
