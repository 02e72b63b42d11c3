"""What differs little from the best of a tuner's search, and may be sooner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.tune.config import Config, Recompute
from megatron_pulse.planner.tune.costs import UnfitError
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.searching.candidates import neighbours
from megatron_pulse.planner.tune.stages import Stages

MOVED = 1.02
"""Times the best's estimate, up to which one with its cuts moved is a variant."""


class Variants:
    """What differs from the best in one thing and has its cuts, which need not be its own; then the
    best with a cut moved, or two, where that is not estimated much longer. Each comes once.

    ``bounds`` are the configs that may be tried, and what a step of each takes at the least.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        self.bounds: dict[Config, float] = {}
        self._best: Outcome | None = None
        self._left: Iterator[tuple[Config, Partition]] = iter(())
        self._seen: set[tuple[Config, Partition]] = set()

    def of(self, best: Outcome, limit: float) -> Iterator[tuple[Config, Stages]]:
        """Those of ``best`` that were not seen, fit, and may be sooner than ``limit``."""
        if best is not self._best:
            self._best, self._left = best, self._all(best)
        for config, cuts in self._left:
            if (config, cuts) in self._seen or self.bounds[config] >= limit:
                continue
            self._seen.add((config, cuts))
            with suppress(UnfitError):
                stages = self.evaluator.cut(config, cuts)
                if self.evaluator.fits(stages) and not recomputes_nothing(config, stages):
                    yield config, stages

    def _all(self, best: Outcome) -> Iterator[tuple[Config, Partition]]:
        own, cuts, evaluator = best.config, best.stages.partition, self.evaluator
        for config in neighbours(own):
            stricter = config.layout.collocates and not own.layout.collocates
            if config in self.bounds and config.placement == cuts.placement and not stricter:
                yield config, cuts
        most = MOVED * evaluator.cut_estimate(own, best.stages)
        for moved in evaluator.moved_cuts(own, cuts):
            if evaluator.cut_estimate(own, evaluator.cut(own, moved)) < most:
                yield own, moved


def recomputes_nothing(config: Config, stages: Stages) -> bool:
    """Whether as little recomputation as is needed is none."""
    return config.recompute is Recompute.NEEDED and not stages.recompute
