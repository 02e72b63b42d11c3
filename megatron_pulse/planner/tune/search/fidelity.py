"""Fidelity levels of a config, each more expensive and more accurate than the one before.

=======  ==========================================================================================
even     estimate and bound from evenly spread work
like     estimate from partitions known for its degree and layout
cut      estimate and bound from its own partition: if no known one fits, or a bound is wanted
quick    simulation with this partition and a quick schedule
done     simulation with several partitions: this one, its own, more even stages, more room, fewer
         parameters; the best of them with searched schedules
=======  ==========================================================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.layer_costs import Unfit, UnfitError
from megatron_pulse.planner.tune.search.budget import Budget
from megatron_pulse.planner.tune.search.calibration import Calibration
from megatron_pulse.planner.tune.search.candidates import Candidate, Fidelity, KnownCuts
from megatron_pulse.planner.tune.search.grouping import (
    LayoutKey,
    has_several,
    num_stages,
    rival_names,
)
from megatron_pulse.planner.tune.search.improvement_model import ImprovementModel
from megatron_pulse.planner.tune.search.neighbourhood import Neighbourhood, recomputes_nothing
from megatron_pulse.planner.tune.search.result import Shortlist, Tuning, keep_soonest
from megatron_pulse.planner.tune.stages import Stages

FAR = 1.1
"""Ratio of the estimate to the best above which a config is bounded before it is simulated."""

CLOSE = 1.15
"""Ratio of the estimate to the best up to which cuts of a first partition are moved."""

SEARCHED = 1
"""Best partitions of a config whose schedules are searched, beside its own."""

TRIED_SHARE = 0.01
"""Share of the time left that a schedule search may take to measure its gain."""

SHARE, PROMISING_SHARE, NEAR_SHARE = 0.1, 0.25, 0.5
"""Shares of the time left for one partition or simulation: of any config, of a promising one, and
of one near the best."""

PROMISING = 0.95
"""Ratio of the estimate to the best up to which a config is promising."""


class TooLongError(Exception):
    """Work would take too much of the time left."""


class Steps:
    """Advances configs by one fidelity level, within the budget, and learns from the results.

    ``share`` is the maximum share of the time left for one piece of work.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        keep: int,
        budget: Budget,
        progress: Callable[[Tuning], None],
        finish_s: float,
    ) -> None:
        self.evaluator, self.budget, self.progress = evaluator, budget, progress
        self.finish_s = finish_s
        self.listed, self.found = Shortlist(keep), Tuning()
        self.known, self.calibration, self.improvement = (
            KnownCuts(),
            Calibration(),
            ImprovementModel(),
        )
        self.neighbourhood = Neighbourhood(evaluator, self.known)
        self.aside: list[Candidate] = []
        self.share = SHARE
        self._simulated: set[Config] = set()
        self._as_needed: set[LayoutKey] = set()

    @property
    def ended(self) -> bool:
        """True once the rest of the time is needed for a whole schedule of the best.

        If nothing is simulated yet, all of the time may be used.
        """
        if not self.listed.best:
            return self.budget.spent >= self.budget.seconds + self.finish_s
        size = self.evaluator.size(self.listed.best[0].config, whole=True)
        needed = self.budget.estimate("quick", size)
        return self.budget.left <= max(0.0, needed - self.finish_s)

    def advance(
        self, candidate: Candidate, near: bool = False, improved_s: float | None = None
    ) -> Candidate | None:
        """Candidate after its next level; None if there is none, or no time for it.

        ``near``: it is a neighbour of the best, late in the search. ``improved_s`` replaces its
        calibrated estimate.
        """
        following, best = None, self.listed.best
        expected_s = candidate.expected_s(self.calibration) if improved_s is None else improved_s
        promising = bool(best) and expected_s < PROMISING * best[0].step_s
        self.share = NEAR_SHARE if near else PROMISING_SHARE if promising else SHARE
        try:
            if candidate.step is Fidelity.EVEN:
                following = self.liken(candidate)
            elif candidate.step is Fidelity.LIKE and (near or self.must_cut(candidate)):
                following = self.cut(candidate)
            elif candidate.step is Fidelity.QUICK:
                self.complete(candidate)
            else:
                following = self.simulate(candidate)
        except UnfitError as error:
            self.refuse(candidate.config, error.reason, error.detail)
        except TooLongError:
            self.aside.append(candidate)
        self.tell()
        return following

    def liken(self, candidate: Candidate) -> Candidate:
        """Estimate from the best known partition that fits, calibrated by earlier simulations.

        With recomputation as needed, raises UnfitError if nothing would be recomputed.
        """
        config, evaluator, kind = candidate.config, self.evaluator, candidate.kind
        nothing = UnfitError(Unfit.SAME, f"{config}: no activations need recomputation")
        if as_needed := config.recompute.as_needed:
            free = self.found_by(evaluator.partitioner.unconstrained_partition, config)
            if recomputes_nothing(config, evaluator.cut(config, free)):
                raise nothing
        if not self.known.of(kind) or (as_needed and kind not in self._as_needed):
            self.learn(candidate)
        known = (evaluator.cut(config, cuts) for cuts in self.known.of(kind))
        choices = [stages for stages in known if not recomputes_nothing(config, stages)]
        if not choices:
            raise nothing
        estimates = [evaluator.estimator.cut_estimate(config, stages) for stages in choices]
        fitting = [
            i for i, stages in enumerate(choices) if evaluator.stages.fits(stages, config.split)
        ]

        def expected(i: int) -> float:
            return estimates[i] * self.calibration.of_cuts(candidate.kind, choices[i].partition)

        at = min(fitting or range(len(choices)), key=expected)
        seconds = estimates[at]
        return replace(
            candidate,
            seconds=max(seconds, candidate.bound),
            step=Fidelity.LIKE,
            stages=choices[at] if fitting else None,
        )

    def must_cut(self, candidate: Candidate) -> bool:
        """True if no known partition fits, or a bound is preferred to a simulation."""
        return candidate.stages is None or self.is_far(candidate)

    def is_far(self, candidate: Candidate) -> bool:
        """True if the candidate is unlikely to be the best."""
        best = self.listed.best
        return bool(best) and candidate.expected_s(self.calibration) > FAR * best[0].step_s

    def cut(self, candidate: Candidate) -> Candidate:
        """Estimate and bound from the config's own partition."""
        config, stages = candidate.config, self.own(candidate)
        bound = max(candidate.bound, self.evaluator.bound(config, stages))
        seconds = max(bound, self.evaluator.estimator.cut_estimate(config, stages))
        return replace(candidate, seconds=seconds, bound=bound, step=Fidelity.CUT, stages=stages)

    def learn(self, candidate: Candidate) -> None:
        """Remember partitions that are quick to find for this candidate."""
        near_s = CLOSE * self.listed.best[0].step_s if self.listed.best else float("inf")
        for cuts in self.found_by(
            self.evaluator.balancer.quick_partitions, candidate.config, near_s
        ):
            self.known.learn(candidate.kind, cuts)
        if candidate.config.recompute.as_needed:
            self._as_needed.add(candidate.kind)

    def own(self, candidate: Candidate) -> Stages:
        """Stages of the config's own partition, which is remembered."""
        stages = self.found_by(self.evaluator.feasible.best, candidate.config)
        self.known.learn(candidate.kind, stages.partition)
        return stages

    def found_by[T](self, cut: Callable[..., T], config: Config, *limits: float) -> T:
        """Result of ``cut``; raises TooLongError if it would take too long."""
        with self.within(*work_of(cut, config)):
            return cut(config, *limits)

    def simulate(self, candidate: Candidate) -> Candidate:
        """Simulate with a quick schedule.

        The first config of a degree and layout is also simulated with more even stages: estimates
        neglect how unequal stages wait for each other.
        """
        config, evaluator = candidate.config, self.evaluator
        first = not self.calibration.know(candidate.kind)
        outcome = self.evaluate(config, "quick", candidate.stages)
        if first and config.layout.num_chunks > 1:
            near = not has_several(config) and not self.is_far(candidate)
            for find in [evaluator.partitioner.near_optimal_partitions] * near + [
                evaluator.partitioner.even_stage_partitions
            ]:
                with suppress(UnfitError, TooLongError):
                    for cuts in self.found_by(find, config):
                        self.known.learn(candidate.kind, cuts)
                        beside = self.evaluate(config, "quick", evaluator.cut(config, cuts))
                        outcome = min(outcome, beside, key=lambda o: o.step_s)
        return replace(
            candidate,
            seconds=self.improved_s(outcome),
            step=Fidelity.QUICK,
            stages=outcome.stages,
            reached_s=outcome.step_s,
        )

    def is_final(self, outcome: Outcome) -> bool:
        """True if the schedule bound shows that a search for a shorter schedule is useless."""
        certificate = outcome.synthesis.certificate
        least = certificate.lower_bound + outcome.optimizer_s
        return certificate.proved or (not outcome.extrapolated and least >= self.listed.limit)

    def complete(self, candidate: Candidate) -> None:
        """Simulate with several partitions, then search schedules for its own and the best of
        them."""
        config, evaluator = candidate.config, self.evaluator
        assert candidate.stages is not None
        choices, own = [candidate.stages], candidate.stages.partition
        with suppress(UnfitError, TooLongError):
            choices.append(self.own(candidate))
            own = choices[-1].partition
        more = [
            evaluator.balancer.quick_partitions,
            evaluator.feasible.alternatives,
            evaluator.balancer.balanced_partitions,
        ]
        more += [evaluator.partitioner.near_optimal_partitions] * (config.layout.num_chunks > 1)
        more += [evaluator.partitioner.even_stage_partitions] * has_several(config)
        for find in more:
            with suppress(UnfitError, TooLongError):
                choices += [evaluator.cut(config, cuts) for cuts in self.found_by(find, config)]
        todo = [(candidate.reached_s, candidate.seconds, candidate.stages)]
        seen = [candidate.stages.partition]
        for stages in choices[1:]:
            if stages.partition not in seen and evaluator.stages.fits(stages, config.split):
                seen.append(stages.partition)
                quick = self.evaluate(config, "quick", stages)
                todo.append((quick.step_s, self.improved_s(quick), stages))
        todo.sort(key=lambda each: each[0])
        self.known.learn(candidate.kind, todo[0][2].partition)
        for rank, (_, improved_s, stages) in enumerate(todo):
            best_s = self.listed.best[0].step_s if self.listed.best else float("inf")
            if improved_s < best_s and (rank < SEARCHED or stages.partition == own):
                self.evaluate(config, "searched", stages)

    def evaluate(self, config: Config, how: str, stages: Stages | None) -> Outcome:
        """Simulate, and list the outcome if it fits the devices."""
        found = self.found
        with self.within(how, self.evaluator.size(config)):
            outcome = self.evaluator.evaluate(config, quick=how == "quick", stages=stages)
        names = rival_names(config)
        if config not in self._simulated:
            found.simulated.update(names)
        self._simulated.add(config)
        (self.improvement.simulated if how == "quick" else self.improvement.searched)(outcome)
        found.num_simulated = len(self._simulated)
        expected = self.evaluator.estimator.cut_estimate(config, outcome.stages)
        self.calibration.took(config, outcome.stages.partition, outcome.step_s / expected)
        self.neighbourhood.add(outcome)
        if not self.evaluator.has_room(outcome):
            return outcome
        self.listed.add(outcome)
        for name in names:
            keep_soonest(found.rivals, name, outcome)
        return outcome

    @contextmanager
    def within(self, work: str, size: float) -> Iterator[None]:
        """Context for work that must not take too much of the time left."""
        if self.listed.best and not self.budget.fits(work, size, self.share):
            raise TooLongError
        with self.budget.timed(work, size):
            yield

    def tell(self) -> None:
        """Report the result so far."""
        self.found.outcomes, self.found.near = self.listed.best, self.listed.near
        self.found.seconds = self.budget.spent
        self.progress(self.found)

    def quick_s(self, outcome: Outcome) -> float:
        """Step time with a quick schedule."""
        known = self.improvement.quick_s(outcome)
        return known or self.evaluate(outcome.config, "quick", outcome.stages).step_s

    def improved_s(self, quick: Outcome) -> float:
        """Expected step time after a schedule search."""
        if self.is_final(quick):
            return quick.step_s
        size = self.evaluator.size(quick.config)
        return self.improvement.of(quick, self.budget.fits("searched", size, TRIED_SHARE))

    def refuse(self, config: Config, reason: Unfit, detail: str) -> None:
        """Count a refusal."""
        self.found.refused[reason] += 1
        self.found.examples.setdefault(reason, detail)
        self.count(config, reason)

    def count(self, config: Config, reason: Unfit) -> None:
        """Count a config of a pipeline degree that was not simulated."""
        self.found.degrees.setdefault(config.pipeline, Counter())[reason] += 1


def work_of(cut: Callable[..., object], config: Config) -> tuple[str, int]:
    """Kind and size of a partition search for the budget.

    Recomputation as needed takes many times as long.
    """
    how = " as needed" if config.recompute.as_needed else ""
    return f"{cut.__name__}{how}, {config.layout}", num_stages(config) ** 2
