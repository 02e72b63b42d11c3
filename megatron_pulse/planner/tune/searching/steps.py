"""The steps that a config takes, each dearer and nearer to the truth than the one before.

=======  ==========================================================================================
even     estimate and bound from the work, spread evenly
like     estimate from cuts that are known for its degree and layout, made for whichever config
cut      estimate and bound from its own cuts: where none of the known fit, or a bound is wanted
quick    simulated with these cuts and a schedule that is found at once: something that would run
done     simulated with these cuts, its own, and cuts that have more even stages, more room or
         fewer parameters; the best of them with schedules that were searched for
=======  ==========================================================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.costs import Unfit, UnfitError
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.searching.budget import Budget
from megatron_pulse.planner.tune.searching.candidates import Candidate, KnownCuts, Reached
from megatron_pulse.planner.tune.searching.corrections import Corrections
from megatron_pulse.planner.tune.searching.hopes import Hopes
from megatron_pulse.planner.tune.searching.kinds import Kind, has_several, names_of, num_stages
from megatron_pulse.planner.tune.searching.tuning import Shortlist, Tuning, keep_soonest
from megatron_pulse.planner.tune.searching.variants import Variants, recomputes_nothing
from megatron_pulse.planner.tune.stages import Stages

FAR = 1.1
"""Times the best by its estimate, from which a config is bounded before it is simulated."""

CLOSE = 1.15
"""Times the best by its estimate, up to which a kind's first cuts are moved by layers."""

SEARCHED = 1
"""Cuts of a config for which schedules are searched, the soonest, beside its own."""

TRIED_SHARE = 0.01
"""Of the time that is left, what a search for a config's schedule may take so that one is made to
see what it gains."""

SHARE, PROMISING_SHARE, NEAR_SHARE = 0.1, 0.25, 0.5
"""Of the time that is left, what one cut or simulation may take; one of what may be much sooner;
and one near the best."""

PROMISING = 0.95
"""Times the best by its estimate, up to which a config may be much sooner."""


class TooLongError(Exception):
    """A piece of work would take too much of the time that is left."""


class Steps:
    """Takes configs a step further, as long as there is time, and keeps what that says of others.

    ``share`` of what is left of the time is what a piece of work may take at the most.
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
        self.known, self.corrections, self.hopes = KnownCuts(), Corrections(), Hopes()
        self.variants = Variants(evaluator, self.known)
        self.aside: list[Candidate] = []
        self.share = SHARE
        self._simulated: set[Config] = set()
        self._as_needed: set[Kind] = set()

    @property
    def ended(self) -> bool:
        """Whether the time is up that is not needed for a whole schedule of the best, or all of it
        where nothing was simulated."""
        if not self.listed.best:
            return self.budget.spent >= self.budget.seconds + self.finish_s
        size = self.evaluator.size(self.listed.best[0].config, whole=True)
        needed = self.budget.estimate("quick", size)
        return self.budget.left <= max(0.0, needed - self.finish_s)

    def advance(
        self, candidate: Candidate, near: bool = False, hoped_s: float | None = None
    ) -> Candidate | None:
        """The candidate after its next step; None if there is none, or no time for it. ``near``: it
        differs from the best in one thing, and most of the time is up; ``hoped_s`` is what it may
        take, if not what its estimate says."""
        following, best = None, self.listed.best
        expected_s = candidate.expected_s(self.corrections) if hoped_s is None else hoped_s
        promising = bool(best) and expected_s < PROMISING * best[0].step_s
        self.share = NEAR_SHARE if near else PROMISING_SHARE if promising else SHARE
        try:
            if candidate.step is Reached.EVEN:
                following = self.liken(candidate)
            elif candidate.step is Reached.LIKE and (near or self.must_cut(candidate)):
                following = self.cut(candidate)
            elif candidate.step is Reached.QUICK:
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
        """Estimated from known cuts, the best of those that fit: by their load, and by how much
        longer than that lets expect a step of them took. Where as few activations are computed
        again as are needed, cuts of the least load must need some."""
        config, evaluator, kind = candidate.config, self.evaluator, candidate.kind
        nothing = UnfitError(Unfit.SAME, f"{config}: no activations need to be computed again")
        if as_needed := config.recompute.as_needed:
            free = self.found_by(evaluator.free_cuts, config)
            if recomputes_nothing(config, evaluator.cut(config, free)):
                raise nothing
        if not self.known.of(kind) or (as_needed and kind not in self._as_needed):
            self.learn(candidate)
        known = (evaluator.cut(config, cuts) for cuts in self.known.of(kind))
        choices = [stages for stages in known if not recomputes_nothing(config, stages)]
        if not choices:
            raise nothing
        estimates = [evaluator.cut_estimate(config, stages) for stages in choices]
        fitting = [i for i, stages in enumerate(choices) if evaluator.fits(stages, config.split)]

        def expected(i: int) -> float:
            return estimates[i] * self.corrections.of_cuts(candidate.kind, choices[i].partition)

        at = min(fitting or range(len(choices)), key=expected)
        seconds = estimates[at]
        return replace(
            candidate,
            seconds=max(seconds, candidate.bound),
            step=Reached.LIKE,
            stages=choices[at] if fitting else None,
        )

    def must_cut(self, candidate: Candidate) -> bool:
        """Whether no known cuts fit, or a bound is wanted rather than a simulation."""
        return candidate.stages is None or self.is_far(candidate)

    def is_far(self, candidate: Candidate) -> bool:
        """Whether it is not likely to be the best."""
        best = self.listed.best
        return bool(best) and candidate.expected_s(self.corrections) > FAR * best[0].step_s

    def cut(self, candidate: Candidate) -> Candidate:
        """Estimated and bounded from its own cuts."""
        config, stages = candidate.config, self.own(candidate)
        bound = max(candidate.bound, self.evaluator.bound(config, stages))
        seconds = max(bound, self.evaluator.cut_estimate(config, stages))
        return replace(candidate, seconds=seconds, bound=bound, step=Reached.CUT, stages=stages)

    def learn(self, candidate: Candidate) -> None:
        """Let others of its kind be tried with cuts that are found for it at once."""
        near_s = CLOSE * self.listed.best[0].step_s if self.listed.best else float("inf")
        for cuts in self.found_by(self.evaluator.cheap_cuts, candidate.config, near_s):
            self.known.learn(candidate.kind, cuts)
        if candidate.config.recompute.as_needed:
            self._as_needed.add(candidate.kind)

    def own(self, candidate: Candidate) -> Stages:
        """The config's own stages, whose cuts are known from then on."""
        stages = self.found_by(self.evaluator.stages, candidate.config)
        self.known.learn(candidate.kind, stages.partition)
        return stages

    def found_by[T](self, cut: Callable[..., T], config: Config, *limits: float) -> T:
        """What ``cut`` finds, if it does not take too long."""
        with self.within(*work_of(cut, config)):
            return cut(config, *limits)

    def simulate(self, candidate: Candidate) -> Candidate:
        """Simulated with a quick schedule; the first of a kind also with level cuts, where a device
        has several stages, and in a fold that may be near the best with those between: an estimate
        does not see what stages that differ wait for each other."""
        config, evaluator = candidate.config, self.evaluator
        first = not self.corrections.know(candidate.kind)
        outcome = self.evaluate(config, "quick", candidate.stages)
        if first and config.layout.num_chunks > 1:
            near = not has_several(config) and not self.is_far(candidate)
            for find in [evaluator.near_cuts] * near + [evaluator.level_cuts]:
                with suppress(UnfitError, TooLongError):
                    for cuts in self.found_by(find, config):
                        self.known.learn(candidate.kind, cuts)
                        beside = self.evaluate(config, "quick", evaluator.cut(config, cuts))
                        outcome = min(outcome, beside, key=lambda o: o.step_s)
        return replace(
            candidate,
            seconds=self.hoped_s(outcome),
            step=Reached.QUICK,
            stages=outcome.stages,
            reached_s=outcome.step_s,
        )

    def is_final(self, outcome: Outcome) -> bool:
        """Whether the bound of schedules says that a search for a shorter one is of no use."""
        certificate = outcome.synthesis.certificate
        least = certificate.lower_bound + outcome.optimizer_s
        return certificate.proved or (not outcome.extrapolated and least >= self.listed.limit)

    def complete(self, candidate: Candidate) -> None:
        """Simulated with its cuts, with its own, and with cuts of more even stages; then with
        schedules that were searched for its own and the soonest others, where these may be the
        best."""
        config, evaluator = candidate.config, self.evaluator
        assert candidate.stages is not None
        choices, own = [candidate.stages], candidate.stages.partition
        with suppress(UnfitError, TooLongError):
            choices.append(self.own(candidate))
            own = choices[-1].partition
        more = [evaluator.cheap_cuts, evaluator.roomy_cuts, evaluator.light_cuts]
        more += [evaluator.near_cuts] * (config.layout.num_chunks > 1)
        more += [evaluator.level_cuts] * has_several(config)
        for find in more:
            with suppress(UnfitError, TooLongError):
                choices += [evaluator.cut(config, cuts) for cuts in self.found_by(find, config)]
        todo = [(candidate.reached_s, candidate.seconds, candidate.stages)]
        seen = [candidate.stages.partition]
        for stages in choices[1:]:
            if stages.partition not in seen and evaluator.fits(stages, config.split):
                seen.append(stages.partition)
                quick = self.evaluate(config, "quick", stages)
                todo.append((quick.step_s, self.hoped_s(quick), stages))
        todo.sort(key=lambda each: each[0])
        self.known.learn(candidate.kind, todo[0][2].partition)
        for rank, (_, hoped_s, stages) in enumerate(todo):
            best_s = self.listed.best[0].step_s if self.listed.best else float("inf")
            if hoped_s < best_s and (rank < SEARCHED or stages.partition == own):
                self.evaluate(config, "searched", stages)

    def evaluate(self, config: Config, how: str, stages: Stages | None) -> Outcome:
        """The simulation, listed if devices have room for it."""
        found = self.found
        with self.within(how, self.evaluator.size(config)):
            outcome = self.evaluator.evaluate(config, quick=how == "quick", stages=stages)
        names = names_of(config)
        if config not in self._simulated:
            found.simulated.update(names)
        self._simulated.add(config)
        (self.hopes.simulated if how == "quick" else self.hopes.searched)(outcome)
        found.num_simulated = len(self._simulated)
        expected = self.evaluator.cut_estimate(config, outcome.stages)
        self.corrections.took(config, outcome.stages.partition, outcome.step_s / expected)
        self.variants.add(outcome)
        if not self.evaluator.has_room(outcome):
            return outcome
        self.listed.add(outcome)
        for name in names:
            keep_soonest(found.rivals, name, outcome)
        return outcome

    @contextmanager
    def within(self, work: str, size: float) -> Iterator[None]:
        """Do work that does not take too much of what is left of the time."""
        if self.listed.best and not self.budget.fits(work, size, self.share):
            raise TooLongError
        with self.budget.timed(work, size):
            yield

    def tell(self) -> None:
        """What there is by now."""
        self.found.outcomes, self.found.near = self.listed.best, self.listed.near
        self.found.seconds = self.budget.spent
        self.progress(self.found)

    def quick_s(self, outcome: Outcome) -> float:
        """What a step of its cuts takes by a schedule that is found at once."""
        known = self.hopes.quick_s(outcome)
        return known or self.evaluate(outcome.config, "quick", outcome.stages).step_s

    def hoped_s(self, quick: Outcome) -> float:
        """What a step may take by schedules that are searched for."""
        if self.is_final(quick):
            return quick.step_s
        size = self.evaluator.size(quick.config)
        return self.hopes.of(quick, self.budget.fits("searched", size, TRIED_SHARE))

    def refuse(self, config: Config, reason: Unfit, detail: str) -> None:
        """Count a refusal."""
        self.found.refused[reason] += 1
        self.found.examples.setdefault(reason, detail)
        self.count(config, reason)

    def count(self, config: Config, reason: Unfit) -> None:
        """One more of a pipeline degree that was not simulated for this reason."""
        self.found.degrees.setdefault(config.pipeline, Counter())[reason] += 1


def work_of(cut: Callable[..., object], config: Config) -> tuple[str, int]:
    """What a budget knows of finding cuts: kind and size. Where activations are computed again as
    needed it takes many times as long."""
    how = " as needed" if config.recompute.as_needed else ""
    return f"{cut.__name__}{how}, {config.layout}", num_stages(config) ** 2
