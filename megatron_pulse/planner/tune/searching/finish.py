"""Whole schedules for the best configs that a search found."""

from __future__ import annotations

import math
import time

from megatron_pulse.planner.schedule.cache import cached
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from megatron_pulse.planner.schedule.solve import solve
from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.searching.tuning import Tuning, simplicity

LARGEST = 40_000
"""Operations of a step beyond which its schedule is the first that is found."""

LEAST_S = 2.0
"""Seconds for a schedule below which none is searched for: on a busy machine a solver takes as long
to start. What the search found is kept, or the first schedule taken where that is not whole."""


def finish(
    evaluator: Evaluator, found: Tuning, seconds: float, solver: str = "auto", count: int = 3
) -> None:
    """Find whole schedules for the ``count`` best, in about ``seconds`` altogether; sort anew.

    A schedule of the search is kept where it is of all microbatches and sooner. Once the time is
    spent, only what then is the best still gets a whole schedule, so that it can run.
    """
    began = time.monotonic()
    whole: set[Config] = set()
    while todo := [o for o in found.outcomes[:count] if o.config not in whole]:
        left = seconds - (time.monotonic() - began)
        if left <= 0 and found.outcomes[0] is not todo[0]:
            break
        outcome = todo[0]
        better = _whole(evaluator, outcome, max(0.0, min(left, seconds / count)), solver)
        whole.add(outcome.config)
        if not evaluator.has_room(better):  # more than the part of it that was simulated
            if outcome.extrapolated:
                found.outcomes.remove(outcome)
            continue
        if outcome.extrapolated or better.step_s < outcome.step_s:
            found.outcomes[found.outcomes.index(outcome)] = better
        found.outcomes.sort(key=lambda o: (o.step_s, simplicity(o.config)))
    found.seconds += time.monotonic() - began


def _whole(evaluator: Evaluator, outcome: Outcome, seconds: float, solver: str) -> Outcome:
    """The outcome's config with a schedule of all microbatches."""
    config, stages = outcome.config, outcome.stages
    hurried = seconds < LEAST_S or evaluator.size(config, whole=True) > LARGEST
    if hurried and not outcome.extrapolated:
        return outcome
    problem = evaluator.problem(
        config, config.num_microbatches(evaluator.global_batch_size), stages
    )
    if hurried:
        return evaluator.evaluate(config, synthesize(problem, math.inf, 0), stages=stages)
    return evaluator.evaluate(config, cached(problem, seconds, solver, solve), stages=stages)
