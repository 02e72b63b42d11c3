"""The best are told apart by whole steps."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from megatron_pulse.planner.schedule.check.simulate import run
from megatron_pulse.planner.schedule.check.validate import faults_for
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.tune.config import Choices, Recompute
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.queueing import soonest
from megatron_pulse.planner.tune.searching import finish as finishing
from megatron_pulse.planner.tune.searching.finish import finish
from megatron_pulse.planner.tune.searching.search import search
from megatron_pulse.planner.tune.searching.tuning import Tuning, tried
from tests.planner.tune.problems import cluster, profile
from tests.planner.tune.searching.clock import Clock

BATCH = 64
ONE_WAY = Choices(tensor=(1,), micro_batch_size=(1,), recompute=(Recompute.NEVER,))


def found_for(seed: int, pipeline: int, gbs: float) -> tuple[Evaluator, Tuning]:
    """What a search finds over links of that rate, not to be seen by other tests."""
    evaluator, found = _found_for(seed, pipeline, gbs)
    return evaluator, replace(found, outcomes=list(found.outcomes))


@cache
def _found_for(seed: int, pipeline: int, gbs: float) -> tuple[Evaluator, Tuning]:
    machine = cluster(1, pipeline, intra_gbs=gbs)
    evaluator = Evaluator(profile(random.Random(seed), 14, 6), machine, BATCH)
    evaluator.effort = 2
    choices = replace(ONE_WAY, pipeline=(pipeline,))
    return evaluator, search(evaluator, evaluator.candidates(choices), keep=4)


def whole_s(evaluator: Evaluator, outcome: Outcome, effort: int = 0) -> float:
    """Seconds of the whole step with a schedule of that effort; infinite if it has no room."""
    problem = evaluator.problem(outcome.config, BATCH, outcome.stages)
    made, _ = soonest(problem, outcome.stages.edges, effort)
    found = evaluator.evaluate(outcome.config, made, stages=outcome.stages)
    return found.step_s if evaluator.has_room(found) else math.inf


def test_finalists_have_whole_schedules() -> None:
    evaluator, found = found_for(3, 2, 50.0)
    assert any(outcome.extrapolated for outcome in found.outcomes[:3])
    finish(evaluator, found, seconds=3.0, count=2)
    best = found.outcomes[0]
    assert not best.extrapolated
    assert best.synthesis.schedule.num_microbatches == 64 == best.config.num_microbatches(BATCH)
    assert faults_for(best.problem, best.synthesis.schedule) == []
    assert [o.step_s for o in found.outcomes] == sorted(o.step_s for o in found.outcomes)
    assert best.step_s >= evaluator.bound(best.config)


@pytest.mark.parametrize("seed", range(3))
def test_the_best_is_so_by_whole_steps_of_all_cuts_that_were_near(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Over links that take as long as computing, where what was simulated of them says little: no
    cuts that were near are sooner as a whole, nor are those by a search, and what is certified is
    of messages that wait for nothing."""
    evaluator, found = found_for(seed, 4, 0.8)
    near = {tried(o): o for o in (*found.near, *found.outcomes)}
    assert len(near) > len(found.outcomes)
    assert all(outcome.extrapolated for outcome in near.values())
    monkeypatch.setattr(finishing, "LEAST_S", math.inf)  # not for as long as there is time
    finish(evaluator, found, 1e9, count=1)
    best = found.outcomes[0]
    assert best.step_s <= min(whole_s(evaluator, outcome) for outcome in near.values())
    assert best.step_s <= whole_s(evaluator, best, evaluator.effort)
    for outcome in found.outcomes:
        made = outcome.synthesis
        assert not outcome.extrapolated
        assert faults_for(outcome.problem, made.schedule) == []
        length = run(outcome.problem, made.schedule).makespan
        assert made.certificate.makespan == pytest.approx(length, rel=1e-9)
        assert made.certificate.lower_bound <= length * (1 + 1e-9)


def test_layers_of_the_best_are_moved_as_long_as_that_is_sooner() -> None:
    """Beside the same without: it is sooner for some, later for none."""
    gains = []
    for seed in range(4):
        evaluator, found = found_for(seed, 4, 0.8)
        near = {tried(o): o for o in (*found.near, *found.outcomes)}
        least_s = min(whole_s(evaluator, outcome) for outcome in near.values())
        finish(evaluator, found, 1e9, count=0)
        gains.append(1 - found.outcomes[0].step_s / least_s)
    assert min(gains) >= 0
    assert sum(gain > 1e-3 for gain in gains) >= 1


@pytest.mark.parametrize("seed", range(2))
def test_no_time_still_gives_the_best_a_whole_schedule(seed: int) -> None:
    evaluator, found = found_for(seed, 4, 0.8)
    about_s = {tried(o): o.step_s for o in (*found.near, *found.outcomes)}
    finish(evaluator, found, 0.0)
    best, *others = found.outcomes
    assert about_s[tried(best)] <= min(about_s[tried(o)] for o in others)
    assert not best.extrapolated and all(outcome.extrapolated for outcome in others)


def test_where_messages_queue_a_schedule_for_slower_links_may_be_sooner() -> None:
    """Never later than the one for links as they are; and much sooner for some."""
    gains = []
    for seed in range(4):
        evaluator, found = found_for(seed, 4, 0.8)
        outcome = found.outcomes[0]
        problem = evaluator.problem(outcome.config, BATCH, outcome.stages)
        made, timeline = soonest(problem, outcome.stages.edges, 0)
        alone, plain = soonest(problem, (), 0)  # no message that could wait: links as they are
        assert faults_for(problem, made.schedule) == []
        as_it_is = evaluator.evaluate(outcome.config, alone, stages=outcome.stages)
        gains.append(1 - timeline.makespan / as_it_is.timeline.makespan)
        assert made.certificate.lower_bound <= made.certificate.makespan * (1 + 1e-9)
        assert plain.makespan <= timeline.makespan
    assert min(gains) >= 0
    assert max(gains) > 0.02


@pytest.mark.parametrize("slowness", [0.1, 1.0, 10.0])
def test_finishing_takes_its_seconds(monkeypatch: pytest.MonkeyPatch, slowness: float) -> None:
    """However long schedules take: what is best then is whole, if by the last that was begun."""
    evaluator, found = found_for(1, 4, 0.8)
    clock, took = Clock(), []

    def slow(problem: ScheduleProblem, edges: Any, effort: int, bounded: bool = True) -> Any:
        took.append(slowness * 30e-6 * problem.num_microbatches * 24 * (1 + 3 * effort))
        clock.now += took[-1]
        return soonest(problem, edges, effort, bounded)

    monkeypatch.setattr(finishing, "soonest", slow)
    monkeypatch.setattr(finishing, "LEAST_S", math.inf)
    finish(evaluator, found, 2.0, clock=clock)
    assert clock.now <= max(2.2, took[0] + 0.2)
    assert not found.outcomes[0].extrapolated
    assert len(took) > 5 or slowness > 1
