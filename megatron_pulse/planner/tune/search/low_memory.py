"""Search under low memory: recomputation of every layer beside recomputation as needed.

Recomputation as needed takes a search of its own for every partition. Full or selective
recomputation of every layer takes none, fits where anything fits, and is sometimes faster. With the
partitions found so, recomputation as needed is faster still::

    none of the best recomputes any        |-------- as needed, or none ---------------|
    nothing found                          |- 0.2 -|-- every layer --|---- as needed --|
    some of the best recompute some        |-------- as needed --------|- every layer -|
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from megatron_pulse.planner.tune.config import Choices, Config, Recompute
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.layer_costs import UnfitError
from megatron_pulse.planner.tune.search.budget import Budget, Clock, ProcessorClock
from megatron_pulse.planner.tune.search.fidelity import FAR
from megatron_pulse.planner.tune.search.neighbourhood import recomputes_nothing
from megatron_pulse.planner.tune.search.result import Shortlist, Tuning, merged
from megatron_pulse.planner.tune.search.search import search

UNANSWERED, ALL_SHARE, LEAST_SHARE = 0.2, 0.25, 0.1
"""Shares of the time for configs that recompute every layer.

The first passes before they are searched if nothing is found. The second is theirs if some of the
best recompute. The third is their minimum if the first search took too long.
"""

OF_ALL = (Recompute.ALWAYS, Recompute.SELECTIVE)
"""Policies that need no search per partition. Each has a search of its own: estimates know too
little of memory to tell which is faster."""

FEWER = 3
"""Best outcomes whose partitions are tried with recomputation as needed."""


def search_low_memory(
    evaluator: Evaluator,
    choices: Choices,
    candidates: Sequence[Config],
    keep: int,
    seconds: float,
    progress: Callable[[Tuning], None],
    finish_s: float,
    clock: Clock | None = None,
) -> Tuning:
    """Result of ``search`` over ``candidates``, those of ``choices``, under low memory.

    If recomputation as needed is allowed and some of the best recompute, configs that recompute
    every layer are searched too.
    """
    few = Recompute.NEEDED in choices.recompute and Recompute.ALWAYS not in choices.recompute
    clock = clock or ProcessorClock()
    first = Budget(seconds, clock)

    def look(found: Tuning) -> None:
        progress(found)
        if few and not found.outcomes and first.spent > UNANSWERED * seconds:
            first.seconds = first.spent - finish_s  # else it would overrun by finish_s
        elif few and found.outcomes:
            first.seconds = (1 - ALL_SHARE * _is_short(found)) * seconds

    found = search(evaluator, candidates, keep, first, look, finish_s)
    if not few or (found.outcomes and not _is_short(found)):
        return found
    unanswered = not found.outcomes and found.num_left > 0
    rest = max(seconds - found.seconds, LEAST_SHARE * seconds)
    with_all, all_s = Tuning(), rest / 2 if unanswered else rest
    policies = [r for r in OF_ALL if r is Recompute.ALWAYS or evaluator.profile.selects]
    for i, policy in enumerate(policies):
        again = evaluator.candidates(replace(choices, recompute=(policy,)))
        budget = Budget((all_s - with_all.seconds) / (len(policies) - i), clock)
        with_all = merged(
            with_all, search(evaluator, again, keep, budget, progress, finish_s), keep
        )
    _with_fewer(evaluator, with_all, keep, clock)
    left = seconds - found.seconds - with_all.seconds
    if unanswered and left > UNANSWERED * seconds:
        spent = found.seconds
        found = search(evaluator, candidates, keep, Budget(left, clock), progress, finish_s)
        found.seconds += spent
    return merged(found, with_all, keep)


def _is_short(found: Tuning) -> bool:
    near_s = FAR * found.outcomes[0].step_s if found.outcomes else 0.0
    near = (outcome for outcome in found.outcomes if outcome.step_s < near_s)
    return any(outcome.stages.activations.recomputes for outcome in near)


def _with_fewer(evaluator: Evaluator, found: Tuning, keep: int, clock: Clock) -> None:
    """Add the best outcomes with their partitions and recomputation as needed."""
    listed, began = Shortlist(keep), clock()
    for outcome in (*found.near, *found.outcomes):
        listed.add(outcome)
    for outcome in found.outcomes[:FEWER]:
        config = replace(outcome.config, recompute=Recompute.NEEDED)
        with suppress(UnfitError):
            stages = evaluator.cut(config, outcome.stages.partition)
            if recomputes_nothing(config, stages):
                continue
            fewer = evaluator.evaluate(config, stages=stages)
            if evaluator.has_room(fewer):
                listed.add(fewer)
    found.outcomes, found.near = listed.best, listed.near
    found.seconds += clock() - began
