"""Branch and bound over all configs, the most promising first, with an answer at any moment.

A config is taken up in steps, each dearer and nearer to the truth than the one before:

=======  ==========================================================================================
even     estimate and bound from the work, spread evenly
like     estimate from cuts that are known for its degree and layout, made for whichever config
quick    simulated with these cuts, or its own where none of them fit, and a schedule that is found
         at once: something that would run
done     simulated with these cuts, its own, and cuts that have more even stages, more room or
         fewer parameters; the best of them with schedules that were searched for
=======  ==========================================================================================

First all configs without a pipeline and the best of every degree and layout become quick, unless
its estimate from cuts is far from the best, the fewest stages first; how far that is from its
estimate of even work corrects the others', for each tensor degree. From then on whatever has the
least time so far takes its next step (``Queue``: estimates count with what simulations of as many
ranks in the same places took for theirs), in the end by turns with what differs from the best in
one thing, which is simulated with cuts of its own and with the best's, and with the best by cuts
that are moved (``variants``).
What is bound to take longer than all that are kept is dropped; what is far from the best by its
estimate is cut for such a bound before it is simulated.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from megatron_pulse.planner.schedule.search.synthesize import get_ready
from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.costs import Unfit, UnfitError
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.searching.budget import Budget
from megatron_pulse.planner.tune.searching.candidates import (
    Candidate,
    KnownCuts,
    Queue,
    Reached,
    by_kind,
    by_ranks,
    has_several,
    kind_of,
    neighbours,
    num_stages,
)
from megatron_pulse.planner.tune.searching.tuning import (
    Shortlist,
    Tuning,
    keep_soonest,
    simplicity,
)
from megatron_pulse.planner.tune.searching.variants import Variants, recomputes_nothing
from megatron_pulse.planner.tune.stages import Stages
from megatron_pulse.processes import without_collecting

HOPE = 0.5
"""Part of the gap of a quick schedule that a search for a better one may close."""

FAR = 1.1
"""Times the best by its estimate, from which a config is bounded before it is simulated."""

CLOSE = 1.15
"""Times the best by its estimate, up to which a kind's first cuts are moved by layers."""

SEARCHED = 1
"""Cuts of a config for which schedules are searched, the soonest, beside its own."""

SHARE, PROMISING_SHARE, NEAR_SHARE = 0.1, 0.25, 0.5
"""Of the time that is left, what one cut or simulation may take; one of what may be much sooner;
and one near the best."""

LEARNT_SHARE = 0.02
"""Of the time that is left, what cuts for one more way to share nodes may take."""

PROMISING = 0.95
"""Times the best by its estimate, up to which a config may be much sooner."""

ALONE = 0.4
"""Share of the time in which candidates come in the order of their estimates alone."""

VARIED = 0.5
"""Share of the time after that which goes to variants of good configs."""

LOOKS = 64
"""Configs that are estimated between two looks at the clock."""


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
    get_ready()
    ready_s = time.monotonic() - began
    budget = budget or Budget(float("inf"))
    with without_collecting():
        budget.begin()
        found = _ConfigSearch(evaluator, keep, budget, progress, finish_s).run(candidates)
    found.ready_s = ready_s
    return found


class _TooLongError(Exception):
    """A piece of work would take too much of the time that is left."""


class _ConfigSearch:
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
        self.known = KnownCuts()
        self.queue = Queue()
        self.waiting: dict[Config, Candidate] = {}
        self.is_near = False
        """Most of the time is up, and what takes its step differs from the best in one thing."""
        self.is_promising = False
        """What takes its step is estimated to be much sooner than the best."""
        self.aside: list[Candidate] = []
        self.variants = Variants(evaluator)
        self.unseen = 0
        self.simulated: set[Config] = set()

    @property
    def ended(self) -> bool:
        """Whether the time is up that is not needed for a whole schedule of the best, or all of it
        where nothing was simulated."""
        if not self.listed.best:
            return self.budget.spent >= self.budget.seconds + self.finish_s
        size = self.evaluator.size(self.listed.best[0].config, whole=True)
        needed = self.budget.estimate("quick", size)
        return self.budget.left <= max(0.0, needed - self.finish_s)

    def run(self, candidates: Iterable[Config]) -> Tuning:
        """Look at ``candidates`` until all are ruled out or the budget is spent."""
        for configs in by_kind(candidates):
            for candidate in self.scouted(self.estimated(configs)):
                self.wait(candidate)
        while self.queue and not self.ended:
            if (near := self.next_near()) is not None:
                self.take(near)
            varied_s = VARIED * self.late_s
            while not self.ended and self.variants.spent_s < varied_s and self.vary():
                pass
            candidate = self.queue.pop()
            if self.waiting.get(candidate.config) is candidate:
                self.take(candidate)
        while not self.ended and self.vary():
            pass
        found = self.found
        rest = [*self.waiting.values(), *self.aside]
        left = [c for c in rest if c.bound < self.listed.limit]
        found.refused[Unfit.SLOWER] += len(rest) - len(left)
        for candidate in rest:
            late = candidate.bound < self.listed.limit
            self.count(candidate.config, Unfit.LATE if late else Unfit.SLOWER)
        found.num_left = len(left)
        found.bound_s = min((c.bound for c in left), default=float("inf"))
        if self.unseen:
            found.num_left, found.bound_s = found.num_left + self.unseen, 0.0
        if self.listed.same:
            found.refused[Unfit.SAME] = len(self.listed.same)
        found.seconds = self.budget.spent
        return found

    def take(self, candidate: Candidate) -> None:
        """Let a candidate take its next step, or drop it."""
        del self.waiting[candidate.config]
        self.is_near = candidate.config in self.near()
        if candidate.bound >= self.listed.limit:
            self.refuse(candidate.config, Unfit.SLOWER, str(candidate.config))
        elif (following := self.advance(candidate)) is not None:
            self.wait(following)

    def wait(self, candidate: Candidate) -> None:
        """Let a candidate wait for its next step."""
        self.waiting[candidate.config] = candidate
        self.queue.push(candidate)

    @property
    def late_s(self) -> float:
        """Seconds since most of the time was up; below 0 before."""
        return self.budget.spent - ALONE * self.budget.seconds

    def near(self) -> list[Config]:
        """What differs from the best in one thing, when most of the time is up."""
        best = self.listed.best[:1] if self.late_s >= 0 else []
        return [config for outcome in best for config in neighbours(outcome.config)]

    def next_near(self) -> Candidate | None:
        """The most promising of the best's neighbours that was not simulated."""
        known = (self.waiting.get(config) for config in self.near())
        todo = [one for one in known if one is not None and one.step < Reached.QUICK]
        return min(todo, default=None)

    def vary(self) -> bool:
        """Simulate one variant of the best, or of the best of a kind that is not far behind;
        whether there was one."""
        if not self.listed.best:
            return False
        self.is_promising = False
        for good in self.variants.turns(self.listed.best[0], FAR):
            began = self.budget.spent
            found = self.vary_one(good)
            self.variants.took(good, self.budget.spent - began)
            if found:
                return True
        return False

    def vary_one(self, good: Outcome) -> bool:
        """Simulate one variant, if there is one. Where it is sooner by schedules that are found at
        once, they are searched for."""
        for config, stages in self.variants.of(good, self.listed.limit):
            with suppress(_TooLongError):
                quick_s = self.evaluate(good.config, "quick", good.stages).step_s
                outcome = self.evaluate(config, "quick", stages)
                if outcome.step_s < quick_s and not self.is_final(outcome):
                    self.evaluate(config, "searched", stages)
                self.tell()
                return True
        return False

    def estimated(self, configs: Iterable[Config]) -> list[Candidate]:
        """All that are not refused at once, or those that there is time for."""
        evaluator, candidates = self.evaluator, []
        for number, config in enumerate(configs):
            self.found.num_configs += 1
            if self.unseen or (number % LOOKS == 0 and self.ended):
                self.unseen += 1
                continue
            try:
                evaluator.refuse(config)
            except UnfitError as error:
                self.refuse(config, error.reason, error.detail)
                continue
            bound = evaluator.quick_bound(config)
            estimate = max(bound, evaluator.estimate(config))
            self.variants.bounds[config] = bound
            candidates.append(Candidate(estimate, simplicity(config), config, bound))
        return candidates

    def scouted(self, candidates: list[Candidate]) -> list[Candidate]:
        """Candidates of one kind, the most promising simulated, and the same with backwards whole
        for split or split for whole, with ample memory or without, and with microbatches half or
        twice as large, whichever is estimated to be sooner; the others' estimates corrected by what
        its cuts say of one of each way to share nodes."""
        if not candidates:
            return []
        first = min(candidates)
        if first.config.pipeline == 1:
            return self.without_cuts(sorted(candidates))
        config, size = first.config, first.config.micro_batch_size
        others = replace(config, split=not config.split), replace(config, ample=not config.ample)
        sizes = [replace(config, micro_batch_size=b) for b in (size // 2, 2 * size)]
        scouts = [first, *(one for one in candidates if one.config in others)]
        scouts += sorted(one for one in candidates if one.config in sizes)[:1]
        rest = [candidate for candidate in candidates if candidate not in scouts]
        reached = [self.scout(candidate) for candidate in scouts]
        if self.known.of(first.kind):
            rest = [one for group in by_ranks(rest) for one in self.corrected(group)]
        return [*rest, *(one for one in reached if one is not None)]

    def without_cuts(self, candidates: list[Candidate]) -> list[Candidate]:
        """Candidates of one device in a pipeline, each simulated if it may be listed: that takes no
        longer than an estimate, and what one has to compute again says nothing of another."""
        reached = [self.scout(one) if one.bound < self.listed.limit else one for one in candidates]
        return [one for one in reached if one is not None]

    def scout(self, candidate: Candidate) -> Candidate | None:
        """The candidate simulated, unless it looks far from the best on the way there."""
        following: Candidate | None = candidate
        while following is not None and following.step < Reached.QUICK:
            if self.ended or (following.step > Reached.EVEN and self.is_far(following)):
                break
            following = self.advance(following)
        return following

    def corrected(self, candidates: list[Candidate]) -> list[Candidate]:
        """Candidates of one kind whose ranks share nodes alike; the most promising estimated from
        known cuts and, where these are found soon, its own, and the others' estimates corrected by
        what that says."""
        first = min(candidates)
        rest = [candidate for candidate in candidates if candidate is not first]
        soon = self.budget.fits(*_work(self.evaluator.cheap_cuts, first.config), LEARNT_SHARE)
        if not self.ended and not self.is_far(first) and (soon or not self.known.of(first.kind)):
            with suppress(UnfitError, _TooLongError):
                self.learn(first)
        if self.ended or (following := self.advance(first)) is None:
            return rest
        factor = following.seconds / first.seconds
        for candidate in rest:
            candidate.seconds *= factor
        return [*rest, following]

    def advance(self, candidate: Candidate) -> Candidate | None:
        """The candidate after its next step; None if there is none, or no time for it."""
        following, best = None, self.listed.best
        expected_s = self.queue.expected_s(candidate)
        self.is_promising = bool(best) and expected_s < PROMISING * best[0].step_s
        try:
            if candidate.step is Reached.EVEN:
                following = self.liken(candidate)
            elif candidate.step is Reached.LIKE and self.must_cut(candidate):
                following = self.cut(candidate)
            elif candidate.step is Reached.QUICK:
                self.complete(candidate)
            else:
                following = self.simulate(candidate)
        except UnfitError as error:
            self.refuse(candidate.config, error.reason, error.detail)
        except _TooLongError:
            self.aside.append(candidate)
        self.tell()
        return following

    def tell(self) -> None:
        """What there is by now."""
        self.found.outcomes = self.listed.best
        self.found.seconds = self.budget.spent
        self.progress(self.found)

    @contextmanager
    def within(self, work: str, size: float) -> Iterator[None]:
        """Do work that does not take too much of what is left of the time."""
        share = PROMISING_SHARE if self.is_promising else SHARE
        share = NEAR_SHARE if self.is_near else share
        if self.listed.best and not self.budget.fits(work, size, share):
            raise _TooLongError
        with self.budget.timed(work, size):
            yield

    def liken(self, candidate: Candidate) -> Candidate:
        """Estimated from known cuts, the best of those that fit: by their load, and by how much
        longer than that lets expect a step of them took."""
        config, evaluator = candidate.config, self.evaluator
        if not self.known.of(candidate.kind):
            self.learn(candidate)
        choices = [evaluator.cut(config, cuts) for cuts in self.known.of(candidate.kind)]
        if any(recomputes_nothing(config, stages) for stages in choices):
            raise UnfitError(Unfit.SAME, f"{config}: no activations need to be computed again")
        estimates = [evaluator.cut_estimate(config, stages) for stages in choices]
        fitting = [i for i, stages in enumerate(choices) if evaluator.fits(stages)]

        def expected(i: int) -> float:
            return estimates[i] * self.known.slower(candidate.kind, choices[i].partition)

        at = min(fitting or range(len(choices)), key=expected)
        seconds = estimates[at]
        return replace(
            candidate,
            seconds=max(seconds, candidate.bound),
            step=Reached.LIKE,
            stages=choices[at] if fitting else None,
        )

    def must_cut(self, candidate: Candidate) -> bool:
        """Whether no known cuts fit, a bound is wanted rather than a simulation, or it is near the
        best, and others' cuts may be all that keeps it from being sooner."""
        return candidate.stages is None or self.is_far(candidate) or self.is_near

    def is_far(self, candidate: Candidate) -> bool:
        """Whether it is not likely to be the best."""
        best = self.listed.best
        return bool(best) and self.queue.expected_s(candidate) > FAR * best[0].step_s

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

    def own(self, candidate: Candidate) -> Stages:
        """The config's own stages, whose cuts are known from then on."""
        stages = self.found_by(self.evaluator.stages, candidate.config)
        self.known.learn(candidate.kind, stages.partition)
        return stages

    def found_by[T](self, cut: Callable[..., T], config: Config, *limits: float) -> T:
        """What ``cut`` finds, if it does not take too long."""
        with self.within(*_work(cut, config)):
            return cut(config, *limits)

    def simulate(self, candidate: Candidate) -> Candidate:
        """Simulated with a quick schedule; the first of a kind also with level cuts, where a device
        has several stages: an estimate does not see what stages that differ wait for each other."""
        config = candidate.config
        first = not self.known.were_tried(candidate.kind)
        outcome = self.evaluate(config, "quick", candidate.stages)
        if first and config.layout.num_chunks > 1:
            with suppress(UnfitError, _TooLongError):
                for cuts in self.found_by(self.evaluator.level_cuts, config):
                    self.known.learn(candidate.kind, cuts)
                    beside = self.evaluate(config, "quick", self.evaluator.cut(config, cuts))
                    outcome = min(outcome, beside, key=lambda o: o.step_s)
        certificate = outcome.synthesis.certificate
        hope = HOPE * outcome.pipeline_s * certificate.gap / (1 + certificate.gap)
        return replace(
            candidate,
            seconds=outcome.step_s - hope,
            step=Reached.QUICK,
            stages=outcome.stages,
            reached_s=outcome.step_s,
            final=self.is_final(outcome),
        )

    def is_final(self, outcome: Outcome) -> bool:
        """Whether the bound of schedules says that a search for a shorter one is of no use."""
        certificate = outcome.synthesis.certificate
        least = certificate.lower_bound + outcome.optimizer_s
        return not outcome.extrapolated and (certificate.proved or least >= self.listed.limit)

    def complete(self, candidate: Candidate) -> None:
        """Simulated with its cuts, with its own, and with cuts of more even stages; then with
        schedules that were searched for its own and the soonest others."""
        config, evaluator = candidate.config, self.evaluator
        assert candidate.stages is not None
        choices, own = [candidate.stages], candidate.stages.partition
        with suppress(UnfitError, _TooLongError):
            choices.append(self.own(candidate))
            own = choices[-1].partition
        more = [evaluator.cheap_cuts, evaluator.roomy_cuts, evaluator.light_cuts]
        more += [evaluator.near_cuts] * (config.layout.num_chunks > 1)
        more += [evaluator.level_cuts] * has_several(config)
        for find in more:
            with suppress(UnfitError, _TooLongError):
                choices += [evaluator.cut(config, cuts) for cuts in self.found_by(find, config)]
        todo = [] if candidate.final else [(candidate.reached_s, candidate.stages)]
        seen = [candidate.stages.partition]
        for stages in choices[1:]:
            if stages.partition not in seen and evaluator.fits(stages):
                seen.append(stages.partition)
                outcome = self.evaluate(config, "quick", stages)
                if not self.is_final(outcome):
                    todo.append((outcome.step_s, stages))
        todo.sort(key=lambda each: each[0])
        if todo:
            self.known.learn(candidate.kind, todo[0][1].partition)
        for rank, (_, stages) in enumerate(todo):
            if rank < SEARCHED or stages.partition == own:
                self.evaluate(config, "searched", stages)

    def evaluate(self, config: Config, how: str, stages: Stages | None) -> Outcome:
        """The simulation, listed."""
        found = self.found
        with self.within(how, self.evaluator.size(config)):
            outcome = self.evaluator.evaluate(config, quick=how == "quick", stages=stages)
        self.simulated.add(config)
        found.num_simulated = len(self.simulated)
        expected = self.evaluator.cut_estimate(config, outcome.stages)
        self.known.took(kind_of(config), outcome.stages.partition, outcome.step_s / expected)
        self.queue.took(config, outcome.step_s / expected)
        self.listed.add(outcome)
        self.variants.add(outcome)
        for rival in (f"P={config.pipeline}", f"T={config.tensor}", config.layout.name):
            keep_soonest(found.rivals, rival, outcome)
        return outcome

    def refuse(self, config: Config, reason: Unfit, detail: str) -> None:
        """Count a refusal."""
        self.found.refused[reason] += 1
        self.found.examples.setdefault(reason, detail)
        self.count(config, reason)

    def count(self, config: Config, reason: Unfit) -> None:
        """One more of a pipeline degree that was not simulated for this reason."""
        self.found.degrees.setdefault(config.pipeline, Counter())[reason] += 1


def _work(cut: Callable[..., object], config: Config) -> tuple[str, int]:
    """What a budget knows of finding cuts: kind and size."""
    return f"{cut.__name__}, {config.layout}", num_stages(config) ** 2
