"""``pulse show --layers`` lists costs that add up to the plan's times."""

from __future__ import annotations

import random

import pytest

from megatron_pulse.cli.plan.plan_text import LAYER_COLUMNS, layers
from megatron_pulse.planner.layout.layouts import LAYOUTS
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.planner.tune.config import Config, Recompute
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.layer_costs import UnfitError
from megatron_pulse.planner.tune.plans.to_plan import plan_of
from tests.planner.tune.problems import cluster, profile, random_evaluator
from tests.planner.tune.test_verify_figures import sharded

FORWARD, BACKWARD, SAVES, KEEPS, WAITS = range(4, 9)


def listed(plan: PlanFile) -> list[tuple[str, ...]]:
    """The rows of sums, each equal to its layers'; all are as long as the titles."""
    every = layers(plan)
    rows, sums = [row for row in every if row[0]], [row for row in every if not row[0]]
    assert {len(row) for row in (*rows, *sums)} == {len(LAYER_COLUMNS)}
    assert [row[1] for row in rows] == [name for names in plan.stages for name in names]
    for total in sums:
        own = [row for row in rows if row[3] == total[3]]
        for column in (FORWARD, BACKWARD, SAVES, KEEPS, WAITS):
            parts = sum(float(row[column]) for row in own)
            assert float(total[column]) == pytest.approx(parts, rel=2e-3, abs=1e-6)
    return sums


def adds_up(plan: PlanFile) -> None:
    """Sums of stages that have a backward are the schedule's figures."""
    problem = plan.problem
    for stage, row in enumerate(listed(plan)):
        after = 0.0 if problem.weight_grad is None else problem.weight_grad[stage]
        backward = problem.backward[stage] + after
        assert float(row[FORWARD]) == pytest.approx(1e3 * problem.forward[stage], rel=1e-3)
        assert float(row[BACKWARD]) == pytest.approx(1e3 * backward, rel=1e-3)
        assert float(row[KEEPS]) == pytest.approx(problem.activation[stage] / 1e6, rel=1e-3)
        if problem.wgrad_bytes is not None:
            assert float(row[WAITS]) == pytest.approx(problem.wgrad_bytes[stage] / 1e6, rel=1e-3)


@pytest.mark.parametrize("seed", range(8))
def test_of_random_plans(seed: int) -> None:
    of, configs = random_evaluator(seed)
    shown = 0
    for config in random.Random(seed).sample(configs, min(12, len(configs))):
        try:
            plan = plan_of(of.evaluate(config), of)
        except UnfitError:
            continue
        adds_up(plan)
        shown += 1
    assert shown


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("recompute", [Recompute.HOST, Recompute.NEEDED, Recompute.SELECTIVE])
def test_of_plans_that_do_not_keep_all(split: bool, recompute: Recompute) -> None:
    chain = profile(random.Random(5), 24, 10, parameters=1_000_000, saved_mb=150.0, dear=(0.5, 0.9))
    of = Evaluator(chain, cluster(1, 4, 1.6, host_gbs=50.0), 12)
    config = Config(4, 1, 1, 1, LAYOUTS["fold exact"], split, True, recompute)
    plan = plan_of(of.evaluate(config), of)
    assert plan.activations
    adds_up(plan)
    text = "\n".join(row[-1] for row in layers(plan))
    for chosen, words in (
        (plan.activations.selective, "selectively recomputed"),
        (plan.activations.offload, "offloaded as needed"),
        (plan.activations.recompute, "recomputed"),
    ):
        assert not chosen or words in text


def test_of_tensor_parallel_ranks() -> None:
    of = Evaluator(sharded(), cluster(1, 4, 20.0), 16, sequence_parallel=True)
    plan = plan_of(of.evaluate(Config(2, 1, 2, 2, LAYOUTS["fold exact"], split=True)), of)
    adds_up(plan)
