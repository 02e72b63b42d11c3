"""Refinement: whole schedules for the best configs of a search.

A search simulates part of a step and extrapolates. The error is some percent if links are about as
busy as devices, since small shifts change which messages queue. The best configs are therefore
compared by whole steps, with several partitions of each:

- quick schedules for all configs, long ones only for the best,
- longer schedule searches, best first,
- local search over the cuts of the best config and of close ones, in turn,
- another schedule search for the new best,
- the best few by ``solver`` in the time left,
- local search again in the time left after that.
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
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.fixed_order_estimate import FixedOrder
from megatron_pulse.planner.tune.layer_costs import UnfitError
from megatron_pulse.planner.tune.link_contention import schedules
from megatron_pulse.planner.tune.search.budget import Budget, Clock
from megatron_pulse.planner.tune.search.fidelity import FAR
from megatron_pulse.planner.tune.search.grouping import rival_names
from megatron_pulse.planner.tune.search.neighbourhood import recomputes_nothing
from megatron_pulse.planner.tune.search.result import (
    Tried,
    Tuning,
    execution_key,
    simplicity,
    tried,
)

LARGEST = 40_000
"""Operations of a step above which only a quick schedule is made."""

LEAST_S = 2.0
"""Minimum seconds per solved schedule, about the start time of a solver on a busy machine."""

AT_ONCE_SHARE, SEARCHED_SHARE, MOVED_SHARE = 0.4, 0.25, 0.5
"""Shares of the time left for the first rounds."""

STARTS = 1.5
"""Assumed time of one start of a schedule search, relative to a quick schedule, before one is
timed."""

UNTIMED, OVER = 3, 4 / 3
"""Whole schedules that may exceed the budget to make the best config whole, and the factor by
which."""

CLOSE = 1.04
"""Ratio to the best step up to which schedules are searched and cuts are moved."""

GAIN = 1.002
"""Ratio of the quick to the searched step above which schedules of moved cuts are searched too."""

MOVED, TRIED = 200, 4
"""Moved partitions that are re-timed in the best schedule's order, and the best of these that get
schedules of their own."""


def finish(
    evaluator: Evaluator,
    found: Tuning,
    seconds: float,
    solver: str = "auto",
    count: int = 3,
    clock: Clock | None = None,
) -> None:
    """Refine the best configs with whole schedules in about ``seconds``, and sort anew.

    ``count`` configs are searched again after moving cuts, and solved. A schedule from the search
    stays if it has all microbatches and is shorter. After the budget, only the best config still
    gets a whole schedule, so that it can run.
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
        found.rivals[name] = next((o for o in whole if name in rival_names(o.config)), rival)
    found.seconds += budget.spent


def _rank(outcome: Outcome) -> tuple[object, ...]:
    return outcome.step_s, simplicity(outcome.config)


class _Rounds:
    """Outcomes, with whole steps as far as known."""

    def __init__(self, evaluator: Evaluator, found: Tuning, budget: Budget) -> None:
        self.evaluator, self.budget = evaluator, budget
        self.most = len(found.outcomes)
        every = {tried(outcome): outcome for outcome in (*found.near, *found.outcomes)}
        alike: dict[tuple[object, ...], Outcome] = {}
        for outcome in sorted(every.values(), key=_rank):
            alike.setdefault(execution_key(outcome), outcome)
        self.listed: dict[Tried, Outcome] = {tried(o): o for o in alike.values()}
        self._extrapolated_s = {tried(o): o.step_s for o in alike.values() if o.extrapolated}
        self._at_once: dict[Tried, float] = {}
        self._searched: set[Tried] = set()
        self._moved: set[Tried] = set()
        self._moving_s: defaultdict[Config, float] = defaultdict(float)

    def ranked(self) -> list[Outcome]:
        return sorted(self.listed.values(), key=_rank)

    def once(self) -> list[Outcome]:
        """Shortest outcome of each config, without equivalent configs. A whole step comes first."""
        best: dict[Config, Outcome] = {}
        seen: set[tuple[object, ...]] = set()
        ranked = self.ranked()
        for outcome in (*[o for o in ranked if not o.extrapolated][:1], *ranked):
            same = execution_key(outcome)
            if outcome.config not in best and same not in seen:
                best[outcome.config] = outcome
            seen.add(same)
        return list(best.values())[: self.most]

    def settle(self) -> None:
        """Make whole schedules until the best outcome is whole, as far as time allows.

        Time is exceeded if no whole step is near the best.
        """
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
        """Make whole schedules of that effort for the ``count`` best in a share of the time.

        Schedule searches are limited to outcomes near the best, or near it by extrapolation: a
        quick whole schedule is sometimes far longer.
        """
        until = self.budget.spent + share * self.budget.left

        def promised_s(outcome: Outcome) -> float:
            extrapolated_s = self._extrapolated_s.get(tried(outcome), outcome.step_s)
            return min(outcome.step_s, extrapolated_s) if effort else outcome.step_s

        for outcome in sorted(self.ranked(), key=promised_s)[:count]:
            far = promised_s(outcome) >= CLOSE * self.ranked()[0].step_s
            if self.work(outcome) > LARGEST or (
                effort and (far or tried(outcome) in self._searched)
            ):
                continue
            if self.has_time(*self.making(outcome, effort), until):
                self.schedule(outcome, effort)

    def move(self, share: float) -> None:
        """Local search over cuts of the best outcome and close ones, in turn, in a share of the
        time."""
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
        """Next outcome for local search, or None.

        The best config gets as much time as all others together.
        """
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
        """Moved partitions with the shortest re-timed steps."""
        played: dict[Partition, float] = {}
        fixed_order, known = FixedOrder(self.evaluator, best), {*self.listed, *self._searched}
        moved = self.evaluator.partitioner.neighbour_partitions(best.config, best.stages.partition)
        for cuts in islice(moved, MOVED):
            if not self.has_time("in order", self.work(best), until):
                break
            if (best.config, cuts) not in known:
                with self.budget.timed("in order", self.work(best)):
                    stages = self.evaluator.stages.build(best.config, cuts, best.stages.activations)
                    played[cuts] = fixed_order.step_s(stages)
        return sorted(played, key=played.__getitem__)[:TRIED]

    def cut(self, best: Outcome, cuts: Partition, until: float) -> None:
        """Try a moved partition; search its schedule if that promises a gain."""
        with suppress(UnfitError):
            stages = self.evaluator.cut(best.config, cuts)
            fits = self.evaluator.stages.fits(stages, best.config.split)
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
        """Make whole schedules by ``solver`` for the ``count`` fastest configs, as time allows.

        Nothing comes from the cache: an answer must not depend on earlier ones.
        """
        done: set[Tried] = set()
        part_s = max(LEAST_S, self.budget.left / max(1, count))
        while todo := [o for o in self.once()[:count] if tried(o) not in done]:
            outcome, seconds = todo[0], min(self.budget.left, part_s)
            done.add(tried(outcome))
            if seconds >= LEAST_S and self.work(outcome) <= LARGEST:
                self.compare(outcome, solve(self.problem(outcome), seconds, solver))

    def schedule(self, outcome: Outcome, effort: int) -> None:
        """Make a whole schedule of that effort.

        A whole step may need more memory than the simulated part. If neither lower caps nor a
        schedule search make it fit, the outcome is dropped.
        """
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
        """Outcome with that schedule if it fits the devices. It is kept if it is the first whole
        one, or shorter."""
        whole = self.evaluator.evaluate(outcome.config, found, stages=outcome.stages)
        if not self.evaluator.has_room(whole):
            return None
        if outcome.extrapolated or whole.step_s < outcome.step_s:
            self.listed[tried(outcome)] = whole
        return whole

    def problem(self, outcome: Outcome) -> ScheduleProblem:
        config = outcome.config
        count = config.num_microbatches(self.evaluator.global_batch_size)
        return self.evaluator.problem(config, count, outcome.stages)

    def work(self, outcome: Outcome) -> int:
        return self.evaluator.size(outcome.config, whole=True)

    def making(self, outcome: Outcome, effort: int = 0) -> tuple[str, float]:
        """Kind and size of a whole schedule of that effort as work."""
        return f"schedule, {effort}", self.work(outcome) * (1 + STARTS * effort)

    def has_time(self, kind: str, work: float, until: float) -> bool:
        return self.budget.spent + self.budget.estimate(kind, work) <= until
