"""Branch and bound over all configs, the most promising first, with an answer at any moment.

1. Warm start (``warm_start``): all configs without a pipeline, and the best of every degree and
   layout, are simulated, fewest stages first. Their results correct the other estimates.
2. Configurations that simulate far slower than estimated try other partitions first.
3. The candidate with the least expected time advances to its next fidelity level (``steps``).
   Simulations of equal ranks calibrate the estimates.
4. Late in the search, neighbours of the best config take turns with the queue (``neighbourhood``).

Candidates with a lower bound above all kept outcomes are dropped. A candidate far from the best by
its estimate gets such a bound from its own partition before any simulation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import isinf

from megatron_pulse.planner.program import simulate
from megatron_pulse.planner.schedule.search import synthesize
from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.layer_costs import Unfit
from megatron_pulse.planner.tune.search.budget import Budget
from megatron_pulse.planner.tune.search.candidates import (
    Candidate,
    Fidelity,
    Queue,
    promising_first,
)
from megatron_pulse.planner.tune.search.fidelity import (
    FAR,
    NEAR_SHARE,
    SHARE,
    Steps,
    TooLongError,
)
from megatron_pulse.planner.tune.search.grouping import LayoutKey, by_kind, neighbours
from megatron_pulse.planner.tune.search.result import Tuning
from megatron_pulse.planner.tune.search.warm_start import SIMULATED_SHARE, WarmStart
from megatron_pulse.processes import without_collecting

ALONE = 0.3
"""Share of the time in which estimates alone decide the order."""

CLOSE = 1.05
"""Ratio to the best up to which neighbours are simulated with other partitions."""

DOUBTFUL = 1.1
"""Ratio to the estimate above which a first simulation is doubted."""

SPARE, WIDER = 3.0, (2.0, 5.0)
"""For an exhausted queue: multiple of the time so far that may follow, and factors by which the
neighbourhoods widen."""

DOUBTED, LEAST = 0.3, 0.2
"""Share of the time until which doubtful simulations are reviewed, and minimum share of what is
left."""

VARIED = 0.8
"""Share of the later time that goes to neighbours of good configs."""


def search(
    evaluator: Evaluator,
    candidates: Iterable[Config],
    keep: int = 10,
    budget: Budget | None = None,
    progress: Callable[[Tuning], None] = lambda _: None,
    finish_s: float = float("inf"),
) -> Tuning:
    """The ``keep`` best of ``candidates`` that were examined within ``budget`` (default: all).

    The budget begins after compilation. It ends earlier if a whole schedule of the best will take
    more than ``finish_s``. It ends up to ``finish_s`` later if nothing is simulated yet. Of
    equivalent configs the simplest is listed. ``progress`` is called after every step.
    """
    began = time.monotonic()
    synthesize.compile_search()
    simulate.compile_simulator()
    ready_s = time.monotonic() - began
    budget = budget or Budget(float("inf"))
    with without_collecting():
        budget.begin()
        found = _ConfigSearch(Steps(evaluator, keep, budget, progress, finish_s)).run(candidates)
    found.ready_s = ready_s
    return found


class _ConfigSearch:
    def __init__(self, steps: Steps) -> None:
        self.steps, self.warm_start = steps, WarmStart(steps)
        self.queue = Queue(steps.calibration)
        self.waiting: dict[Config, Candidate] = {}

    def run(self, candidates: Iterable[Config]) -> Tuning:
        steps = self.steps
        kinds = by_kind(candidates)
        for some in kinds[:1], kinds[1:]:  # a first answer before thousands of estimates
            for alike in promising_first(map(self.warm_start.estimated, some)):
                for candidate in self.warm_start.look(alike):
                    self.wait(candidate)
        most_s = max(DOUBTED * steps.budget.seconds, steps.budget.spent + LEAST * steps.budget.left)
        for candidate in self.doubtful():
            if steps.ended or steps.budget.spent > most_s:
                break
            self.take(candidate)
        while self.queue and not steps.ended:
            varied_s = VARIED * self.late_s
            while not steps.ended and steps.neighbourhood.spent_s < varied_s and self.vary():
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
        """Use the rest of a budget once the queue is empty.

        Schedules are searched for all close outcomes, then neighbourhoods are widened.
        """
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
            steps.neighbourhood.widen(margin)
            while not ended() and self.vary():
                pass

    def counted(self) -> Tuning:
        """Search result, with counts of what became of the other configs."""
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
        if self.warm_start.unseen:
            found.num_left, found.bound_s = found.num_left + self.warm_start.unseen, 0.0
        if same := len(waited) - len(rest):
            found.refused[Unfit.SAME] += same
        found.seconds = self.steps.budget.spent
        return found

    def doubtful(self) -> list[Candidate]:
        """Best candidate of each degree and layout that simulated far slower than estimated,
        cheapest first.

        Only those with an estimate near the best, and a short simulation, are returned.
        """
        steps, first = self.steps, dict[LayoutKey, Candidate]()
        most_s = FAR * steps.listed.best[0].step_s if steps.listed.best else 0.0
        for one in sorted(self.waiting.values(), key=lambda c: c.reached_s):
            if one.step is Fidelity.QUICK:
                first.setdefault(one.kind, one)
        found: list[tuple[float, Candidate]] = []  # (simulation size times estimate, candidate)
        for one in first.values():
            assert one.stages is not None
            seconds = steps.evaluator.estimator.cut_estimate(one.config, one.stages)
            size = steps.evaluator.size(one.config)
            soon = steps.budget.fits("quick", size, SIMULATED_SHARE)
            if soon and DOUBTFUL * seconds < one.reached_s and seconds < most_s:
                found.append((size * seconds, one))
        return [one for _, one in sorted(found)]

    def take(self, candidate: Candidate) -> None:
        """Advance a candidate, or drop it by its bound."""
        del self.waiting[candidate.config]
        if candidate.bound >= self.steps.listed.limit:
            self.steps.refuse(candidate.config, Unfit.SLOWER, str(candidate.config))
            return
        following = self.steps.advance(candidate, near=candidate.config in self.near())
        if following is not None:
            self.wait(following)

    def wait(self, candidate: Candidate) -> None:
        self.waiting[candidate.config] = candidate
        self.queue.push(candidate)

    @property
    def late_s(self) -> float:
        """Seconds since estimates alone decided; negative before."""
        return self.steps.budget.spent - ALONE * self.steps.budget.seconds

    def near(self) -> list[Config]:
        """Neighbours of the best config, late in the search."""
        best = self.steps.listed.best[:1] if self.late_s >= 0 else []
        return [config for outcome in best for config in neighbours(outcome.config)]

    def next_near(self) -> Candidate | None:
        """Most promising neighbour without a simulation, or close outcome with a single
        partition."""
        if not (near := self.near()):
            return None
        best = self.steps.listed.best
        known = map(self.waiting.get, [*near, *(outcome.config for outcome in best)])
        most_s = CLOSE * best[0].step_s
        todo = [
            one for one in known if one and (one.step < Fidelity.QUICK or one.reached_s < most_s)
        ]
        return min(todo, default=None)

    def vary(self) -> bool:
        """Simulate one variant of a good config. Returns False if there is none."""
        steps = self.steps
        best = next(iter(steps.listed.best), None)
        for good in steps.neighbourhood.turns(best, FAR):
            steps.share = NEAR_SHARE if good is best else SHARE
            began = steps.budget.spent
            found = self.vary_one(good)
            steps.neighbourhood.took(good, steps.budget.spent - began)
            if found:
                return True
        return False

    def vary_one(self, good: Outcome) -> bool:
        """Simulate one variant of ``good``, or rule some out. Returns False if there is none.

        If the variant is or may be shorter, its schedule is searched.
        """
        steps = self.steps
        for variant in steps.neighbourhood.of(good, steps.listed.limit):
            if variant is None:
                return True  # give others a turn, and check the clock
            config, stages = variant
            try:
                outcome, beside_s = steps.evaluate(config, "quick", stages), steps.quick_s(good)
                if stages.partition == good.stages.partition:
                    steps.neighbourhood.compared(good, config, steps.improved_s(outcome) / beside_s)
                may_be_sooner = outcome.step_s < beside_s or steps.improved_s(outcome) < good.step_s
                if may_be_sooner and not steps.is_final(outcome):
                    steps.evaluate(config, "searched", stages)
            except TooLongError:  # its other variants would take as long
                return False
            steps.tell()
            return True
        return False
