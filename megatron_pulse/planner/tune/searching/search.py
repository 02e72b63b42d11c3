"""Branch and bound over all configs, the most promising first, with an answer at any moment.

First all configs without a pipeline and the best of every degree and layout are simulated
(``scouts``), unless its estimate from cuts is far from the best, the fewest stages first; how far
that is from its estimate of even work corrects the others', for each tensor degree. What takes much
longer than its cuts let expect is looked at with others: where memory is short the first that are
found may hold little (two waves of SD v2 4.6B over four of 24 GB: 375 samples/s, then 529). From
then on
whatever has the least time so far takes its next step (``steps``; estimates count with what
simulations of as many ranks in the same places took for theirs), in the end by turns with what
differs from the best in one thing, which is simulated with cuts of its own and with the best's, and
with the best by cuts that are moved (``variants``).
What is bound to take longer than all that are kept is dropped; what is far from the best by its
estimate is cut for such a bound before it is simulated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import isinf

from megatron_pulse.planner.schedule.search import synthesize
from megatron_pulse.planner.step import replay
from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.costs import Unfit
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.searching.budget import Budget
from megatron_pulse.planner.tune.searching.candidates import (
    Candidate,
    Queue,
    Reached,
    promising_first,
)
from megatron_pulse.planner.tune.searching.kinds import Kind, by_kind, neighbours
from megatron_pulse.planner.tune.searching.scouts import SIMULATED_SHARE, Scouts
from megatron_pulse.planner.tune.searching.steps import (
    FAR,
    NEAR_SHARE,
    SHARE,
    Steps,
    TooLongError,
)
from megatron_pulse.planner.tune.searching.tuning import Tuning
from megatron_pulse.processes import without_collecting

ALONE = 0.3
"""Share of the time in which candidates come in the order of their estimates alone."""

CLOSE = 1.05
"""Times the best, up to which what differs from it in one thing is simulated with other cuts."""

DOUBTFUL = 1.1
"""Times its estimate from cuts, from which a first simulation is doubted."""

SPARE, WIDER = 3.0, (2.0, 5.0)
"""When nothing is left: times what all took that may be taken again, and times as far from the best
as variants, and what has some, otherwise are."""

DOUBTED, LEAST = 0.3, 0.2
"""Share of the time until which doubtful ones are looked at, and of what is left at the least
(two waves of SD v2 on 16 of 24 GB, the best there, are among them)."""

VARIED = 0.8
"""Share of the time after that which goes to variants of good configs."""


def search(
    evaluator: Evaluator,
    candidates: Iterable[Config],
    keep: int = 10,
    budget: Budget | None = None,
    progress: Callable[[Tuning], None] = lambda _: None,
    finish_s: float = float("inf"),
) -> Tuning:
    """The ``keep`` best of ``candidates``, or of those that were looked at within ``budget``.

    Without a budget all are. It begins once everything is compiled, and is left earlier where a
    whole schedule of the best will take more than ``finish_s``, or later, by up to as much, where
    nothing was simulated yet. Configs that come to the same are listed once, as the simplest.
    ``progress`` is called after every step.
    """
    began = time.monotonic()
    synthesize.get_ready()
    replay.get_ready()
    ready_s = time.monotonic() - began
    budget = budget or Budget(float("inf"))
    with without_collecting():
        budget.begin()
        found = _ConfigSearch(Steps(evaluator, keep, budget, progress, finish_s)).run(candidates)
    found.ready_s = ready_s
    return found


class _ConfigSearch:
    def __init__(self, steps: Steps) -> None:
        self.steps, self.scouts = steps, Scouts(steps)
        self.queue = Queue(steps.corrections)
        self.waiting: dict[Config, Candidate] = {}

    def run(self, candidates: Iterable[Config]) -> Tuning:
        """Look at ``candidates`` until all are ruled out or the budget is spent."""
        steps = self.steps
        kinds = by_kind(candidates)
        for some in kinds[:1], kinds[1:]:  # an answer first, for all are some thousand estimates
            for alike in promising_first(map(self.scouts.estimated, some)):
                for candidate in self.scouts.look(alike):
                    self.wait(candidate)
        most_s = max(DOUBTED * steps.budget.seconds, steps.budget.spent + LEAST * steps.budget.left)
        for candidate in self.doubtful():
            if steps.ended or steps.budget.spent > most_s:
                break
            self.take(candidate)
        while self.queue and not steps.ended:
            varied_s = VARIED * self.late_s
            while not steps.ended and steps.variants.spent_s < varied_s and self.vary():
                pass
            if (near := self.next_near()) is not None:
                self.take(near)
            elif self.waiting.get((candidate := self.queue.pop()).config) is candidate:
                self.take(candidate)
        while not steps.ended and self.vary():
            pass
        self.go_on()
        return self.counted()

    def go_on(self) -> None:
        """When nothing is left of a budget's: schedules for all that is close, then variants of
        what is farther from the best, and farther variants; for some times as long as all took."""
        steps = self.steps
        until = (1 + SPARE) * steps.budget.spent

        def ended() -> bool:
            return isinf(steps.budget.seconds) or steps.ended or steps.budget.spent > until

        steps.share = NEAR_SHARE
        for close in steps.listed.near:
            if ended() or close.step_s > CLOSE * steps.listed.best[0].step_s:
                break
            with suppress(TooLongError):
                steps.evaluate(close.config, "searched", close.stages)
        for margin in WIDER:
            steps.variants.widen(margin)
            while not ended() and self.vary():
                pass

    def counted(self) -> Tuning:
        """What was found, and what became of the others."""
        found, listed = self.steps.found, self.steps.listed
        waited = [*self.waiting.values(), *self.steps.aside]
        rest = [c for c in waited if c.config not in listed.same]
        left = [c for c in rest if c.bound < listed.limit]
        found.refused[Unfit.SLOWER] += len(rest) - len(left)
        for candidate in rest:
            late = candidate.bound < listed.limit
            self.steps.count(candidate.config, Unfit.LATE if late else Unfit.SLOWER)
        found.num_left = len(left)
        found.bound_s = min((c.bound for c in left), default=float("inf"))
        if self.scouts.unseen:
            found.num_left, found.bound_s = found.num_left + self.scouts.unseen, 0.0
        if same := len(waited) - len(rest):
            found.refused[Unfit.SAME] += same
        found.seconds = self.steps.budget.spent
        return found

    def doubtful(self) -> list[Candidate]:
        """Of each degree and layout what was the soonest, if it took much longer than is estimated
        from its cuts, which is near the best, and is soon simulated again; first what takes least
        to simulate, of as much what is estimated to be soonest."""
        steps, first = self.steps, dict[Kind, Candidate]()
        most_s = FAR * steps.listed.best[0].step_s if steps.listed.best else 0.0
        for one in sorted(self.waiting.values(), key=lambda c: c.reached_s):
            if one.step is Reached.QUICK:
                first.setdefault(one.kind, one)
        found: list[tuple[float, Candidate]] = []  # by size times estimate
        for one in first.values():
            assert one.stages is not None
            seconds = steps.evaluator.cut_estimate(one.config, one.stages)
            size = steps.evaluator.size(one.config)
            soon = steps.budget.fits("quick", size, SIMULATED_SHARE)
            if soon and DOUBTFUL * seconds < one.reached_s and seconds < most_s:
                found.append((size * seconds, one))
        return [one for _, one in sorted(found)]

    def take(self, candidate: Candidate) -> None:
        """Let a candidate take its next step, or drop it."""
        del self.waiting[candidate.config]
        if candidate.bound >= self.steps.listed.limit:
            self.steps.refuse(candidate.config, Unfit.SLOWER, str(candidate.config))
            return
        following = self.steps.advance(candidate, near=candidate.config in self.near())
        if following is not None:
            self.wait(following)

    def wait(self, candidate: Candidate) -> None:
        """Let a candidate wait for its next step."""
        self.waiting[candidate.config] = candidate
        self.queue.push(candidate)

    @property
    def late_s(self) -> float:
        """Seconds since most of the time was up; below 0 before."""
        return self.steps.budget.spent - ALONE * self.steps.budget.seconds

    def near(self) -> list[Config]:
        """What differs from the best in one thing, when most of the time is up."""
        best = self.steps.listed.best[:1] if self.late_s >= 0 else []
        return [config for outcome in best for config in neighbours(outcome.config)]

    def next_near(self) -> Candidate | None:
        """The most promising of these that was not simulated, or of these and the best ones that
        was with one cut only and is about as soon."""
        if not (near := self.near()):
            return None
        best = self.steps.listed.best
        known = map(self.waiting.get, [*near, *(outcome.config for outcome in best)])
        most_s = CLOSE * best[0].step_s
        todo = [
            one for one in known if one and (one.step < Reached.QUICK or one.reached_s < most_s)
        ]
        return min(todo, default=None)

    def vary(self) -> bool:
        """Simulate one variant of the best, or of the best of a kind that is not far behind;
        whether there was one."""
        steps = self.steps
        best = next(iter(steps.listed.best), None)
        for good in steps.variants.turns(best, FAR):
            steps.share = NEAR_SHARE if good is best else SHARE
            began = steps.budget.spent
            found = self.vary_one(good)
            steps.variants.took(good, steps.budget.spent - began)
            if found:
                return True
        return False

    def vary_one(self, good: Outcome) -> bool:
        """Simulate one variant, or rule some out; whether there was any. Where it is sooner by
        schedules that are found at once, or may be by others, they are searched for."""
        steps = self.steps
        for variant in steps.variants.of(good, steps.listed.limit):
            if variant is None:
                return True  # others come first, or the time is up
            config, stages = variant
            try:
                outcome, beside_s = steps.evaluate(config, "quick", stages), steps.quick_s(good)
                if stages.partition == good.stages.partition:
                    steps.variants.compared(good, config, steps.hoped_s(outcome) / beside_s)
                may_be_sooner = outcome.step_s < beside_s or steps.hoped_s(outcome) < good.step_s
                if may_be_sooner and not steps.is_final(outcome):
                    steps.evaluate(config, "searched", stages)
            except TooLongError:  # others of it would take as long
                return False
            steps.tell()
            return True
        return False
