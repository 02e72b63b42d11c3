"""What differs little from a good config of a tuner's search, and may be sooner."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from itertools import batched

from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.tune.config import Config, Recompute
from megatron_pulse.planner.tune.costs import UnfitError
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.searching.kinds import Kind, kind_of, neighbours
from megatron_pulse.planner.tune.searching.tuning import keep_soonest
from megatron_pulse.planner.tune.stages import Stages

type Tried = tuple[Config, Partition]

MOVED = 1.03
"""Times a config's estimate, up to which it is a variant with its cuts moved."""

TOGETHER = 100
"""Moved cuts of which the one is simulated first that is estimated to be the soonest."""


class Variants:
    """What differs from a config in one thing and has its cuts, which need not be its own; then
    what differs in two, and the config with a cut moved, or two, where that is not estimated much
    longer. Each comes once.

    ``bounds`` are the configs that may be tried, and what a step of each takes at the least.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        self.bounds: dict[Config, float] = {}
        self._best_of: dict[Kind, Outcome] = {}
        self._spent_s: defaultdict[Kind, float] = defaultdict(float)
        self._left: dict[Tried, Iterator[Tried]] = {}
        self._seen: set[Tried] = set()

    def add(self, outcome: Outcome) -> None:
        """What was simulated may be the best of its kind."""
        keep_soonest(self._best_of, kind_of(outcome.config), outcome)

    def turns(self, best: Outcome, far: float) -> list[Outcome]:
        """The best and the best of every kind that takes less than ``far`` times as long; first
        what variants of its kind had the least time so far, of which the best's has twice."""
        most_s = far * best.step_s
        near = [o for o in self._best_of.values() if o.step_s < most_s and o is not best]
        good = [best, *sorted(near, key=lambda o: o.step_s)]
        return sorted(good, key=lambda o: self._spent_s[kind_of(o.config)] / (1 + (o is best)))

    def took(self, good: Outcome, seconds: float) -> None:
        """Variants of ``good`` had so much more time."""
        self._spent_s[kind_of(good.config)] += seconds

    @property
    def spent_s(self) -> float:
        """Seconds that all variants had."""
        return sum(self._spent_s.values())

    def of(self, good: Outcome, limit: float) -> Iterator[tuple[Config, Stages]]:
        """Those of ``good`` that were not seen, fit, and may be sooner than ``limit``."""
        key = good.config, good.stages.partition
        for config, cuts in self._left.setdefault(key, self._all(good)):
            if (config, cuts) in self._seen or self.bounds[config] >= limit:
                continue
            self._seen.add((config, cuts))
            with suppress(UnfitError):
                stages = self.evaluator.cut(config, cuts)
                if self.evaluator.fits(stages) and not recomputes_nothing(config, stages):
                    yield config, stages

    def _all(self, good: Outcome) -> Iterator[Tried]:
        own, cuts, evaluator = good.config, good.stages.partition, self.evaluator
        for config in neighbours(own):
            stricter = config.layout.collocates and not own.layout.collocates
            if config in self.bounds and config.placement == cuts.placement and not stricter:
                yield config, cuts
        most = MOVED * evaluator.cut_estimate(own, good.stages)
        yield from ((config, cuts) for config in self._twice(own, cuts, most))
        for some in batched(evaluator.moved_cuts(own, cuts), TOGETHER):
            estimates = {
                each: evaluator.cut_estimate(own, evaluator.cut(own, each)) for each in some
            }
            for moved in sorted(estimates, key=estimates.__getitem__):
                if estimates[moved] < most:
                    yield own, moved

    def _twice(self, own: Config, cuts: Partition, most: float) -> list[Config]:
        """What differs in two things and may have these cuts, where it is estimated to take less
        than ``most``, the soonest first."""
        found: dict[Config, float] = {}
        once = {own, *neighbours(own)}
        for config in (two for one in once - {own} for two in neighbours(one)):
            stricter = config.layout.collocates and not own.layout.collocates
            if config in once or config in found or config not in self.bounds or stricter:
                continue
            if config.placement == cuts.placement:
                with suppress(UnfitError):
                    stages = self.evaluator.cut(config, cuts)
                    found[config] = self.evaluator.cut_estimate(config, stages)
        return sorted((c for c in found if found[c] < most), key=found.__getitem__)


def recomputes_nothing(config: Config, stages: Stages) -> bool:
    """Whether as little recomputation as is needed is none."""
    return config.recompute is Recompute.NEEDED and not stages.recompute
