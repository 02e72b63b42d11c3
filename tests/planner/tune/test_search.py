"""The search finds what simulating every config finds, and its bounds hold."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pulse.planner.cluster.link import Link
from megatron_pulse.planner.layout.layouts import FOLD_EXACT, FOLD_SOFT, LOOP, ROW
from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.partition.find import Goal, find_partition
from megatron_pulse.planner.schedule.check.validate import faults_for
from megatron_pulse.planner.tune.config import Choices, Config, Recompute, configs
from megatron_pulse.planner.tune.costs import Unfit, UnfitError
from megatron_pulse.planner.tune.estimate import even_cuts
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.searching.budget import Budget
from megatron_pulse.planner.tune.searching.explain import nothing_fits
from megatron_pulse.planner.tune.searching.fewer import fewer_devices
from megatron_pulse.planner.tune.searching.finish import finish
from megatron_pulse.planner.tune.searching.kinds import neighbours
from megatron_pulse.planner.tune.searching.search import search
from megatron_pulse.planner.tune.searching.tuning import Tuning
from megatron_pulse.planner.tune.tune import UntunableError, tune
from megatron_pulse.profile.profile import Profile
from tests.planner.tune.problems import cluster, profile, random_evaluator


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
    # Not step_s, which the bound itself keeps from being less where it is extrapolated.
    if not outcome.extrapolated:
        simulated = outcome.pipeline_s + outcome.reduce_s + outcome.optimizer_s
        assert evaluator.bound(config) <= simulated * (1 + 1e-9)
    assert evaluator.quick_bound(config) <= evaluator.bound(config) * (1 + 1e-9)


def test_list_has_every_way_once() -> None:
    """Without a limit of memory or slow links soft folds are cut as exact ones are."""
    machine = cluster(1, 2, memory_gb=500.0, intra_gbs=500.0)
    evaluator = Evaluator(profile(random.Random(1), 12, 5, even=True), machine, 8)
    choices = Choices(tensor=(1,), micro_batch_size=(1, 2, 4))
    candidates = list(configs(2, 2, 8, True, choices))
    found = search(evaluator, candidates, keep=10)
    runs = [(o.stages.partition, o.problem, replace(o.config, layout=FOLD_SOFT, ample=False))
            for o in found.outcomes]  # fmt: skip
    assert len(set(runs)) == len(runs) == 10
    assert found.refused[Unfit.SAME] > 0
    steps = [o.step_s for o in found.outcomes]
    assert steps == sorted(steps)


def test_out_of_time_says_what_is_left() -> None:
    evaluator = Evaluator(profile(random.Random(2), 14, 6), cluster(2, 4), 32)
    candidates = list(configs(8, 4, 32, True, Choices()))
    short = search(evaluator, candidates, keep=3, budget=Budget(1.0, Clock()))
    assert short.num_left > 0 and not short.proved
    assert 0 < short.bound_s < short.outcomes[0].step_s
    long = search(evaluator, candidates, keep=3, budget=Budget(1.8, Clock()))
    assert short.bound_s <= long.outcomes[0].step_s <= short.outcomes[0].step_s
    for found in (short, long):
        late = sum(counts[Unfit.LATE] for counts in found.degrees.values())
        assert late == found.num_left
        counted = sum(found.refused.values()) + found.num_left
        assert counted <= found.num_configs


def test_all_that_fits_without_a_pipeline_is_looked_at_at_once() -> None:
    """Though the best by its estimate must compute activations again, and others need not."""
    for seed in range(4):
        of = profile(random.Random(seed), 14, 6, saved_mb=250.0), cluster(2, 4, memory_gb=20.0), 32
        alone = search(Evaluator(*of), configs(8, 4, 32, True, Choices(pipeline=(1,))), keep=3)
        everything = configs(8, 4, 32, True, Choices())
        found = search(Evaluator(*of), everything, keep=3, budget=Budget(0.5, Clock()))
        assert found.rivals["P=1"].step_s <= alone.outcomes[0].step_s * (1 + 1e-12)


def test_variants_of_the_best_are_tried() -> None:
    """What differs from it in one thing or two is not sooner with its cuts, nor is it with a cut
    moved by a layer."""
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
                if evaluator.fits(stages):
                    tried += 1
                    step_s = evaluator.evaluate(config, quick=True, stages=stages).step_s
                    assert step_s >= best.step_s * (1 - 1e-9)
        assert tried
        own = evaluator.evaluate(best.config, quick=True, stages=best.stages).step_s
        for moved in islice(evaluator.moved_cuts(best.config, cuts), 2 * len(cuts.cuts)):
            stages = evaluator.cut(best.config, moved)
            if evaluator.fits(stages):
                step_s = evaluator.evaluate(best.config, quick=True, stages=stages).step_s
                assert step_s >= own * (1 - 1e-9)


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
    choices = Choices(pipeline=(2,), tensor=(1,), micro_batch_size=(1,), ample=(False,))
    found = 0
    for seed in range(12):
        evaluator = Evaluator(heavy_first(seed, 16, 4), cluster(2, 2, inter_gbs=0.3), 16)
        config = next(c for c in configs(4, 2, 16, True, choices) if c.layout == ROW)
        costs, own = evaluator.costs(config), evaluator.stages(config)
        every = {}
        for cuts in [Partition(config.placement, (0, i, 16)) for i in range(1, 16)]:
            load_s = max(evaluator._goal(config).evaluate(costs, cuts).load_s)
            step_s = evaluator.cut_estimate(config, evaluator.cut(config, cuts))
            every[cuts] = max(cuts.per_stage(costs.parameters)), load_s, step_s
        light = evaluator.light_cuts(config)
        for cuts in light:
            held, load_s, step_s = every[cuts]
            assert step_s < every[own.partition][2]
            assert not any(h <= held and s < load_s * (1 - 1e-9) for h, s, _ in every.values())
        soonest = min(every[cuts][2] for cuts in (own.partition, *light))
        assert soonest <= 1.0001 * min(step_s for _, _, step_s in every.values())
        found += len(light)
    assert found > 8


def test_cuts_do_not_avoid_messages_that_are_hidden() -> None:
    """Links that are busy for less than the devices do not keep cuts from being even: the busiest
    device has no more to do than with cuts that know no messages, which is less than with those
    that count them in."""
    choices = Choices(pipeline=(4,), tensor=(1,), micro_batch_size=(1,), ample=(False,))
    gained = 0
    for seed in range(12):
        evaluator = Evaluator(profile(random.Random(seed), 16, 0), cluster(2, 4, inter_gbs=1.0), 16)
        every = (c for c in configs(8, 4, 16, False, choices) if c.layout == ROW)
        config = next(c for c in every if not c.pipeline_inside)
        goal, costs = evaluator._goal(config), evaluator.costs(config)
        slowest = max(
            (evaluator.ranks(config).link(d, d + 1) for d in range(3)),
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
    choices = Choices(pipeline=(4,), tensor=(1,), micro_batch_size=(1,), ample=(False,))
    found = 0
    for seed in range(12):
        evaluator = Evaluator(heavy_first(seed, 20, 6), cluster(2, 4, inter_gbs=0.3), 16)
        config = next(c for c in configs(8, 4, 16, True, choices) if c.layout == FOLD_EXACT)
        for cuts in evaluator.light_cuts(config)[:1]:
            least_s = evaluator.cut_estimate(config, evaluator.cut(config, cuts))
            for moved in evaluator.moved_cuts(config, cuts):
                stages = evaluator.cut(config, moved)
                if evaluator.fits(stages):
                    assert evaluator.cut_estimate(config, stages) >= (1 - 1e-4) * least_s
                    found += 1
    assert found > 50


def test_finalists_have_whole_schedules() -> None:
    evaluator = Evaluator(profile(random.Random(3), 12, 5), cluster(), 64)
    choices = Choices(
        tensor=(1,), micro_batch_size=(1,), pipeline=(2,), recompute=(Recompute.NEVER,)
    )
    found = search(evaluator, configs(4, 4, 64, True, choices), keep=5)
    assert any(outcome.extrapolated for outcome in found.outcomes[:3])
    finish(evaluator, found, seconds=1.5)
    best = found.outcomes[0]
    assert not best.extrapolated
    assert best.synthesis.schedule.num_microbatches == 32 == best.config.num_microbatches(64)
    assert faults_for(best.problem, best.synthesis.schedule) == []
    assert [o.step_s for o in found.outcomes] == sorted(o.step_s for o in found.outcomes)
    assert best.step_s >= evaluator.bound(best.config)


def test_no_fold_without_skips_unless_it_is_sooner() -> None:
    """Slow links: a fold sends twice what a row of stages does."""
    chain = profile(random.Random(4), 16, 0, megabytes=8.0, even=True)
    slow = Evaluator(chain, cluster(1, 4, intra_gbs=0.8), 16)
    choices = Choices(
        pipeline=(4,),
        tensor=(1,),
        micro_batch_size=(1,),
        ample=(False,),
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


@pytest.mark.parametrize("seed", [25, 29])
def test_cuts_of_the_least_load_are_not_the_only_ones_tried(seed: int) -> None:
    """More even stages wait less for each other: by level cuts, and by near ones."""
    chain = profile(random.Random(seed), 16, 0, saved_mb=40.0)
    evaluator = Evaluator(chain, cluster(1, 2, intra_gbs=5.0), 8)
    evaluator.effort = 1
    config = Config(2, 1, 1, 1, LOOP, ample=True)
    own = evaluator.evaluate(config)
    assert search(evaluator, [config]).outcomes[0].step_s < 0.97 * own.step_s
    loads, largest = [], []
    near, level = evaluator.near_cuts(config), evaluator.level_cuts(config)
    for cuts in (own.stages.partition, *near, *level):
        found = Goal().evaluate(evaluator.costs(config), cuts)
        loads.append(max(found.load_s))
        largest.append(max(found.stage_s))
    assert loads[0] <= min(loads) * (1 + 1e-9) and largest[2] <= min(largest) * (1 + 1e-9)


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
    text = nothing_fits(small, choices, candidates)
    assert "the least that any config needs is about" in text
    need = float(text.split("needs is about ")[1].split(" GB")[0])
    enough = Evaluator(chain, cluster(2, 2, memory_gb=1.01 * need), 8)
    assert search(enough, candidates).outcomes
    less = Evaluator(chain, cluster(2, 2, memory_gb=0.97 * need), 8)
    assert not search(less, candidates).outcomes
    assert "fits" in text  # with recomputation or tensor parallelism, or on more devices


def test_a_search_goes_on_when_it_is_late_and_nothing_fits_so_far() -> None:
    chain = profile(random.Random(0), 14, 6)
    small = Evaluator(chain, cluster(4, 2, memory_gb=1.0), 32)
    found = search(small, small.candidates(Choices()), 3, Budget(0.08, Clock()), finish_s=0.5)
    assert found.outcomes and found.seconds > 0.08


@settings(max_examples=100)
@given(st.lists(st.floats(0.0, 5.0), min_size=1, max_size=30), st.integers(1, 30))
def test_even_cuts_leave_no_stage_empty(work: list[float], num_stages: int) -> None:
    num_stages = min(num_stages, len(work))
    cuts = even_cuts(work, num_stages)
    assert cuts[0] == 0 and cuts[-1] == len(work) and len(cuts) == num_stages + 1
    assert all(a < b for a, b in zip(cuts, cuts[1:], strict=False))


def test_refusals_add_up() -> None:
    evaluator, candidates = random_evaluator(7)
    seen: list[Tuning] = []
    found = search(evaluator, candidates, keep=3, progress=seen.append)
    listed = found.num_simulated - found.refused[Unfit.SAME]
    assert seen and listed >= len(found.outcomes)
    refused = sum(found.refused.values()) - found.refused[Unfit.SAME]
    # Every config is refused, or was simulated; the slower of the simulated may be dropped twice.
    assert refused <= found.num_configs <= refused + found.num_simulated


class Clock:
    """A clock that only work moves: a millisecond at every look, and what ``works`` says."""

    def __init__(self) -> None:
        self.now = 0.0

    def works(self, monkeypatch: pytest.MonkeyPatch, slowness: float) -> None:
        """Simulating and cutting take time by their size."""
        evaluate, cheap, own = Evaluator.evaluate, Evaluator.cheap_cuts, Evaluator.stages

        def simulated(self_: Evaluator, config: Config, *args: Any, **more: Any) -> Outcome:
            self.now += slowness * 30e-6 * self_.size(config)
            return evaluate(self_, config, *args, **more)

        def cut(self_: Evaluator, config: Config, *limits: float) -> Any:
            self.now += slowness * 1e-4 * config.placement.num_stages**2
            return cheap(self_, config, *limits)

        def cut_well(self_: Evaluator, config: Config) -> Any:
            self.now += slowness * 4e-4 * config.placement.num_stages**2
            return own(self_, config)

        monkeypatch.setattr(Evaluator, "evaluate", simulated)
        monkeypatch.setattr(Evaluator, "cheap_cuts", cut)
        monkeypatch.setattr(Evaluator, "stages", cut_well)

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now


@pytest.mark.parametrize("seed", range(3))
def test_more_work_is_not_worse(seed: int) -> None:
    """By more than a percent: what is near the best is tried from a share of the time on."""
    chain = profile(random.Random(seed), 12, 5)
    steps = []
    for seconds in (0.03, 0.1, 0.3, 1.0):
        evaluator = Evaluator(chain, cluster(memory_gb=2.0), 16)
        budget = Budget(seconds, Clock())
        found = search(evaluator, evaluator.candidates(Choices(pipeline=(2, 4))), 3, budget)
        steps.append(found.outcomes[0].step_s)
    assert all(step_s <= 1.01 * min(steps[: i + 1]) for i, step_s in enumerate(steps))
    assert steps[0] > 1.05 * steps[-1]


def test_first_simulations_are_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each degree and layout that may be the best one, the fewest stages first."""
    evaluator = Evaluator(profile(random.Random(0), 12, 5), cluster(memory_gb=2.0), 16)
    seen: list[tuple[int, str]] = []
    evaluate = Evaluator.evaluate

    def noted(self: Evaluator, config: Config, *args: Any, **more: Any) -> Outcome:
        kind = (config.pipeline * config.layout.num_chunks, config.layout.name)
        if kind not in seen[-1:]:  # one of several stages is tried with two kinds of cuts
            seen.append(kind)
        return evaluate(self, config, *args, **more)

    monkeypatch.setattr(Evaluator, "evaluate", noted)
    search(evaluator, evaluator.candidates(Choices()), 3, Budget(1.0, Clock()))
    first = next(i for i, kind in enumerate(seen) if kind in seen[:i])
    assert first >= 4
    assert [stages for stages, _ in seen[:first]] == sorted(stages for stages, _ in seen[:first])


def test_what_promises_much_may_take_much_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One simulation over eight devices takes more than a tenth of it, and its step is ten times
    sooner than that of what needs no pipeline."""
    chain, where = profile(random.Random(0), 34, 0), cluster(2, 4, memory_gb=64.0, inter_gbs=0.1)
    evaluator, clock = Evaluator(chain, where, 64), Clock()
    clock.works(monkeypatch, 30.0)
    choices = Choices(tensor=(1,), pipeline=(1, 8))
    found = search(evaluator, evaluator.candidates(choices), 3, Budget(2.0, clock), finish_s=1)
    assert found.outcomes[0].config.pipeline == 8
    assert found.seconds <= 1.1 * 2.0


@pytest.mark.parametrize(("seconds", "slowness"), [(2.0, 1.0), (4.0, 10.0), (2.0, 30.0)])
def test_deadline_is_obeyed(
    monkeypatch: pytest.MonkeyPatch, seconds: float, slowness: float
) -> None:
    """However slow the machine: nothing is begun that would take too long."""
    evaluator = Evaluator(profile(random.Random(0), 34, 15), cluster(4, 4, memory_gb=4.0), 64)
    clock = Clock()
    clock.works(monkeypatch, slowness)
    budget = Budget(seconds, clock)
    found = search(evaluator, evaluator.candidates(Choices()), 3, budget, finish_s=1)
    assert found.num_left > 0 and found.bound_s < float("inf")
    assert found.outcomes
    assert found.seconds <= 1.1 * seconds
    assert slowness > 1 or found.num_simulated > 10


def test_time_is_left_for_a_whole_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of so many microbatches that it takes longer than there is for finishing."""
    evaluator = Evaluator(profile(random.Random(0), 12, 5), cluster(memory_gb=2.0), 512)
    clock = Clock()
    clock.works(monkeypatch, 1.0)
    choices = Choices(pipeline=(4,), tensor=(1,), micro_batch_size=(1,))
    budget = Budget(1.0, clock)
    found = search(evaluator, evaluator.candidates(choices), 3, budget, finish_s=0.1)
    whole = 30e-6 * evaluator.size(found.outcomes[0].config, whole=True)
    assert whole > 0.3 and found.num_left > 0
    assert found.seconds + whole <= 1.1 * (1.0 + 0.1)


def test_no_time_at_all_is_said() -> None:
    evaluator = Evaluator(profile(random.Random(0), 12, 5), cluster(memory_gb=2.0), 16)
    with pytest.raises(UntunableError, match="no config was simulated in .* were left"):
        tune(evaluator, Choices(), search_s=1e-9, finish_s=1e-9)


def test_fewer_devices_are_said_where_they_are_faster() -> None:
    """Links so slow that a second node is in the way, and none that are."""
    rng = random.Random(3)
    costs = profile(rng, 10, 4)
    for gbs, expected in ((1e-6, True), (100.0, False)):
        evaluator = Evaluator(costs, cluster(2, 2, inter_gbs=gbs), 32)
        choices = Choices(tensor=(1,))
        best = search(evaluator, evaluator.candidates(choices), 1).outcomes[0]
        found = fewer_devices(evaluator, best, choices)
        assert (found is not None) is expected
        if found is not None:
            part = evaluator.on(evaluator.cluster.part(found.num_devices))
            alone = search(part, part.candidates(choices), 1).outcomes[0]
            assert found.outcome.throughput == alone.throughput > best.throughput
            assert f"predicted at {alone.throughput:.4g}" in found.beside(best.throughput)
