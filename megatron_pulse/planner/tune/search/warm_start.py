"""Warm start for one degree and layout: some configs simulated, the estimates of others
corrected."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.layer_costs import UnfitError
from megatron_pulse.planner.tune.search.candidates import Candidate, Fidelity, by_ranks
from megatron_pulse.planner.tune.search.fidelity import Steps, TooLongError, work_of
from megatron_pulse.planner.tune.search.result import simplicity

LEARNT_SHARE, SIMULATED_SHARE = 0.02, 0.025
"""Shares of the time left for partitions of one more rank order, and for one simulation."""

LOOKS = 64
"""Configs estimated between two checks of the clock."""


class WarmStart:
    """Warm start of the search. ``unseen`` counts configs that there was no time to estimate."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.unseen = 0

    def look(self, candidates: list[Candidate]) -> list[Candidate]:
        """Candidates of one degree and layout after the warm start.

        The most promising is simulated, with the opposite ``split``, the opposite
        ``max_in_flight``, and the better of half and twice the microbatch size. If none fits,
        smaller microbatches follow. The estimates of the others are corrected, per rank order.
        """
        if not candidates:
            return []
        first = min(candidates)
        if first.config.pipeline == 1:
            return self._without_cuts(sorted(candidates))
        config, size = first.config, first.config.micro_batch_size
        others = (
            replace(config, split=not config.split),
            replace(config, max_in_flight=not config.max_in_flight),
        )
        sizes = [replace(config, micro_batch_size=b) for b in (size // 2, 2 * size)]
        samples = [first, *(one for one in candidates if one.config in others)]
        samples += sorted(one for one in candidates if one.config in sizes)[:1]
        rest = [candidate for candidate in candidates if candidate not in samples]
        reached = [self._sample(candidate) for candidate in samples]
        reached += self._smaller(rest, size // 4) if not any(reached) else []
        if self.steps.known.of(first.kind):
            rest = [one for group in by_ranks(rest) for one in self._corrected(group)]
        return [*rest, *(one for one in reached if one is not None)]

    def _smaller(self, rest: list[Candidate], size: int) -> list[Candidate]:
        """Simulate the most promising of ``rest`` with microbatches of at most ``size``, largest
        first."""
        while size and not self.steps.ended:
            own = [one for one in rest if one.config.micro_batch_size == size]
            if own:
                rest.remove(first := min(own))
                if (following := self._sample(first)) is not None:
                    return [following]
            size //= 2
        return []

    def estimated(self, configs: Iterable[Config]) -> list[Candidate]:
        """Candidates that are not refused at once, as far as time allows."""
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
            bound = steps.evaluator.estimator.quick_bound(config)
            estimate = max(bound, steps.evaluator.estimator.estimate(config))
            steps.neighbourhood.may_be(config, bound)
            candidates.append(Candidate(estimate, simplicity(config), config, bound))
        return candidates

    def _without_cuts(self, candidates: list[Candidate]) -> list[Candidate]:
        """Simulate candidates without a pipeline: that is as quick as an estimate."""
        reached = [
            self._sample(one) if one.bound < self.steps.listed.limit else one for one in candidates
        ]
        return [one for one in reached if one is not None]

    def _sample(self, candidate: Candidate) -> Candidate | None:
        """Advance the candidate to a simulation, unless it looks far from the best on the way.

        If known partitions do not fit, they do not rule the candidate out.
        """
        steps = self.steps
        following: Candidate | None = candidate
        while following is not None and following.step < Fidelity.QUICK:
            unknown = following.stages is None and not candidate.config.recompute.as_needed
            judged = candidate if unknown else following
            if steps.ended or (following.step > Fidelity.EVEN and steps.is_far(judged)):
                break
            following = steps.advance(following, improved_s=judged.expected_s(steps.calibration))
        return following

    def _corrected(self, candidates: list[Candidate]) -> list[Candidate]:
        """Correct the estimates of candidates with equal ranks by that of the most promising
        one."""
        steps, first = self.steps, min(candidates)
        rest = [candidate for candidate in candidates if candidate is not first]
        soon = steps.budget.fits(
            *work_of(steps.evaluator.balancer.quick_partitions, first.config), LEARNT_SHARE
        )
        if not steps.ended and not steps.is_far(first) and (soon or not steps.known.of(first.kind)):
            with suppress(UnfitError, TooLongError):
                steps.learn(first)
        if steps.ended:
            return candidates
        if (following := steps.advance(first)) is None:
            return rest
        factor = following.seconds / first.seconds
        for candidate in rest:
            candidate.seconds *= factor
        return self._simulated(following, rest)

    def _simulated(self, first: Candidate, rest: list[Candidate]) -> list[Candidate]:
        """Simulate ``first``, then halve the microbatch size as long as the step becomes shorter.

        Estimates neglect part of the idle time with few microbatches, and recomputation with large
        ones.
        """
        steps, reached, left = self.steps, [first], list(rest)
        before_s = float("inf")
        while steps.budget.fits("quick", steps.evaluator.size(first.config), SIMULATED_SHARE):
            following = self._sample(first)
            reached = [*reached[:-1], following] if following is not None else reached[:-1]
            if following is None or following.seconds >= before_s:
                break
            before_s, size = following.seconds, first.config.micro_batch_size // 2
            if not (own := [one for one in left if one.config.micro_batch_size == size]):
                break
            left.remove(first := min(own))
            reached.append(first)
        return [*left, *reached]
