"""FSDP2 whose ranks share tokens: its step by hand, the search over all degrees, its plan."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_pulse.backbone.activations import ActivationPolicies
from megatron_pulse.planner.layout.fsdp_layout import FsdpLayout, Gathering
from megatron_pulse.planner.layout.layouts import WHOLE
from megatron_pulse.planner.partition.memory import ParameterState
from megatron_pulse.planner.plan_file.equivalent_flags import equivalent_flags
from megatron_pulse.planner.plan_file.plan_file import read_plan, save_plan
from megatron_pulse.planner.tune.config import Choices
from megatron_pulse.planner.tune.context_rank import exchanges_of, of_context_rank
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.fsdp.step import (
    ShardedUnit,
    Sharding,
    Transfers,
    passes,
    step_s,
)
from megatron_pulse.planner.tune.plans.to_plan import plan_of
from megatron_pulse.planner.tune.plans.verify_figures import figure_faults, load_checked
from megatron_pulse.planner.tune.search.fsdp_outcome import fsdp_outcome
from megatron_pulse.planner.tune.tune import tune
from megatron_pulse.profile.context_costs import LayerContextCosts, RankShare
from megatron_pulse.profile.profile import Profile
from tests.planner.tune.problems import cluster, profile
from tests.planner.tune.test_context_parallel import CHAIN, LAYER, of_tokens
from tests.planner.tune.test_fsdp import soonest_of_all

ALL = RankShare(0.0, 1.0)
HALF = ParameterState(grad_reduce_in_bf16=True)
"""State whose gradients are reduced in the profile's dtype, as in the oracle."""


def test_a_step_by_hand() -> None:
    """Two pairs of ranks, each with a microbatch of 2."""
    machine = cluster(1, 4, 100.0)
    chain = of_tokens(profile(random.Random(7), 8, 2, megabytes=4.0, even=True))
    evaluator = Evaluator(chain, machine, 4)
    found = fsdp_outcome(evaluator, FsdpLayout.of_size(8, 1, group=4), 2, ActivationPolicies(), 2)
    assert (found.config.data, found.config.context, found.config.layout) == (2, 2, WHOLE)
    rows = of_context_rank(chain.only(2), machine, 2).times_at(2)
    computed_s = sum(row.whole_s for row in rows)
    unit_s = 3 * (5e-6 + 40e6 / 4 / 50e9)  # 20 million parameters in bfloat16
    # The first gather and the last reduction, in fp32, are not hidden; the others delay exchanges.
    figures = found.figures()
    delay_s = found.pipeline_s - computed_s - 3 * unit_s
    assert 0 < delay_s < found.context_s
    assert figures["context_bytes_per_sample"] == pytest.approx(8 * 2 / 2 * (8e6 + 2 * 6e5))
    whole = fsdp_outcome(
        Evaluator(chain, machine, 8), FsdpLayout.of_size(8, 1, group=4), 2, ActivationPolicies()
    )
    saved = sum(row.saved_bytes for row in chain.times_at(2))
    freed = 0.8 * saved / 2  # a fifth of the activations is on both
    assert whole.memory_bytes[0] - found.memory_bytes[0] == pytest.approx(freed, rel=0.2)
    assert "context_s" not in whole.figures()


@pytest.mark.parametrize("seed", range(4))
def test_none_of_all_degrees_is_faster(seed: int) -> None:
    rng = random.Random(seed)
    where = cluster(1, 4, rng.choice([1.2, 2.5, 16.0]), intra_gbs=rng.choice([2.0, 50.0]))
    layer = replace(LAYER, all_to_all_bytes=rng.choice([10**5, 10**9]))
    chain = of_tokens(profile(rng, 8, 2, saved_mb=rng.choice([20.0, 400.0])), layer)
    evaluator = Evaluator(chain, where, 4, state=HALF)
    adam_s = evaluator.estimator.adam_s
    steps = {
        size: soonest_of_all(
            of_context_rank(chain.only(1, 2, 4), where, size),
            where,
            4 * size,
            adam_s,
            None if size == 1 else exchanges_of(chain, where, size),
        )
        for size in (1, 2, 4)
    }
    known = {size: least_s for size, least_s in steps.items() if least_s is not None}
    found = evaluator.fsdp_baseline()
    assert (found and found.step_s) == (pytest.approx(min(known.values())) if known else None)
    for size, least_s in steps.items():
        one = evaluator.fsdp_baseline(context=(size,))
        assert (one and one.step_s) == (least_s and pytest.approx(least_s))
        assert one is None or one.context == size


def fluid_step_s(way: Sharding, gather_s: float) -> float:
    """Step of gathers alone in many small steps of time: exchanges and gathers halve the link."""
    program, tick = passes(way), 1e-4
    left = [gather_s * op.gathers for op in program]
    clock, asked = 0.0, 0
    for at, op in enumerate(program):
        asked = max(asked, at + 1 + way.prefetch)
        done, seconds, exchange = 0.0, op.seconds(way), op.exchange_s(way)
        while left[at] > 1e-12 or done < 1 - 1e-9:
            queue = next((i for i in range(min(asked, len(left))) if left[i] > 1e-12), None)
            passed = tick
            if left[at] <= 1e-12:
                beside = exchange if queue is not None else 0.0
                share = min(1 - done, tick / (seconds + beside))
                done, passed = done + share, share * (seconds + beside)
                moved = share * seconds
            else:
                moved = tick
            if queue is not None:
                left[queue] = max(0.0, left[queue] - moved)
            clock += passed
    return clock


@pytest.mark.parametrize("gather_s", [0.02, 0.1, 0.19, 0.5])
def test_exchanges_and_gathers_share_a_link(gather_s: float) -> None:
    """As in a simulation by small steps; without a link in common, neither delays the other."""
    unit = ShardedUnit(0.1, 0.2, 8, 8.0, 0.0, forward_exchange_s=0.05, backward_exchange_s=0.08)
    way = Sharding((unit,) * 6, 4, 2, 4, Gathering.PASS, True, 2)
    none = (0.0,) * 6
    transfers = Transfers((gather_s,) * 6, none, none, beside_exchanges=True)
    beside_s, apart_s = (
        step_s(way, transfers),
        step_s(way, replace(transfers, beside_exchanges=False)),
    )
    assert beside_s == pytest.approx(fluid_step_s(way, gather_s), rel=0.01)
    assert beside_s > 1.05 * apart_s
    carried_s = sum(gather_s * op.gathers + op.exchange_s(way) for op in passes(way))
    assert beside_s >= carried_s


def test_degrees_that_fsdp_may_take() -> None:
    """Degrees that devices, nodes, heads and the batch allow."""
    machine = cluster(2, 4)
    assert (
        "8 devices do not divide a global batch of 4"
        in Evaluator(replace(CHAIN, context=None), machine, 4).not_sharded()
    )
    few = Evaluator(CHAIN, machine, 4)
    assert not few.not_sharded() and few.not_sharded((1,))
    assert few.fsdp_baseline((1,), (1,)) is None
    found = few.fsdp_baseline((1,))
    assert found is not None and found.context in (2, 4) and f"K = {found.context}" in found.facts
    assert found.record()["context"] == found.context
    assert few.fsdp_baseline((1,), (8,)) is None  # beyond a node
    assert Evaluator(of_tokens(CHAIN, heads=6), machine, 4).fsdp_baseline((1,), (4,)) is None


def test_an_optimizer_without_moments_takes_less() -> None:
    machine = cluster(1, 4)
    adam, sgd = (
        Evaluator(CHAIN, machine, 4, state=replace(HALF, optimizer_bytes=each)).fsdp_baseline()
        for each in (8.0, 0.0)
    )
    assert adam is not None and sgd is not None
    trained = sum(layer.trained_parameters for layer in CHAIN.layers)
    fewer = adam.fitted.needs_bytes - sgd.fitted.needs_bytes
    assert fewer == pytest.approx(8 * trained / 4, rel=0.1)


def large() -> Profile:
    """A layer saves more than a device holds, unless ranks share it."""
    return of_tokens(
        profile(random.Random(1), 6, 0, saved_mb=20_000.0, even=True),
        LayerContextCosts(ALL, ALL, ALL, 2_000_000, 8_000_000, 1),
    )


def test_the_tuner_takes_it_within_the_choices_and_its_plan_says_so(tmp_path: Path) -> None:
    machine = cluster(1, 8, intra_gbs=300.0)
    evaluator = Evaluator(large(), machine, 8)
    found = tune(evaluator, Choices(tensor=(1,)), 3.0)
    best, baseline = found.outcomes[0], found.fsdp_baseline
    assert baseline is not None and best.config.fsdp is not None
    assert best.config.context == baseline.context > 1
    assert best.step_s == pytest.approx(baseline.step_s)
    path = tmp_path / "plan.json"
    save_plan(plan_of(best, evaluator, found), path)
    plan = load_checked(path)
    record, _, faults = read_plan(path)
    assert record is not None and not [*faults, *figure_faults(record, plan)]
    flags = equivalent_flags(plan)
    assert "--use-torch-fsdp2" in flags and f"--context-parallel-size {plan.context}" in flags
    assert plan.data * plan.context == 8
    only = tune(evaluator, Choices(tensor=(1,), context=(8,)), 2.0)
    assert {outcome.config.context for outcome in only.outcomes} == {8}
    assert only.fsdp_baseline is not None and only.fsdp_baseline.context == 8
