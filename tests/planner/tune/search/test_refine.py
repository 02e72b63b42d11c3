"""The best are told apart by whole steps."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from megatron_pulse.planner.layout.layouts import FOLD_EXACT, ROW
from megatron_pulse.planner.schedule.check.simulate import simulate
from megatron_pulse.planner.schedule.check.validate import faults_for
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.tune.config import Choices, Recompute
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.link_contention import schedules
from megatron_pulse.planner.tune.search import refine as finishing
from megatron_pulse.planner.tune.search.budget import Budget
from megatron_pulse.planner.tune.search.refine import finish
from megatron_pulse.planner.tune.search.result import Tuning, execution_key, tried
from megatron_pulse.planner.tune.search.search import search
from tests.planner.tune.problems import cluster, profile
from tests.planner.tune.search.clock import Clock

BATCH = 64
ONE_WAY = Choices(tensor=(1,), micro_batch_size=(1,), recompute=(Recompute.NEVER,))


def found_for(seed: int, pipeline: int, gbs: float) -> tuple[Evaluator, Tuning]:
    """Copy of a search result over links of that rate."""
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
    for made, _ in schedules(problem, outcome.stages.edges, effort):
        found = evaluator.evaluate(outcome.config, made, stages=outcome.stages)
        if evaluator.has_room(found):
            return found.step_s
    return math.inf


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
    """Links take as long as compute, so that simulated parts predict little. Neither nearby cuts
    nor searched ones are faster, and the certificate ignores contention."""
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
        length = simulate(outcome.problem, made.schedule).makespan
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


def test_layers_of_what_is_near_are_moved_by_turns() -> None:
    """The best's config has as much time as others together; what is far is left out."""
    evaluator, found = found_for(1, 4, 0.8)
    rounds = finishing._Rounds(evaluator, found, Budget(1e9))
    rounds.go(0, 1.0)
    best, *others, far = rounds.ranked()
    rounds.listed[tried(far)] = replace(far, step_s=2 * best.step_s)
    found_s, turns = replace(best, step_s=1.01 * best.step_s), []
    for cuts in evaluator.partitioner.neighbour_partitions(best.config, best.stages.partition):
        stages = replace(best.stages, partition=cuts)
        rounds.listed[best.config, cuts] = replace(found_s, stages=stages)
        if len(rounds.listed) == 12:
            break
    while (good := rounds.unmoved()) is not None:
        rounds._moved.add(tried(good))
        rounds._moving_s[good.config] += 1.0
        turns.append(good.config)
    other = others[0].config
    assert turns[:4] == [best.config, other, best.config, other]
    assert len(turns) == len(rounds.listed) - 1


def test_schedules_are_searched_for_once_and_before_layers_are_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Moved ones too, but only of what was sooner at once than the best was."""
    evaluator, found = found_for(2, 4, 0.8)
    near = {tried(o) for o in (*found.near, *found.outcomes)}
    made: list[tuple[bool, bool]] = []
    searched: list[Any] = []

    def recorded(rounds: Any, outcome: Outcome, effort: int) -> None:
        made.append((tried(outcome) in near, effort > 0))
        searched.extend([tried(outcome)] * (effort > 0))
        schedule(rounds, outcome, effort)

    schedule = finishing._Rounds.schedule
    monkeypatch.setattr(finishing._Rounds, "schedule", recorded)
    finish(evaluator, found, 1e9, count=0)
    first_moved = made.index((False, False))
    assert (True, True) in made[:first_moved] and (True, True) not in made[first_moved:]
    assert (False, True) in made and len(set(searched)) == len(searched)


@pytest.mark.parametrize("seed", range(2))
def test_no_time_still_gives_the_best_a_whole_schedule(seed: int) -> None:
    """The soonest by what is known of it, or one of the few that were looked at."""
    evaluator, found = found_for(seed, 4, 0.8)
    about_s = {tried(o): o.step_s for o in (*found.near, *found.outcomes)}
    finish(evaluator, found, 0.0, count=0)
    best, *others = found.outcomes
    assert not best.extrapolated
    assert sorted(set(about_s.values())).index(about_s[tried(best)]) <= finishing.UNTIMED
    assert sum(not outcome.extrapolated for outcome in others) < finishing.UNTIMED


def test_no_time_does_not_let_a_whole_step_stand_before_what_is_far_sooner() -> None:
    """On a busy machine a config with 2.3 samples/s was listed before one with 7.2."""
    evaluator, found = found_for(0, 4, 0.8)
    soonest = next(o for o in found.outcomes if math.isfinite(whole_s(evaluator, o)))
    assert soonest.extrapolated
    slow = replace(found.outcomes[-1], step_s=3 * soonest.step_s, extrapolated=False)
    found.outcomes, found.near = [soonest, slow], []
    finish(evaluator, found, 0.0, count=0)
    best = found.outcomes[0]
    assert not best.extrapolated and best.step_s < 1.2 * soonest.step_s


def test_a_long_step_that_is_the_best_is_not_passed_over_for_a_short_one() -> None:
    """The best has more operations than the limit of a search, others have fewer."""
    chain = profile(random.Random(1), 16, 0, 1.0, parameters=60_000_000, saved_mb=20.0)
    evaluator = Evaluator(chain, cluster(1, 8, memory_gb=3.0, intra_gbs=50.0), 2048)
    evaluator.effort = 1
    long = Choices(pipeline=(8,), tensor=(1,), micro_batch_size=(1,), recompute=(Recompute.NEVER,))
    candidates = evaluator.candidates(long)
    found = search(evaluator, [c for c in candidates if c.layout in (FOLD_EXACT, ROW)], keep=4)
    assert evaluator.size(found.outcomes[0].config, whole=True) > finishing.LARGEST
    about_s = found.outcomes[0].step_s
    finish(evaluator, found, 10.0, "none", count=1, clock=time.process_time)
    assert not found.outcomes[0].extrapolated
    assert found.outcomes[0].step_s == pytest.approx(about_s, rel=0.03)


def test_what_has_no_room_by_the_soonest_schedule_has_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fastest of two schedules never fits; then none fits."""
    evaluator, found = found_for(0, 4, 0.8)
    outcome = found.outcomes[0]
    problem = evaluator.problem(outcome.config, BATCH, outcome.stages)
    made = schedules(problem, outcome.stages.edges, 0)
    assert len(made) == 2 and made[0][1].makespan <= made[1][1].makespan
    tight = made[0][0].schedule.order

    much = (2 * evaluator.cluster.usable_bytes,) * 4

    def memory(self: Evaluator, config: Any, stages: Any, schedule: Schedule) -> tuple[float, ...]:
        return much if schedule.order == tight else (0.0,) * 4

    monkeypatch.setattr(Evaluator, "peak_bytes", memory)
    alone = replace(found, outcomes=[outcome], near=[])
    finish(evaluator, alone, 0.0)
    assert alone.outcomes[0].timeline.makespan == pytest.approx(made[1][1].makespan)
    monkeypatch.setattr(Evaluator, "peak_bytes", lambda *of: much)
    none = replace(found, outcomes=[outcome], near=[])
    finish(evaluator, none, 0.0)
    assert none.outcomes == []


def test_what_runs_the_same_is_listed_once() -> None:
    """A fold whose skips stay at home without being made to."""
    for seed in range(4):
        evaluator, found = found_for(seed, 4, 0.8)
        finish(evaluator, found, 1.0, "none")
        same = [execution_key(outcome) for outcome in found.outcomes]
        assert len(set(same)) == len(same)


def test_where_messages_queue_a_schedule_for_slower_links_may_be_sooner() -> None:
    """Never later than the one for links as they are; and much sooner for some."""
    gains = []
    for seed in range(4):
        evaluator, found = found_for(seed, 4, 0.8)
        outcome = found.outcomes[0]
        problem = evaluator.problem(outcome.config, BATCH, outcome.stages)
        made, timeline = schedules(problem, outcome.stages.edges, 0)[0]
        ((alone, plain),) = schedules(problem, (), 0)  # no message that could wait: one is enough
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
        return schedules(problem, edges, effort, bounded)

    monkeypatch.setattr(finishing, "schedules", slow)
    monkeypatch.setattr(finishing, "LEAST_S", math.inf)
    finish(evaluator, found, 2.0, clock=clock)
    assert clock.now <= max(2.2, took[0] + 0.2)
    assert not found.outcomes[0].extrapolated
    assert len(took) > 5 or slowness > 1
