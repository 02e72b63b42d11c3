"""A search where memory may be short: all activations computed again, beside as few as are needed.

To compute as few as are needed takes a search of its own for all cuts. All of them takes none, fits
where anything does, and is sometimes sooner::

    found at once, nothing computed again  |-------- as few as needed, or none --------|
    nothing found                          |- 0.2 -|---- all ----|---- the same again ----|
    what is found computes some again      |-------- the same --------|------ all ------|
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_pulse.planner.tune.config import Choices, Config, Recompute
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.searching.budget import Budget
from megatron_pulse.planner.tune.searching.search import search
from megatron_pulse.planner.tune.searching.tuning import Shortlist, Tuning, keep_soonest

UNANSWERED, ALL_SHARE, LEAST_SHARE = 0.2, 0.25, 0.1
"""Shares of the seconds: after which all is tried where nothing was found; for all where what was
found computes some again; and for all even where the search before took too long."""


def search_short(
    evaluator: Evaluator,
    choices: Choices,
    candidates: Sequence[Config],
    keep: int,
    seconds: float,
    progress: Callable[[Tuning], None],
    finish_s: float,
) -> Tuning:
    """What ``search`` finds of ``candidates``, those of ``choices``; and where these may compute as
    few activations again as are needed, and have to, of those that compute all."""
    few = Recompute.NEEDED in choices.recompute and Recompute.ALWAYS not in choices.recompute
    first = Budget(seconds)

    def look(found: Tuning) -> None:
        progress(found)
        if few and not found.outcomes and first.spent > UNANSWERED * seconds:
            first.seconds = first.spent - finish_s  # with nothing found it would take these too
        elif few and found.outcomes and found.outcomes[0].stages.recompute:
            first.seconds = min(first.seconds, (1 - ALL_SHARE) * seconds)

    found = search(evaluator, candidates, keep, first, look, finish_s)
    if not few or (found.outcomes and not found.outcomes[0].stages.recompute):
        return found
    again = evaluator.candidates(replace(choices, recompute=(Recompute.ALWAYS,)))
    unanswered = not found.outcomes and found.num_left > 0
    rest = max(seconds - found.seconds, LEAST_SHARE * seconds)
    with_all = search(
        evaluator, again, keep, Budget(rest / 2 if unanswered else rest), progress, finish_s
    )
    left = seconds - found.seconds - with_all.seconds
    if unanswered and left > UNANSWERED * seconds:
        spent = found.seconds
        found = search(evaluator, candidates, keep, Budget(left), progress, finish_s)
        found.seconds += spent
    return _both(found, with_all, keep)


def _both(one: Tuning, other: Tuning, keep: int) -> Tuning:
    """Two searches of different configs as one."""
    listed = Shortlist(keep)
    for outcome in (*one.outcomes, *other.outcomes):
        listed.add(outcome)
    rivals = dict(one.rivals)
    for name, rival in other.rivals.items():
        keep_soonest(rivals, name, rival)
    degrees = dict(one.degrees)
    for degree, counts in other.degrees.items():
        degrees[degree] = degrees[degree] + counts if degree in degrees else counts
    return Tuning(
        outcomes=listed.best,
        refused=one.refused + other.refused,
        examples={**other.examples, **one.examples},
        rivals=rivals,
        degrees=degrees,
        num_configs=one.num_configs + other.num_configs,
        num_simulated=one.num_simulated + other.num_simulated,
        num_left=one.num_left + other.num_left,
        bound_s=min(one.bound_s, other.bound_s),
        seconds=one.seconds + other.seconds,
        ready_s=one.ready_s + other.ready_s,
    )
