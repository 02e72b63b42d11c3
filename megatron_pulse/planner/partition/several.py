"""Cuts where devices have several stages each: walks first, then moves, within a budget of work.

With few devices or layers all walks are followed, and the first measure is proven the least; else
the most promising are, and what they lead to is bettered by moves. Memory bounds the walks, so
that cuts that fit are found where they are few.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_pulse.planner.partition.beam import Beam
from megatron_pulse.planner.partition.many import ManyCuts
from megatron_pulse.planner.partition.moves import Ranking, improved
from megatron_pulse.planner.partition.pair_costs import Bools, Ints
from megatron_pulse.planner.partition.walks import Walks

WORK = 60_000
"""Beginnings of walks and moved cuts that are looked at, about: a microsecond each."""

_NARROW, _WIDER = 64, 4
_TRIED = 32
"""Of the walks that a search ends with, so many are looked at whole."""


@dataclass(frozen=True)
class Sought:
    """The best cuts that were found; ``proved``: none are better by the first measure.

    Without cuts ``proved`` says that there are none.
    """

    cuts: tuple[int, ...] | None
    proved: bool


def seek(
    many: ManyCuts, closed: Bools | None, order: tuple[str, ...], slack: float, work: int
) -> Sought:
    """Cuts that are smallest by the measures of ``order``, the first first.

    A measure may be larger than its smallest value by the share ``slack`` where a later one gains.
    ``closed`` as for ``optimal_fold``: with it both ends of every skip must be on one device.
    """
    return _Seeker(many, closed, order).seek(slack, work)


class _Seeker:
    """The best cuts so far, and what counts of them."""

    def __init__(self, many: ManyCuts, closed: Bools | None, order: tuple[str, ...]) -> None:
        self.many, self.closed, self.order = many, closed, order
        self.ranking = Ranking(many, order, closed is not None)
        self.best: Ints | None = None
        self.score: tuple[float, ...] = ()

    def seek(self, slack: float, work: int) -> Sought:
        """Walks, wherever cuts may be and where mirror pairs keep skips at home; then moves."""
        proved = False
        nested = self.closed is not None and bool(self.many.costs.skips)
        kinds = [Walks(self.many, self.closed), Walks(self.many)] if nested else [Walks(self.many)]
        for walks in kinds:
            proved = self._walk(walks, self.order[0], work // (1 + len(kinds)))
            if self.best is None and not proved and self.many.memory is not None:
                self._walk(walks, "memory", work // (1 + len(kinds)))
            proved = proved and not walks.paired
        if self.best is None:
            return Sought(None, proved)
        for measure in self.order if slack else self.order[-1:]:
            self.score, self.best = improved(self.ranking, self.best, work // 3)
            if slack:
                value = self.ranking.value(measure, self.best)
                self.ranking.caps[measure] = value * (1 + slack)
        return Sought(tuple(map(int, self.best)), proved)

    def _walk(self, walks: Walks, measure: str, work: int) -> bool:
        """Search ever wider; whether all walks were followed that could be better."""
        beam = Beam(walks, measure, self.closed is not None)
        width = _NARROW
        while True:
            found = beam.search(self._bound(measure), width)
            work -= found.work
            width *= _WIDER
            for i in np.argsort(found.value, kind="stable")[:_TRIED]:
                self._take(walks, found.ends[i].tolist())
            if found.complete:
                return True
            if work <= 0 or (measure == "memory" and self.best is not None):
                return False

    def _bound(self, measure: str) -> float:
        """What is better than the best is below this."""
        if self.best is None or measure == "memory":
            return np.inf
        return self.ranking.value(measure, self.best) * (1 - 1e-9)

    def _take(self, walks: Walks, ends: list[int]) -> None:
        """Keep the cuts of a walk if they are allowed and better than the best so far."""
        cuts = np.array([walks.cuts(ends, lean) for lean in (False, True)])
        score, best = self.ranking.best(cuts)
        if self.ranking.allows(score) and (self.best is None or score < self.score):
            self.score, self.best = score, best
