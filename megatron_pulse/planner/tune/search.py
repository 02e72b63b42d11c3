"""Branch and bound over all configs, the most promising first, with an answer at any moment.

A config is taken up in steps, each dearer and nearer to the truth than the one before:

=======  ==========================================================================================
even     estimate and bound from the work, spread evenly
like     estimate from cuts that are known for its degree and layout, made for whichever config
quick    simulated with these cuts, or its own where none of them fit, and a schedule that is found
         at once: something that would run
done     simulated with the better of these cuts and its own, and a schedule that was searched for
=======  ==========================================================================================

First the best config of every degree and layout becomes quick, the fewest stages first; how far its
estimate then is from that of even work corrects the others'. From then on whatever has the least
time so far takes its next step. What is bound to take longer than all that are kept is dropped;
what is far from the best by its estimate is cut for such a bound before it is simulated.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import IntEnum

from megatron_pulse.planner.layout.layouts import Layout
from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.schedule.search.synthesize import get_ready
from megatron_pulse.planner.tune.budget import Budget
from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.costs import Unfit, UnfitError
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.stages import Stages
from megatron_pulse.planner.tune.tuning import Shortlist, Tuning, simplicity

HOPE = 0.5
"""Part of the gap of a quick schedule that a search for a better one may close."""

FAR = 1.1
"""Times the best by its estimate, from which a config is bounded before it is simulated."""

MOST_KNOWN = 4
"""Cuts that are kept for a degree and layout, the latest."""

type Kind = tuple[int, Layout]


class _Step(IntEnum):
    EVEN = 0
    LIKE = 1
    CUT = 2
    QUICK = 3


@dataclass(order=True)
class _Candidate:
    """A config in the queue: ``seconds`` is its estimate, or what was simulated."""

    seconds: float
    simplicity: tuple[int, ...]
    config: Config
    bound: float
    step: _Step = _Step.EVEN
    stages: Stages | None = field(default=None, compare=False)

    @property
    def kind(self) -> Kind:
        """What configs have in common that are cut alike."""
        return self.config.pipeline, self.config.layout


def search(
    evaluator: Evaluator,
    candidates: Iterable[Config],
    keep: int = 10,
    budget: Budget | None = None,
    progress: Callable[[Tuning], None] = lambda _: None,
) -> Tuning:
    """The ``keep`` best of ``candidates``, or of those that were looked at within ``budget``.

    Without a budget all are. Configs that come to the same are listed once, as the simplest. One is
    simulated however little time there is. ``progress`` is called after every step.
    """
    get_ready()
    return _Search(evaluator, keep, budget or Budget(float("inf")), progress).run(candidates)


class _Search:
    def __init__(
        self,
        evaluator: Evaluator,
        keep: int,
        budget: Budget,
        progress: Callable[[Tuning], None],
    ) -> None:
        self.evaluator, self.budget, self.progress = evaluator, budget, progress
        self.listed, self.found = Shortlist(keep), Tuning()
        self.known: dict[Kind, list[Partition]] = {}
        self.queue: list[_Candidate] = []
        self.aside: list[_Candidate] = []

    def run(self, candidates: Iterable[Config]) -> Tuning:
        """Look at ``candidates`` until all are ruled out or the budget is spent."""
        self.fill(candidates)
        self.scout()
        while self.queue and (self.budget.left > 0 or not self.listed.best):
            candidate = heapq.heappop(self.queue)
            if candidate.bound >= self.listed.limit:
                self.refuse(candidate.config, Unfit.SLOWER, str(candidate.config))
            elif (following := self.advance(candidate)) is not None:
                heapq.heappush(self.queue, following)
        found = self.found
        self.queue += self.aside
        left = [c for c in self.queue if c.bound < self.listed.limit]
        found.refused[Unfit.SLOWER] += len(self.queue) - len(left)
        found.num_left = len(left)
        found.bound_s = min((c.bound for c in left), default=float("inf"))
        if self.listed.same:
            found.refused[Unfit.SAME] = len(self.listed.same)
        found.seconds = self.budget.spent
        return found

    def fill(self, candidates: Iterable[Config]) -> None:
        """The queue of all that are not refused at once."""
        evaluator = self.evaluator
        for config in candidates:
            self.found.num_configs += 1
            try:
                evaluator.refuse(config)
            except UnfitError as error:
                self.refuse(config, error.reason, error.detail)
                continue
            bound = evaluator.quick_bound(config)
            estimate = max(bound, evaluator.estimate(config))
            self.queue.append(_Candidate(estimate, simplicity(config), config, bound))

    def scout(self) -> None:
        """Simulate the most promising config of every kind, and correct the estimates of others."""
        first: dict[Kind, _Candidate] = {}
        for candidate in self.queue:
            if candidate.kind not in first or candidate < first[candidate.kind]:
                first[candidate.kind] = candidate
        scouts = {id(candidate) for candidate in first.values()}
        rest = [candidate for candidate in self.queue if id(candidate) not in scouts]
        self.queue, factor = [], {}
        for candidate in sorted(first.values(), key=lambda c: (_num_stages(c.config), c)):
            following: _Candidate | None = candidate
            while following is not None and following.step < _Step.QUICK:
                if self.listed.best and (self.is_far(following) or self.budget.left <= 0):
                    break
                following = self.advance(following)
                if following is not None and following.step is _Step.LIKE:
                    factor[candidate.kind] = following.seconds / candidate.seconds
            if following is not None:
                self.queue.append(following)
        for candidate in rest:
            candidate.seconds *= factor.get(candidate.kind, 1.0)
        self.queue += rest
        heapq.heapify(self.queue)

    def advance(self, candidate: _Candidate) -> _Candidate | None:
        """The candidate after its next step; None if there is none."""
        following = None
        try:
            if candidate.step is _Step.EVEN:
                following = self.liken(candidate)
            elif candidate.step is _Step.LIKE and self.must_cut(candidate):
                following = self.cut(candidate)
            elif candidate.step is _Step.QUICK:
                self.complete(candidate)
            else:
                following = self.simulate(candidate)
        except UnfitError as error:
            self.refuse(candidate.config, error.reason, error.detail)
        self.found.outcomes = self.listed.best
        self.found.seconds = self.budget.spent
        self.progress(self.found)
        return following

    def liken(self, candidate: _Candidate) -> _Candidate:
        """Estimated from known cuts, those of the least load among those that fit."""
        config, evaluator = candidate.config, self.evaluator
        if candidate.kind not in self.known:
            self.known[candidate.kind] = [evaluator.cheap_cuts(config)]
        choices = [evaluator.cut(config, cuts) for cuts in self.known[candidate.kind]]
        estimates = [(evaluator.cut_estimate(config, s), i) for i, s in enumerate(choices)]
        fitting = [(t, i) for t, i in estimates if evaluator.fits(choices[i])]
        seconds, at = min(fitting or estimates)
        return replace(
            candidate,
            seconds=max(seconds, candidate.bound),
            step=_Step.LIKE,
            stages=choices[at] if fitting else None,
        )

    def must_cut(self, candidate: _Candidate) -> bool:
        """Whether no known cuts fit, or a bound is wanted rather than a simulation."""
        return candidate.stages is None or self.is_far(candidate)

    def is_far(self, candidate: _Candidate) -> bool:
        """Whether it is not likely to be the best."""
        best = self.listed.best
        return bool(best) and candidate.seconds > FAR * best[0].step_s

    def cut(self, candidate: _Candidate) -> _Candidate:
        """Estimated and bounded from its own cuts."""
        config, stages = candidate.config, self.own(candidate)
        bound = max(candidate.bound, self.evaluator.bound(config, stages))
        seconds = max(bound, self.evaluator.cut_estimate(config, stages))
        return replace(candidate, seconds=seconds, bound=bound, step=_Step.CUT, stages=stages)

    def own(self, candidate: _Candidate) -> Stages:
        """The config's own stages, whose cuts are known from then on."""
        stages = self.evaluator.stages(candidate.config)
        known = self.known.setdefault(candidate.kind, [])
        if stages.partition not in known:
            self.known[candidate.kind] = [*known, stages.partition][-MOST_KNOWN:]
        return stages

    def simulate(self, candidate: _Candidate) -> _Candidate | None:
        """Simulated with a quick schedule."""
        outcome = self.evaluate(candidate, "quick", candidate.stages)
        if outcome is None:
            return None
        self.found.num_simulated += 1
        gap = outcome.synthesis.certificate.gap
        hope = HOPE * outcome.pipeline_s * gap / (1 + gap)
        return replace(
            candidate, seconds=outcome.step_s - hope, step=_Step.QUICK, stages=outcome.stages
        )

    def complete(self, candidate: _Candidate) -> None:
        """Simulated with the better of its cuts and its own, and a schedule that was searched."""
        stages = candidate.stages
        own: Stages | None = None
        with suppress(UnfitError):
            own = self.own(candidate)
        if own is not None and stages is not None and own.partition != stages.partition:
            quick = self.evaluate(candidate, "quick", own)
            before = self.listed.outcomes.get(candidate.config)
            if quick is not None and (before is None or quick.step_s <= before.step_s):
                stages = own
        self.evaluate(candidate, "searched", stages)

    def evaluate(self, candidate: _Candidate, how: str, stages: Stages | None) -> Outcome | None:
        """The simulation, listed; None, and the candidate put aside, where it would be too long."""
        config, found = candidate.config, self.found
        size = self.evaluator.size(config)
        if self.listed.best and not self.budget.fits(how, size):
            self.aside.append(candidate)
            return None
        with self.budget.timed(how, size):
            outcome = self.evaluator.evaluate(config, quick=how == "quick", stages=stages)
        self.listed.add(outcome)
        for rival in (f"P={config.pipeline}", f"T={config.tensor}", config.layout.name):
            if rival not in found.rivals or outcome.step_s < found.rivals[rival].step_s:
                found.rivals[rival] = outcome
        return outcome

    def refuse(self, config: Config, reason: Unfit, detail: str) -> None:
        """Count a refusal."""
        self.found.refused[reason] += 1
        self.found.degrees.setdefault(config.pipeline, Counter())[reason] += 1
        self.found.examples.setdefault(reason, detail)


def _num_stages(config: Config) -> int:
    return config.pipeline * config.layout.num_chunks
