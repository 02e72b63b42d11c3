"""Neighbours of good configs, and the expected gain of schedule searches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice

import pytest

from megatron_pulse.planner.layout.layouts import LAYOUTS
from megatron_pulse.planner.tune.config import Choices, Config, Recompute
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.search.candidates import KnownCuts
from megatron_pulse.planner.tune.search.grouping import layout_key
from megatron_pulse.planner.tune.search.improvement_model import PRIOR, ImprovementModel, gap_s
from megatron_pulse.planner.tune.search.neighbourhood import CLOSE, MOVED, Neighbourhood
from megatron_pulse.planner.tune.stages import Stages
from tests.planner.tune.problems import cluster, profile

CHOICES = Choices(pipeline=(4,), tensor=(1,), recompute=(Recompute.NEVER,))


@cache
def evaluator() -> Evaluator:
    return Evaluator(profile(random.Random(3), 18, 7), cluster(), 32)


@cache
def configs() -> tuple[Config, ...]:
    layout = LAYOUTS["fold soft"]
    return tuple(c for c in evaluator().candidates(CHOICES) if c.layout == layout)


def outcome(which: Config) -> Outcome:
    return evaluator().evaluate(which, quick=True)


def variants(known: KnownCuts | None = None) -> Neighbourhood:
    found = Neighbourhood(evaluator(), known or KnownCuts())
    found.bounds = dict.fromkeys(configs(), 0.0)
    return found


def of(tried: Neighbourhood, good: Outcome) -> Iterator[tuple[Config, Stages]]:
    """All variants, whatever they take."""
    return (variant for variant in tried.of(good, 1e9) if variant is not None)


def test_what_searches_gain_is_known_of_a_config() -> None:
    every = map(outcome, configs())
    quick = next(o for o in every if gap_s(o) > 0.01 * o.step_s)
    improvement, gap = ImprovementModel(), gap_s(quick)
    assert improvement.of(quick, cheap=False) == pytest.approx(quick.step_s - PRIOR * gap)
    assert improvement.of(quick, cheap=True) == pytest.approx(quick.step_s - gap)
    assert improvement.quick_s(quick) is None
    improvement.simulated(quick)
    assert improvement.quick_s(quick) == quick.step_s
    for closed, hoped in ((0.1, PRIOR), (0.2, 0.2), (0.9, 0.9), (0.6, 0.9)):  # some at first
        improvement.searched(replace(quick, step_s=quick.step_s - closed * gap))
        for cheap in (False, True):
            assert improvement.of(quick, cheap) == pytest.approx(quick.step_s - hoped * gap)
    other = replace(quick, config=replace(quick.config, split=not quick.config.split))
    assert improvement.of(other, cheap=False) == pytest.approx(other.step_s - PRIOR * gap)


def test_cuts_that_were_good_for_others_come_first_and_once() -> None:
    good, known = outcome(configs()[0]), KnownCuts()
    tried = variants(known)
    first, _ = next(of(tried, good))
    assert first != good.config
    own = good.stages.partition
    moved = next(
        cuts
        for cuts in evaluator().partitioner.neighbour_partitions(good.config, own)
        if cuts != own
    )
    known.learn(layout_key(good.config), moved)
    config, stages = next(of(tried, good))
    assert (config, stages.partition) == (good.config, moved)
    rest = [(config, stages.partition) for config, stages in of(tried, good)]
    assert (good.config, moved) not in rest and len(set(rest)) == len(rest)


def test_what_took_much_longer_is_not_tried_with_other_cuts() -> None:
    good = outcome(configs()[0])
    split = replace(good.config, split=not good.config.split)
    for times, comes in ((0.99 * MOVED, True), (1.01 * MOVED, False)):
        tried = variants()
        tried.compared(good, split, times)
        tried.compared(good, split, 2 * MOVED)  # the least counts
        assert comes == any(config == split for config, _ in of(tried, good))


def test_turns_go_to_kinds_and_to_sizes_that_take_about_as_long() -> None:
    best = outcome(next(c for c in configs() if c.micro_batch_size == 1))

    def like(size: int, times: float, layout: str = "fold soft") -> Outcome:
        config = replace(best.config, micro_batch_size=size, layout=LAYOUTS[layout])
        return replace(best, config=config, step_s=times * best.step_s)

    tried, far = variants(), 1.1
    near, slow = like(2, 0.99 * CLOSE), like(4, 1.01 * CLOSE)
    others = like(1, 1.05, "sequential"), like(2, 1.06, "sequential"), like(1, 1.2, "interleaved")
    for one in (best, near, slow, *others):
        tried.add(one)
    assert tried.turns(best, far) == [best, near, others[0]]
    tried.took(best, 1.0)
    assert tried.turns(best, far) == [near, others[0], best]
    tried.took(near, 0.6)  # the best has twice the time
    assert tried.turns(best, far) == [others[0], best, near]
    assert tried.spent_s == pytest.approx(1.6)


def test_where_nothing_fits_any_more_whoever_asks_is_told_so_again_and_again() -> None:
    """Cuts are moved without an end there, and a search would never look at the clock."""
    good = outcome(configs()[0])
    full = Evaluator(evaluator().profile, cluster(memory_gb=1.0), 32)
    tried = Neighbourhood(full, KnownCuts())
    tried.bounds = dict.fromkeys(configs(), 0.0)
    tried.widen(2.0)
    assert list(islice(tried.of(good, 1e9), 5)) == [None] * 5
