"""The search finds what simulating every config finds, and its bounds hold."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace
from itertools import islice, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pulse.planner.layout.layouts import FOLD_EXACT, FOLD_SOFT, ROW, TWO_WAVES
from megatron_pulse.planner.tune.config import Choices, Recompute, configs
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.layer_costs import Unfit, UnfitError
from megatron_pulse.planner.tune.report.fewer_devices_advice import scale_down
from megatron_pulse.planner.tune.report.oom_advice import oom_advice
from megatron_pulse.planner.tune.search.budget import Budget
from megatron_pulse.planner.tune.search.fidelity import Steps
from megatron_pulse.planner.tune.search.grouping import by_kind, neighbours
from megatron_pulse.planner.tune.search.result import Tuning
from megatron_pulse.planner.tune.search.search import search
from megatron_pulse.planner.tune.search.warm_start import WarmStart
from tests.planner.tune.problems import cluster, profile, random_evaluator
from tests.planner.tune.search.clock import Clock


def simulate_all(evaluator: Evaluator, candidates: list) -> list[Outcome]:
    """Every config that can run, soonest first."""
    found = []
    for config in candidates:
        try:
            found.append(evaluator.evaluate(config))
        except UnfitError:
            continue
    return sorted(found, key=lambda outcome: outcome.step_s)


@pytest.mark.parametrize("seed", range(12))
def test_best_is_that_of_exhaustive_simulation(seed: int) -> None:
    evaluator, candidates = random_evaluator(seed)
    everything = simulate_all(evaluator, candidates)
    found = search(evaluator, candidates, keep=3)
    assert bool(found.outcomes) == bool(everything)
    if everything:
        assert found.outcomes[0].step_s <= everything[0].step_s * (1 + 1e-12)
        assert found.proved and found.num_left == 0
        assert found.num_simulated <= len(everything)
    assert found.num_configs == len(candidates)


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.data())
def test_bounds_hold(seed: int, data: st.DataObject) -> None:
    evaluator, candidates = random_evaluator(seed)
    config = data.draw(st.sampled_from(candidates))
    try:
        evaluator.refuse(config)
        outcome = evaluator.evaluate(config, quick=True)
    except UnfitError:
        return
    bound, quick = evaluator.bound(config), evaluator.estimator.quick_bound(config)
    # Not step_s, which the bound itself keeps from being less where it is extrapolated.
    if not outcome.extrapolated:
        simulated = outcome.pipeline_s + outcome.reduce_s + outcome.optimizer_s
        assert max(bound, quick) <= simulated * (1 + 1e-9)
    if config.recompute is not Recompute.ALWAYS:  # which only the quick bound counts
        assert quick <= bound * (1 + 1e-9)


def test_list_has_every_way_once() -> None:
    """Without a limit of memory or slow links soft folds are cut as exact ones are."""
    machine = cluster(1, 2, memory_gb=500.0, intra_gbs=500.0)
    evaluator = Evaluator(profile(random.Random(1), 12, 5, even=True), machine, 8)
    choices = Choices(tensor=(1,), micro_batch_size=(1, 2, 4))
    candidates = list(configs(2, 2, 8, True, choices))
    found = search(evaluator, candidates, keep=10)
    runs = [
        (o.stages.partition, o.problem, replace(o.config, layout=FOLD_SOFT, max_in_flight=False))
        for o in found.outcomes
    ]
    assert len(set(runs)) == len(runs) == 10
    assert found.refused[Unfit.SAME] > 0
    steps = [o.step_s for o in found.outcomes]
    assert steps == sorted(steps)


def test_all_that_fits_without_a_pipeline_is_looked_at_at_once() -> None:
    """Though the best by its estimate must compute activations again, and others need not."""
    for seed in range(4):
        of = profile(random.Random(seed), 14, 6, saved_mb=250.0), cluster(2, 4, memory_gb=20.0), 32
        alone = search(Evaluator(*of), configs(8, 4, 32, True, Choices(pipeline=(1,))), keep=3)
        everything = configs(8, 4, 32, True, Choices())
        found = search(Evaluator(*of), everything, keep=3, budget=Budget(0.5, Clock()))
        assert found.rivals["P=1"].step_s <= alone.outcomes[0].step_s * (1 + 1e-12)


def test_variants_of_the_best_are_tried() -> None:
    """No config that differs in one or two fields is faster, nor is the best with a cut moved by
    one layer."""
    for seed in range(3):
        machine = cluster(4, 2, inter_gbs=1.0)
        evaluator = Evaluator(profile(random.Random(seed), 14, 6), machine, 32)
        candidates = list(configs(8, 2, 32, True, Choices(tensor=(1,), pipeline=(2,))))
        best = search(evaluator, candidates, budget=Budget(1.5, Clock())).outcomes[0]
        cuts, tried = best.stages.partition, 0
        once = set(neighbours(best.config))
        for config in (once | {two for one in once for two in neighbours(one)}) & set(candidates):
            if config.layout == best.config.layout and config.recompute is best.config.recompute:
                stages = evaluator.cut(config, cuts)
                if evaluator.stages.fits(stages):
                    tried += 1
                    step_s = evaluator.evaluate(config, quick=True, stages=stages).step_s
                    assert step_s >= best.step_s * (1 - 1e-9)
        assert tried
        own = evaluator.evaluate(best.config, quick=True, stages=best.stages).step_s
        for moved in islice(
            evaluator.partitioner.neighbour_partitions(best.config, cuts), 2 * len(cuts.cuts)
        ):
            stages = evaluator.cut(best.config, moved)
            if evaluator.stages.fits(stages):
                step_s = evaluator.evaluate(best.config, quick=True, stages=stages).step_s
                assert step_s >= own * (1 - 1e-9)


def test_no_fold_without_skips_unless_it_is_sooner() -> None:
    """Slow links: a fold sends twice what a row of stages does."""
    chain = profile(random.Random(4), 16, 0, megabytes=8.0, even=True)
    slow = Evaluator(chain, cluster(1, 4, intra_gbs=0.8), 16)
    choices = Choices(
        pipeline=(4,),
        tensor=(1,),
        micro_batch_size=(1,),
        max_in_flight=(False,),
        recompute=(Recompute.NEVER,),
    )
    candidates = list(configs(4, 4, 16, False, choices))
    assert not any(config.layout == FOLD_SOFT for config in candidates)
    best = search(slow, candidates).outcomes[0]
    assert best.config.layout == ROW
    folds = [c for c in candidates if c.layout == FOLD_EXACT]
    assert simulate_all(slow, folds)[0].step_s > best.step_s
    # The same chain on fast links, where few microbatches make the fill count: folds fill sooner.
    fast = Evaluator(chain, cluster(1, 4, intra_gbs=500.0), 4)
    few = [c for c in configs(4, 4, 4, False, choices) if not c.split]
    outcomes = simulate_all(fast, few)
    chosen = search(fast, few).outcomes[0]
    assert chosen.step_s == pytest.approx(outcomes[0].step_s)
    assert chosen.config.layout != ROW


def test_tensor_degree_must_divide_heads() -> None:
    chain = profile(random.Random(5), 8, 3)
    evaluator = Evaluator(chain, cluster(1, 4), 8, num_heads=(6, 12)).on(cluster(1, 4))
    for config in configs(4, 4, 8, True, Choices(tensor=(4,))):
        with pytest.raises(UnfitError, match="does not divide 6 heads") as error:
            evaluator.refuse(config)
        assert error.value.reason is Unfit.SHARDS


def test_says_what_would_fit() -> None:
    chain = profile(random.Random(6), 12, 5, saved_mb=400.0, parameters=50_000_000)
    choices = Choices(recompute=(Recompute.NEVER,), tensor=(1,))
    small = Evaluator(chain, cluster(2, 2, memory_gb=3.2), 8)
    candidates = list(configs(4, 2, 8, True, choices))
    found = search(small, candidates)
    assert not found.outcomes and sum(found.refused.values()) == len(candidates)
    text = oom_advice(small, choices, candidates)
    assert "the smallest config found needs about" in text
    need = float(text.split("config found needs about ")[1].split(" GB")[0])
    enough = Evaluator(chain, cluster(2, 2, memory_gb=1.01 * need), 8)
    assert search(enough, candidates).outcomes
    less = Evaluator(chain, cluster(2, 2, memory_gb=0.97 * need), 8)
    assert not search(less, candidates).outcomes
    assert "fits" in text  # with recomputation or tensor parallelism, or on more devices


def test_refusals_add_up() -> None:
    """Every config is counted once: refused, left, or simulated with cuts of its own."""
    for seed, seconds in [(4, None), *product(range(4, 8), (0.0, 0.3))]:
        evaluator, candidates = random_evaluator(seed)
        seen: list[Tuning] = []
        budget = None if seconds is None else Budget(seconds, time.process_time)
        found = search(evaluator, candidates, 3, budget, seen.append)
        assert seen and found.num_simulated >= len(found.outcomes)
        refused = sum(found.refused.values()) + found.num_left
        assert refused <= found.num_configs == len(candidates) <= refused + found.num_simulated


def test_fewer_devices_are_said_where_they_are_faster() -> None:
    """Links so slow that a second node is in the way, and none that are."""
    rng = random.Random(3)
    costs = profile(rng, 10, 4)
    for gbs, expected in ((1e-6, True), (100.0, False)):
        evaluator = Evaluator(costs, cluster(2, 2, inter_gbs=gbs), 32)
        choices = Choices(tensor=(1,))
        best = search(evaluator, evaluator.candidates(choices), 1).outcomes[0]
        found = scale_down(evaluator, best, choices)
        assert (found is not None) is expected
        if found is not None:
            part = evaluator.on(evaluator.cluster.part(found.num_devices))
            alone = search(part, part.candidates(choices), 1).outcomes[0]
            assert found.outcome.throughput == alone.throughput > best.throughput
            assert f"predicted at {alone.throughput:.4g}" in found.beside(best.throughput)


@pytest.mark.parametrize("seed", [46, 82])
def test_a_kind_is_not_ruled_out_by_known_cuts_that_do_not_fit(seed: int) -> None:
    """Two waves, whose cuts of the least load are long and have no room, are the soonest."""
    chain = profile(random.Random(seed), 23, 11, 1.0, parameters=20_000_000, saved_mb=24.0)
    evaluator = Evaluator(chain, cluster(1, 4, memory_gb=2.4, intra_gbs=2.0), 32)
    choices = Choices(
        pipeline=(4,), tensor=(1,), micro_batch_size=(1,), recompute=(Recompute.NEVER,)
    )
    steps = Steps(evaluator, 4, Budget(math.inf), lambda _: None, math.inf)
    scouts = WarmStart(steps)
    for alike in by_kind(evaluator.candidates(choices)):
        scouts.look(scouts.estimated(alike))
    assert steps.listed.best[0].config.layout == TWO_WAVES
