"""One search over all context degrees finds the best of a search for each of them."""

from __future__ import annotations

import random
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_pulse.cli.plan.tuning.tune_input import context_degrees
from megatron_pulse.planner.layout.layouts import FOLD_EXACT, ROW, WHOLE
from megatron_pulse.planner.tune.config import Choices, Recompute
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.search.data_parallel import data_parallel
from megatron_pulse.planner.tune.tune import UntunableError, tune
from megatron_pulse.profile.context_costs import ContextCosts, LayerContextCosts, RankShare
from megatron_pulse.profile.profile import Profile
from tests.planner.tune.problems import cluster, profile
from tests.planner.tune.search.clock import Clock

SECONDS = 16.0
"""Time of a tuning by a clock that moves at looks alone: enough for every config."""


def with_context(chain: Profile, rng: random.Random) -> Profile:
    """``chain`` with random costs of ranks that share tokens, also of rings."""

    def share() -> RankShare:
        fixed = rng.choice([0.0, 0.05, 0.3])
        return RankShare(fixed, 1 - fixed)

    sent = rng.choice([10**5, 10**7, 10**9])
    layer = LayerContextCosts(
        share(), share(), share(), chain.layers[0].boundary_bytes, sent, 1, sent // 10, 1, sent // 2
    )
    skips = tuple(skip.num_bytes for skip in chain.skips)
    heads = rng.choice([(2,), (8,), (6,), (1,)])
    return replace(chain, context=ContextCosts(heads, (layer,) * len(chain.layers), skips))


def problem(seed: int) -> tuple[Evaluator, Choices]:
    """A chain on a few devices, and choices that leave little but the degrees."""
    rng = random.Random(seed)
    nodes, inside = rng.choice([(1, 2), (1, 4), (1, 6), (2, 2), (1, 3)])
    machine = cluster(
        nodes,
        inside,
        memory_gb=rng.choice([1.5, 3.0, 40.0]),
        intra_gbs=rng.choice([2.0, 20.0, 200.0]),
    )
    chain = profile(rng, 8, rng.choice([0, 3]), saved_mb=rng.choice([20.0, 200.0]))
    count = machine.num_devices * rng.choice([1, 2])
    evaluator = Evaluator(with_context(chain, rng), machine, count)
    evaluator.effort = 1
    choices = Choices(
        layouts=(WHOLE, ROW, FOLD_EXACT),
        tensor=(1,),
        micro_batch_size=(1,),
        split=(False,),
        max_in_flight=(False,),
        recompute=(rng.choice([Recompute.NEVER, Recompute.ALWAYS]),),
        distributed_optimizer=(rng.choice([False, True]),),
        fsdp=False,
    )
    return evaluator, choices


def step_s(evaluator: Evaluator, choices: Choices) -> float:
    """Seconds of the best step; infinite if nothing fits."""
    try:
        found = tune(evaluator, choices, SECONDS, solver="none", clock=Clock())
    except UntunableError:
        return float("inf")
    return found.outcomes[0].step_s


def compare(seed: int) -> int:
    """Compare one tuning with one for each degree; returns the number of degrees."""
    evaluator, choices = problem(seed)
    degrees = evaluator.costs.context_degrees()
    each = {k: step_s(evaluator, replace(choices, context=(k,))) for k in degrees}
    together = step_s(evaluator, choices)
    best = min(each.values())
    assert together == best or together == pytest.approx(best, rel=1e-9), (seed, each)
    assert together <= each[1] * (1 + 1e-9)
    return len(degrees)


def test_all_degrees_together_give_the_best_of_each() -> None:
    counts = [compare(seed) for seed in (0, 1)]
    assert max(counts) > 2 and min(counts) > 1


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_further_problems(first: int) -> None:
    for seed in range(first, first + 20):
        compare(seed)


@pytest.mark.parametrize(
    ("given", "has_profile", "degrees"),
    [(None, False, (1,)), (None, True, None), ("auto", False, None), ("4,2", True, (2, 4))],
)
def test_degrees_that_pulse_tune_tries(
    given: str | None, has_profile: bool, degrees: tuple[int, ...] | None
) -> None:
    """Costs are made where they are asked for alone; None stands for all that are known."""
    profile = Path("profile.json") if has_profile else None
    assert context_degrees(Namespace(context_parallel=given, profile=profile)) == degrees


def test_data_parallelism_has_whole_samples() -> None:
    """Also where ranks that share tokens would be faster."""
    for seed in range(8):
        evaluator, choices = problem(seed)
        for given in (None, choices):
            found = data_parallel(evaluator, given)
            assert found is None or found.config.context == 1
