"""Under low memory the search finds a config if full recomputation fits."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron_pulse.planner.tune.config import Choices, Recompute
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.search.low_memory import search_low_memory
from megatron_pulse.planner.tune.search.result import Tuning
from megatron_pulse.planner.tune.search.search import search
from tests.planner.tune.problems import cluster, profile

CHOICES = Choices(tensor=(1,), micro_batch_size=(1, 2))
ALL = replace(CHOICES, recompute=(Recompute.ALWAYS,))


def evaluator(memory_gb: float, dear: tuple[float, float] | None = None) -> Evaluator:
    of = profile(random.Random(0), 12, 5, dear=dear)
    return Evaluator(of, cluster(1, 4, memory_gb=memory_gb), 16)


def short(of: Evaluator, seconds: float, choices: Choices = CHOICES) -> Tuning:
    candidates = of.candidates(choices)
    return search_low_memory(of, choices, candidates, 5, seconds, lambda found: None, 1.0)


@pytest.mark.parametrize("memory_gb", [1.0, 1.2, 1.7])
def test_no_answer_is_behind_that_of_all(memory_gb: float) -> None:
    of = evaluator(memory_gb)
    with_all = search(of, of.candidates(ALL), 1).outcomes
    found = short(of, 6.0)
    assert bool(found.outcomes) >= bool(with_all)
    assert len({outcome.config for outcome in found.outcomes}) == len(found.outcomes) <= 5
    if with_all:
        assert found.outcomes[0].step_s <= 1.01 * with_all[0].step_s


def test_all_is_tried_where_nothing_is_found_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partitions with recomputation as needed never end here."""
    of = evaluator(1.5)
    asked: list[set[Recompute]] = []

    def slow(evaluator, candidates, keep, budget, progress, finish_s):  # type: ignore[no-untyped-def]
        asked.append({config.recompute for config in candidates})
        if Recompute.ALWAYS in asked[-1]:
            return search(evaluator, candidates, keep, budget, progress, finish_s)
        found = Tuning(num_left=1)
        if len(asked) > 1:  # what is left is asked for, and that is all
            return found
        while budget.spent < budget.seconds + finish_s:
            progress(found)
        return found

    monkeypatch.setattr("megatron_pulse.planner.tune.search.low_memory.search", slow)
    found = short(of, 30.0)
    assert [Recompute.ALWAYS in kinds for kinds in asked] == [False, True, False]
    kinds = {outcome.config.recompute for outcome in found.outcomes}
    assert kinds == {Recompute.ALWAYS, Recompute.NEEDED}  # as few as needed with the cuts of all
    fewer = [o for o in found.outcomes if o.config.recompute is Recompute.NEEDED]
    assert min(len(outcome.stages.activations.recompute) for outcome in fewer) < 12  # layers


def test_full_recomputation_does_not_wait_for_selective(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the time that is left divided between them."""
    of, asked = evaluator(1.2, dear=(0.2, 0.9)), list[tuple[set[Recompute], float]]()

    def spied(evaluator, candidates, keep, budget, progress, finish_s):  # type: ignore[no-untyped-def]
        asked.append(({config.recompute for config in candidates}, budget.seconds))
        return search(evaluator, candidates, keep, budget, progress, finish_s)

    monkeypatch.setattr("megatron_pulse.planner.tune.search.low_memory.search", spied)
    short(of, 1.0)
    assert [kinds for kinds, _ in asked[1:3]] == [{Recompute.ALWAYS}, {Recompute.SELECTIVE}]
    assert 0 < asked[1][1] <= 0.5


def test_where_nothing_is_computed_again_all_is_not_tried() -> None:
    found = short(evaluator(16.0), 20.0)
    assert not found.outcomes[0].stages.activations.recompute
    assert found.num_configs == len(evaluator(16.0).candidates(CHOICES))
    never = short(evaluator(1.4), 20.0, replace(CHOICES, recompute=(Recompute.NEVER,)))
    assert never.num_configs == len(evaluator(1.4).candidates(CHOICES)) // 2
    assert all(not outcome.stages.activations.recompute for outcome in never.outcomes)


def test_all_has_its_time_while_any_that_is_near_the_best_computes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A search that first finds recomputation as needed, and then a faster config."""
    of = evaluator(1.5)
    again = next(o for o in short(of, 20.0).outcomes if o.stages.activations.recomputes)
    none = search(evaluator(16.0), of.candidates(CHOICES), 1).outcomes[0]
    given: list[float] = []

    def made(evaluator, candidates, keep, budget, progress, finish_s):  # type: ignore[no-untyped-def]
        given.append(budget.seconds)
        found = Tuning(outcomes=[])
        for outcomes in stages:
            found.outcomes = outcomes
            progress(found)
            given.append(budget.seconds)
        return found

    monkeypatch.setattr("megatron_pulse.planner.tune.search.low_memory.search", made)
    near, far = (replace(again, step_s=times * none.step_s) for times in (1.05, 1.2))
    stages = [[again], [none, near], [none, far]]
    short(of, 40.0)
    assert given == [40.0, 30.0, 30.0, 40.0], "given back, and no search for all"
    given.clear()
    stages = [[none], [none, near]]
    short(of, 40.0)
    assert given[:3] == [40.0, 40.0, 30.0] and len(given) == 6, "all is tried"
