"""Branch and bound over all configs, the most promising first.

A config is taken up in steps, each dearer and nearer to the truth than the one before:

=======  ==========================================================================================
even     estimate and bound from the work, spread evenly
cut      estimate and bound from its own partition
quick    simulated with a schedule that is found at once: something that would run
done     simulated with a schedule that was searched for
=======  ==========================================================================================

Whatever has the least time so far takes its next step. What is bound to take longer than all that
are kept is dropped.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum

from megatron_pulse.planner.layout.layouts import WHOLE
from megatron_pulse.planner.schedule.cache import cached
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from megatron_pulse.planner.schedule.solve import solve
from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.stages import Unfit, UnfitError

LARGEST = 40_000
"""Operations of a step beyond which its schedule is the first that is found."""

HOPE = 0.5
"""Part of the gap of a quick schedule that a search for a better one may close."""

SWEEP = 0.85
"""Part of the time after which all that might still be the best is cut: it is bounded better."""

EQUAL = 1 + 1e-9


class _Step(IntEnum):
    EVEN = 0
    CUT = 1
    QUICK = 2


@dataclass(order=True)
class _Candidate:
    """A config in the queue: ``seconds`` is its estimate, or what was simulated."""

    seconds: float
    simplicity: tuple[int, ...]
    config: Config
    bound: float
    step: _Step


@dataclass
class Tuning:
    """What a search found: the best outcomes, soonest first, and what became of the others.

    ``bound_s`` is the least that any config could take that was left. ``examples`` has one refusal
    in full for each reason. ``rivals`` are the best of every degree and layout that was simulated,
    by "P=4" or "fold exact", and ``degrees`` counts refusals by pipeline degree.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    refused: Counter[Unfit] = field(default_factory=Counter)
    examples: dict[Unfit, str] = field(default_factory=dict)
    rivals: dict[str, Outcome] = field(default_factory=dict)
    degrees: dict[int, Counter[Unfit]] = field(default_factory=dict)
    num_configs: int = 0
    num_simulated: int = 0
    num_left: int = 0
    bound_s: float = float("inf")
    seconds: float = 0.0

    @property
    def proved(self) -> bool:
        """Whether no config that was left can be better than the best, as simulated."""
        return bool(self.outcomes) and self.bound_s * EQUAL >= self.outcomes[0].step_s


def search(
    evaluator: Evaluator,
    candidates: Iterable[Config],
    keep: int = 10,
    seconds: float = 25.0,
    progress: Callable[[Tuning], None] = lambda _: None,
) -> Tuning:
    """The ``keep`` best of ``candidates``, or of those that were looked at within ``seconds``.

    Configs that come to the same are listed once, as the simplest. ``progress`` is called after
    every step.
    """
    began = time.monotonic()
    found = Tuning()
    listed = _List(keep)
    queue = _queue(evaluator, candidates, found)

    def take(candidate: _Candidate) -> None:
        if candidate.bound >= listed.limit:
            _refuse(found, candidate.config, Unfit.SLOWER, str(candidate.config))
            return
        try:
            following = _advance(evaluator, candidate, found, listed)
        except UnfitError as error:
            _refuse(found, candidate.config, error.reason, error.detail)
        else:
            if following is not None:
                heapq.heappush(queue, following)
        found.outcomes = listed.best
        found.seconds = time.monotonic() - began
        progress(found)

    swept = False
    while queue and (time.monotonic() - began < seconds or not listed.best):
        if not swept and listed.best and time.monotonic() - began > SWEEP * seconds:
            swept = True
            doubtful, queue = _doubtful(queue, listed.best[0].step_s)
            while doubtful and time.monotonic() - began < seconds:
                take(doubtful.pop())
            for candidate in doubtful:
                heapq.heappush(queue, candidate)
            continue
        take(heapq.heappop(queue))
    left = [c for c in queue if c.bound < listed.limit]
    found.refused[Unfit.SLOWER] += len(queue) - len(left)
    found.num_left = len(left)
    found.bound_s = min((c.bound for c in left), default=float("inf"))
    if listed.same:
        found.refused[Unfit.SAME] = len(listed.same)
    found.seconds = time.monotonic() - began
    return found


def _doubtful(queue: list[_Candidate], best_s: float) -> tuple[list[_Candidate], list[_Candidate]]:
    """Those not cut yet whose bound allows them to be the best, that of the least last; the rest
    as a heap."""
    doubtful: list[_Candidate] = []
    rest: list[_Candidate] = []
    for candidate in queue:
        uncut = candidate.step is _Step.EVEN and candidate.bound < best_s
        (doubtful if uncut else rest).append(candidate)
    heapq.heapify(rest)
    return sorted(doubtful, key=lambda c: -c.bound), rest


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
        if outcome.extrapolated or better.step_s < outcome.step_s:
            found.outcomes[found.outcomes.index(outcome)] = better
        whole.add(outcome.config)
        found.outcomes.sort(key=lambda o: (o.step_s, simplicity(o.config)))
    found.seconds += time.monotonic() - began


def _whole(evaluator: Evaluator, outcome: Outcome, seconds: float, solver: str) -> Outcome:
    """The outcome's config with a schedule of all microbatches."""
    config = outcome.config
    count = config.num_microbatches(evaluator.global_batch_size)
    problem = evaluator.problem(config, count)
    if count * problem.placement.num_stages * len(problem.kinds) > LARGEST:
        return evaluator.evaluate(config, synthesize(problem, math.inf, 0))
    if seconds == 0:
        return evaluator.evaluate(config, synthesize(problem, math.inf))
    return evaluator.evaluate(config, cached(problem, seconds, solver, solve))


class _List:
    """The best outcomes so far, each way of running once."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.outcomes: dict[Config, Outcome] = {}
        self.same: set[Config] = set()
        self.best: list[Outcome] = []
        self.limit = float("inf")

    def add(self, outcome: Outcome) -> None:
        """Take it in, or replace what was simulated less thoroughly."""
        before = self.outcomes.get(outcome.config)
        if before is not None and before.step_s <= outcome.step_s:
            return
        self.outcomes[outcome.config] = outcome
        ranked = sorted(self.outcomes.values(), key=lambda o: (o.step_s, simplicity(o.config)))
        self.outcomes = {o.config: o for o in ranked[: 8 * self.keep]}
        once: dict[tuple[object, ...], Outcome] = {}
        for other in ranked:
            first = once.setdefault(_what_runs(other), other)
            if first is not other:
                self.same.add(other.config)
        self.best = list(once.values())[: self.keep]
        self.limit = self.best[-1].step_s if len(self.best) == self.keep else float("inf")


def _what_runs(outcome: Outcome) -> tuple[object, ...]:
    """The same for configs that run the same: ample room that is not used, or a fold whose skips
    stay at home without being made to."""
    config, partition = outcome.config, outcome.stages.partition
    return (
        replace(config, layout=WHOLE, ample=False),
        partition.placement,
        partition.cuts,
        outcome.step_s,
    )


def simplicity(config: Config) -> tuple[int, ...]:
    """Of equals the simpler way of running comes first."""
    extras = (config.recompute, config.split, config.ample, config.distributed_optimizer)
    exact = not config.layout.collocates
    return (*map(int, extras), int(exact), config.pipeline, config.tensor)


def _advance(
    evaluator: Evaluator, candidate: _Candidate, found: Tuning, listed: _List
) -> _Candidate | None:
    """The candidate's next step; raises UnfitError."""
    config, bound = candidate.config, candidate.bound
    if candidate.step is _Step.EVEN:
        seconds = evaluator.cut_estimate(config)
        bound = max(bound, evaluator.bound(config))
        return _Candidate(seconds, candidate.simplicity, config, bound, _Step.CUT)
    quick = candidate.step is _Step.CUT
    outcome = evaluator.evaluate(config, quick=quick)
    found.num_simulated += quick
    listed.add(outcome)
    for rival in (f"P={config.pipeline}", f"T={config.tensor}", config.layout.name):
        if rival not in found.rivals or outcome.step_s < found.rivals[rival].step_s:
            found.rivals[rival] = outcome
    if not quick:
        return None
    gap = outcome.synthesis.certificate.gap
    hope = HOPE * outcome.pipeline_s * gap / (1 + gap)
    return _Candidate(outcome.step_s - hope, candidate.simplicity, config, bound, _Step.QUICK)


def _queue(evaluator: Evaluator, candidates: Iterable[Config], found: Tuning) -> list[_Candidate]:
    queue = []
    for config in candidates:
        found.num_configs += 1
        try:
            evaluator.refuse(config)
        except UnfitError as error:
            _refuse(found, config, error.reason, error.detail)
            continue
        bound = evaluator.quick_bound(config)
        estimate = max(bound, evaluator.estimate(config))
        queue.append(_Candidate(estimate, simplicity(config), config, bound, _Step.EVEN))
    heapq.heapify(queue)
    return queue


def _refuse(found: Tuning, config: Config, reason: Unfit, detail: str) -> None:
    found.refused[reason] += 1
    found.degrees.setdefault(config.pipeline, Counter())[reason] += 1
    found.examples.setdefault(reason, detail)
