"""Whole schedules for the best configs that a search found.

A search simulates a part of a step and goes on from there, which is some percent from the truth
where links have as much to do as devices: what begins little sooner or later changes which message
waits for which. So in the end the best are told apart by whole steps, other cuts of the same config
among them::

    at once     all of them, by schedules that are found at once; long ones if they are the best
    searched    by schedules that are searched for, the soonest first
    moved       the best with its layers moved, and so on; what comes near it, by turns
    searched    what is the best by then
    solved      the best few in the time that is left, by what ``solver`` says
    moved       again, in what is left after that
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice

from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.schedule.problem import ScheduleProblem, Synthesis
from megatron_pulse.planner.schedule.solve import solve
from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.costs import UnfitError
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.in_order import InOrder
from megatron_pulse.planner.tune.queueing import schedules
from megatron_pulse.planner.tune.searching.budget import Budget, Clock
from megatron_pulse.planner.tune.searching.kinds import names_of
from megatron_pulse.planner.tune.searching.steps import FAR
from megatron_pulse.planner.tune.searching.tuning import (
    Tried,
    Tuning,
    simplicity,
    tried,
    what_runs,
)
from megatron_pulse.planner.tune.searching.variants import recomputes_nothing

LARGEST = 40_000
"""Operations of a step beyond which its schedule is the first that is found."""

LEAST_S = 2.0
"""Seconds for a schedule below which none is solved for: on a busy machine a solver takes as long
to start."""

AT_ONCE_SHARE, SEARCHED_SHARE, MOVED_SHARE = 0.4, 0.25, 0.5
"""Of the time that is left, for the first rounds."""

STARTS = 1.5
"""Times as long as for a schedule that is found at once each start of a search is taken to need,
before one was timed: of steps of 128 to 12,288 operations 0 to 1.6."""

UNTIMED, OVER = 3, 4 / 3
"""Whole schedules that are made in some more time to make the best one whole, and times as long as
all is to take that it may take then: a tenth of all seconds of a decision."""

CLOSE = 1.04
"""Times the best, up to which schedules of a step are searched for, and its layers moved."""

GAIN = 1.002
"""Times a step by a searched schedule that it takes by one that is found at once, from which
schedules of moved cuts are searched for too."""

MOVED, TRIED = 200, 4
"""Moved cuts that are played in the order of the best's schedule, and of these the soonest that get
schedules of their own."""


def finish(
    evaluator: Evaluator,
    found: Tuning,
    seconds: float,
    solver: str = "auto",
    count: int = 3,
    clock: Clock | None = None,
) -> None:
    """Find whole schedules for the best, in about ``seconds`` altogether; sort anew.

    ``count`` are searched for again once layers were moved, and solved. A schedule of the search is
    kept where it is of all microbatches and sooner. Once the time is spent, only what then is the
    best still gets a whole schedule, so that it can run.
    """
    budget = Budget(seconds, clock)
    rounds = _Rounds(evaluator, found, budget)
    rounds.go(0, AT_ONCE_SHARE)
    rounds.settle()
    rounds.go(evaluator.effort, SEARCHED_SHARE)
    rounds.move(MOVED_SHARE)
    rounds.go(evaluator.effort, SEARCHED_SHARE, count)
    rounds.solve(solver, count)
    rounds.settle()
    rounds.move(1.0)
    found.outcomes = rounds.once()
    whole = [one for one in rounds.ranked() if not one.extrapolated]
    for name, rival in found.rivals.items():
        found.rivals[name] = next((o for o in whole if name in names_of(o.config)), rival)
    found.seconds += budget.spent


def _rank(outcome: Outcome) -> tuple[object, ...]:
    return outcome.step_s, simplicity(outcome.config)


class _Rounds:
    """What was found, as whole steps as far as these are known."""

    def __init__(self, evaluator: Evaluator, found: Tuning, budget: Budget) -> None:
        self.evaluator, self.budget = evaluator, budget
        self.most = len(found.outcomes)
        every = {tried(outcome): outcome for outcome in (*found.near, *found.outcomes)}
        alike: dict[tuple[object, ...], Outcome] = {}
        for outcome in sorted(every.values(), key=_rank):
            alike.setdefault(what_runs(outcome), outcome)
        self.listed: dict[Tried, Outcome] = {tried(o): o for o in alike.values()}
        self._at_once: dict[Tried, float] = {}
        self._searched: set[Tried] = set()
        self._moved: set[Tried] = set()
        self._moving_s: defaultdict[Config, float] = defaultdict(float)

    def ranked(self) -> list[Outcome]:
        """All, the soonest first."""
        return sorted(self.listed.values(), key=_rank)

    def once(self) -> list[Outcome]:
        """The soonest of each config, and what runs the same only once; where there was no time to
        know of any that it is sooner, the soonest whole step is the first."""
        best: dict[Config, Outcome] = {}
        seen: set[tuple[object, ...]] = set()
        ranked = self.ranked()
        for outcome in (*[o for o in ranked if not o.extrapolated][:1], *ranked):
            same = what_runs(outcome)
            if outcome.config not in best and same not in seen:
                best[outcome.config] = outcome
            seen.add(same)
        return list(best.values())[: self.most]

    def settle(self) -> None:
        """Let what is the soonest be whole, as long as there is time, and for some a little more;
        in any case where no whole step is near it."""
        for number in itertools.count():
            ranked = self.ranked()
            if not ranked or not ranked[0].extrapolated:
                return
            until = self.budget.seconds * (1 if number >= UNTIMED else OVER)
            near_s = FAR * ranked[0].step_s
            some = any(not one.extrapolated and one.step_s < near_s for one in ranked)
            if some and not self.has_time(*self.making(ranked[0]), until):
                return
            self.schedule(ranked[0], 0)

    def go(self, effort: int, share: float, count: int | None = None) -> None:
        """Whole schedules of that effort for the ``count`` soonest, or all, that have none, within
        a share of the time; if they are searched for, of what is near the best."""
        until = self.budget.spent + share * self.budget.left
        for outcome in self.ranked()[:count]:
            far = outcome.step_s >= CLOSE * self.ranked()[0].step_s
            if self.work(outcome) > LARGEST or (
                effort and (far or tried(outcome) in self._searched)
            ):
                continue
            if self.has_time(*self.making(outcome, effort), until):
                self.schedule(outcome, effort)

    def move(self, share: float) -> None:
        """The best with its layers moved, then what comes near it, by turns of their configs,
        within a share of the time."""
        until = self.budget.spent + share * self.budget.left
        while (good := self.unmoved()) is not None and self.budget.spent < until:
            began = self.budget.spent
            has_time = self.has_time(*self.making(good), until)
            if good.extrapolated and has_time:
                self.schedule(good, 0)
            else:
                self._moved.add(tried(good))
            if not good.extrapolated:
                for cuts in self.promising(good, (began + until) / 2):
                    if self.has_time(*self.making(good), until):
                        self.cut(good, cuts, until)
            self._moving_s[good.config] += self.budget.spent - began

    def unmoved(self) -> Outcome | None:
        """The next whose layers are moved: one of the best's config, which has as much time for
        that as all others together, or the soonest of that which had the least so far; None if all
        that is near was."""
        ranked = [outcome for outcome in self.ranked() if self.work(outcome) <= LARGEST]
        first: dict[Config, Outcome] = {}
        for outcome in ranked:
            if outcome.step_s < CLOSE * ranked[0].step_s and tried(outcome) not in self._moved:
                first.setdefault(outcome.config, outcome)

        def had(config: Config) -> float:
            share = max(1, len(first) - 1) if config == ranked[0].config else 1
            return self._moving_s[config] / share

        return first[min(first, key=had)] if first else None

    def promising(self, best: Outcome, until: float) -> list[Partition]:
        """The best's cuts with layers moved, those that are soonest in the order of its schedule,
        as far as there is time to look."""
        played: dict[Partition, float] = {}
        in_order, known = InOrder(self.evaluator, best), {*self.listed, *self._searched}
        moved = self.evaluator.moved_cuts(best.config, best.stages.partition)
        for cuts in islice(moved, MOVED):
            if not self.has_time("in order", self.work(best), until):
                break
            if (best.config, cuts) not in known:
                with self.budget.timed("in order", self.work(best)):
                    stages = self.evaluator.cut_with(best.config, cuts, best.stages.relief)
                    played[cuts] = in_order.step_s(stages)
        return sorted(played, key=played.__getitem__)[:TRIED]

    def cut(self, best: Outcome, cuts: Partition, until: float) -> None:
        """The best with these cuts instead, if they fit; its schedule is searched for where that
        gained for the best and what is found at once is sooner than what was for the best."""
        with suppress(UnfitError):
            stages = self.evaluator.cut(best.config, cuts)
            fits = self.evaluator.fits(stages, best.config.split)
            if not fits or recomputes_nothing(best.config, stages):
                return
            moved = replace(best, stages=stages, extrapolated=True)
            self.schedule(moved, 0)
            before_s, effort = self._at_once.get(tried(best), 0.0), self.evaluator.effort
            sooner = self._at_once.get(tried(moved), before_s) < before_s
            if sooner and before_s > GAIN * best.step_s:
                if self.has_time(*self.making(moved, effort), until):
                    self.schedule(self.listed[tried(moved)], effort)

    def solve(self, solver: str, count: int) -> None:
        """Whole schedules by ``solver`` for the ``count`` soonest configs, as far as there is time
        for it; none from the cache, for an answer is not to depend on what was asked before."""
        done: set[Tried] = set()
        part_s = max(LEAST_S, self.budget.left / max(1, count))
        while todo := [o for o in self.once()[:count] if tried(o) not in done]:
            outcome, seconds = todo[0], min(self.budget.left, part_s)
            done.add(tried(outcome))
            if seconds >= LEAST_S and self.work(outcome) <= LARGEST:
                self.compare(outcome, solve(self.problem(outcome), seconds, solver))

    def schedule(self, outcome: Outcome, effort: int) -> None:
        """A whole schedule of that effort. More may be held than in the part that was simulated: if
        devices have no room for it with lower caps either, nor, where the search had found that
        they have, for one that is searched for, there is no outcome."""
        config, stages, until = outcome.config, outcome.stages, self.budget.seconds
        if effort:
            self._searched.add(tried(outcome))

        def has_time(effort: int) -> bool:
            return self.has_time(*self.making(outcome, effort), until)

        with self.budget.timed(*self.making(outcome, effort)):
            make = partial(schedules, edges=stages.edges, effort=effort, bounded=effort > 0)
            of = config, stages, self.problem(outcome), make, partial(has_time, effort)
            whole = self.compare(outcome, self.evaluator.with_room(*of)[0])
        if whole is not None and not effort:
            self._at_once[tried(outcome)] = whole.step_s
        if whole is not None or not outcome.extrapolated:
            return
        more, is_listed = self.evaluator.effort, tried(outcome) in self.listed
        if is_listed and effort < more and has_time(more):
            self.schedule(outcome, more)
        else:
            self.listed.pop(tried(outcome), None)

    def compare(self, outcome: Outcome, found: Synthesis) -> Outcome | None:
        """The outcome by that schedule, if devices have room for it; kept if it is the first that
        is whole, or sooner."""
        whole = self.evaluator.evaluate(outcome.config, found, stages=outcome.stages)
        if not self.evaluator.has_room(whole):
            return None
        if outcome.extrapolated or whole.step_s < outcome.step_s:
            self.listed[tried(outcome)] = whole
        return whole

    def problem(self, outcome: Outcome) -> ScheduleProblem:
        """Of all microbatches."""
        config = outcome.config
        count = config.num_microbatches(self.evaluator.global_batch_size)
        return self.evaluator.problem(config, count, outcome.stages)

    def work(self, outcome: Outcome) -> int:
        """Operations of the whole step."""
        return self.evaluator.size(outcome.config, whole=True)

    def making(self, outcome: Outcome, effort: int = 0) -> tuple[str, float]:
        """A whole schedule of that effort as work: kind and size."""
        return f"schedule, {effort}", self.work(outcome) * (1 + STARTS * effort)

    def has_time(self, kind: str, work: float, until: float) -> bool:
        """Whether work on a whole step ends in time."""
        return self.budget.spent + self.budget.estimate(kind, work) <= until
