"""The first look at configs of one degree and layout: some simulated, the others corrected."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.costs import UnfitError
from megatron_pulse.planner.tune.searching.candidates import Candidate, Reached, by_ranks
from megatron_pulse.planner.tune.searching.steps import Steps, TooLongError, work_of
from megatron_pulse.planner.tune.searching.tuning import simplicity

LEARNT_SHARE, SIMULATED_SHARE = 0.02, 0.025
"""Of the time that is left, what cuts for one more way to share nodes may take, and a simulation of
one."""

LOOKS = 64
"""Configs that are estimated between two looks at the clock."""


class Scouts:
    """Looks at all configs of a kind; ``unseen`` are those that there was no time to estimate."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.unseen = 0

    def look(self, candidates: list[Candidate]) -> list[Candidate]:
        """What to go on with of a kind's: the most promising simulated, and the same with backwards
        whole for split or split for whole, with ample memory or without, and with microbatches half
        or twice as large, whichever is estimated to be sooner; where none of them fits, of smaller
        ones the largest that does; the others' estimates corrected by what its cuts say of one of
        each way to share nodes."""
        if not candidates:
            return []
        first = min(candidates)
        if first.config.pipeline == 1:
            return self._without_cuts(sorted(candidates))
        config, size = first.config, first.config.micro_batch_size
        others = replace(config, split=not config.split), replace(config, ample=not config.ample)
        sizes = [replace(config, micro_batch_size=b) for b in (size // 2, 2 * size)]
        scouts = [first, *(one for one in candidates if one.config in others)]
        scouts += sorted(one for one in candidates if one.config in sizes)[:1]
        rest = [candidate for candidate in candidates if candidate not in scouts]
        reached = [self._scout(candidate) for candidate in scouts]
        reached += self._smaller(rest, size // 4) if not any(reached) else []
        if self.steps.known.of(first.kind):
            rest = [one for group in by_ranks(rest) for one in self._corrected(group)]
        return [*rest, *(one for one in reached if one is not None)]

    def _smaller(self, rest: list[Candidate], size: int) -> list[Candidate]:
        """The most promising of ``rest`` with microbatches of ``size``, or the next smaller ones of
        which one fits; it is taken out."""
        while size and not self.steps.ended:
            own = [one for one in rest if one.config.micro_batch_size == size]
            if own:
                rest.remove(first := min(own))
                if (following := self._scout(first)) is not None:
                    return [following]
            size //= 2
        return []

    def estimated(self, configs: Iterable[Config]) -> list[Candidate]:
        """All that are not refused at once, or those that there is time for."""
        steps, candidates = self.steps, []
        for number, config in enumerate(configs):
            steps.found.num_configs += 1
            if self.unseen or (number % LOOKS == 0 and steps.ended):
                self.unseen += 1
                continue
            try:
                steps.evaluator.refuse(config)
            except UnfitError as error:
                steps.refuse(config, error.reason, error.detail)
                continue
            bound = steps.evaluator.quick_bound(config)
            estimate = max(bound, steps.evaluator.estimate(config))
            steps.variants.may_be(config, bound)
            candidates.append(Candidate(estimate, simplicity(config), config, bound))
        return candidates

    def _without_cuts(self, candidates: list[Candidate]) -> list[Candidate]:
        """Candidates of one device in a pipeline, each simulated if it may be listed: that takes no
        longer than an estimate, and what one has to compute again says nothing of another."""
        reached = [
            self._scout(one) if one.bound < self.steps.listed.limit else one for one in candidates
        ]
        return [one for one in reached if one is not None]

    def _scout(self, candidate: Candidate) -> Candidate | None:
        """The candidate simulated, unless it looks far from the best on the way there; what known
        cuts let expect that do not fit says nothing of its own, where these are soon found (two
        waves of SD v2 4.6B over four of 32 GB and 1.25 GB/s: a third of what they come to)."""
        steps = self.steps
        following: Candidate | None = candidate
        while following is not None and following.step < Reached.QUICK:
            unknown = following.stages is None and not candidate.config.recompute.as_needed
            judged = candidate if unknown else following
            if steps.ended or (following.step > Reached.EVEN and steps.is_far(judged)):
                break
            following = steps.advance(following, hoped_s=judged.expected_s(steps.corrections))
        return following

    def _corrected(self, candidates: list[Candidate]) -> list[Candidate]:
        """Candidates of one kind whose ranks share nodes alike; the most promising estimated from
        known cuts and, where these are found soon, its own, the others' estimates corrected by what
        that says, and it simulated where that is soon done."""
        steps, first = self.steps, min(candidates)
        rest = [candidate for candidate in candidates if candidate is not first]
        soon = steps.budget.fits(*work_of(steps.evaluator.cheap_cuts, first.config), LEARNT_SHARE)
        if not steps.ended and not steps.is_far(first) and (soon or not steps.known.of(first.kind)):
            with suppress(UnfitError, TooLongError):
                steps.learn(first)
        if steps.ended or (following := steps.advance(first)) is None:
            return rest
        factor = following.seconds / first.seconds
        for candidate in rest:
            candidate.seconds *= factor
        return self._simulated(following, rest)

    def _simulated(self, first: Candidate, rest: list[Candidate]) -> list[Candidate]:
        """The same, ``first`` simulated where that is soon done, and then of ``rest`` the best with
        microbatches of half the size, as long as these are sooner (by their cuts, where these say
        that it is far from the best): an estimate does not see all that a pipeline of few
        microbatches idles, nor what the largest ones have to compute again."""
        steps, reached, left = self.steps, [first], list(rest)
        before_s = float("inf")
        while steps.budget.fits("quick", steps.evaluator.size(first.config), SIMULATED_SHARE):
            following = self._scout(first)
            reached = [*reached[:-1], following] if following is not None else reached[:-1]
            if following is None or following.seconds >= before_s:
                break
            before_s, size = following.seconds, first.config.micro_batch_size // 2
            if not (own := [one for one in left if one.config.micro_batch_size == size]):
                break
            left.remove(first := min(own))
            reached.append(first)
        return [*left, *reached]
