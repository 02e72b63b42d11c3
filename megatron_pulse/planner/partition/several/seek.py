"""Cuts where devices have several stages each: walks first, then moves, within a budget of work.

With few devices or layers all walks are followed, and the first measure is proven the least; else
the most promising are, and what they lead to is bettered by moves. Memory bounds the walks, so
that cuts that fit are found where they are few.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_pulse.backbone.costs import running_sum
from megatron_pulse.planner.partition.closed import evenly_closed
from megatron_pulse.planner.partition.pair_costs import Bools, Ints
from megatron_pulse.planner.partition.several.beam import Beam
from megatron_pulse.planner.partition.several.many import ManyCuts
from megatron_pulse.planner.partition.several.moves import Ranking, improved, shaken
from megatron_pulse.planner.partition.several.walks import Walks

WORK = 200_000
"""Beginnings of walks and moved cuts that are looked at, about: some 50 ms for 60 layers."""


_NARROW, _WIDER, _WORTH = 64, 4, 1.5
"""The first width of a search, by how much more the next may have, and at least has."""

_PLACES = 400
"""Mirror pairs of cuts beyond which those are searched first that take alike of both sides."""

_TRIED = 16
"""Of the walks that a search ends with, so many are looked at whole."""


@dataclass(frozen=True)
class Sought:
    """The best cuts that were found, or None; then ``proved`` says that there are none."""

    cuts: tuple[int, ...] | None
    proved: bool


def seek(
    many: ManyCuts,
    nested: Bools | None,
    collocate: bool,
    order: tuple[str, ...],
    slack: float,
    work: int,
) -> Sought:
    """Cuts that are smallest by the measures of ``order``, the first first.

    A measure may be larger than its smallest value by the share ``slack`` where a later one gains.
    With ``collocate`` both ends of every skip must be on one device. ``nested`` (as ``closed`` for
    ``optimal_fold``) says which mirror cuts keep them there; None without skips, or mirrors.
    """
    return _Seeker(many, nested, collocate, order).seek(slack, work)


class _Seeker:
    """The best cuts so far, and what counts of them."""

    def __init__(
        self, many: ManyCuts, nested: Bools | None, collocate: bool, order: tuple[str, ...]
    ) -> None:
        self.many, self.nested, self.collocate, self.order = many, nested, collocate, order
        self.ranking = Ranking(many, order, collocate)
        self.best: Ints | None = None
        self.score: tuple[float, ...] = ()

    def seek(self, slack: float, work: int) -> Sought:
        """Walks, wherever cuts may be and where mirror pairs keep skips at home; then moves."""
        proved = False
        share = work // (2 if self.nested is None else 3)
        for walks in self._places():
            proved = self._walk(walks, self.order[0], share)
            if self.best is None and not proved and self.many.memory is not None:
                self._walk(walks, "memory", share)
                if self.best is None:
                    self._repair(walks, share)
            proved = proved and not walks.paired
        if self.best is None:
            return Sought(None, proved)
        for measure in self.order if slack else self.order[-1:]:
            self.score, self.best, left = improved(self.ranking, self.best, work // 3)
            if not proved and self.many.memory is not None:
                self.score, self.best = shaken(self.ranking, self.best, left // 5)
            if slack:
                value = self.ranking.value(measure, self.best)
                self.ranking.caps[measure] = value * (1 + slack)
        return Sought(tuple(map(int, self.best)), proved)

    def _places(self) -> Iterator[Walks]:
        """Where cuts may be: mirror pairs of few, of all if need be, then anywhere."""
        if self.nested is not None:
            costs = self.many.costs
            compute = running_sum(np.add(costs.forward_s, costs.backward_s).tolist())
            few = evenly_closed(self.nested, compute, _PLACES)
            yield Walks(self.many, few)
            if self.best is None and few is not self.nested:
                yield Walks(self.many, self.nested)
        yield Walks(self.many, stepwise=self.order[0] == "bytes")

    def _walk(self, walks: Walks, measure: str, work: int) -> bool:
        """Search ever wider; whether all walks were followed that could be better."""
        beam = Beam(walks, measure, self.collocate)
        width = _NARROW
        while True:
            found = beam.search(self._bound(measure), width)
            work -= found.work
            for i in np.argsort(found.value, kind="stable")[:_TRIED]:
                self._take(walks, found.ends[i].tolist())
            if found.complete:
                return True
            wider = min(_WIDER, work / max(1, found.work))
            if wider < _WORTH or (measure == "memory" and self.best is not None):
                return False
            width = int(wider * width)

    def _repair(self, walks: Walks, work: int) -> None:
        """Move cuts that need the least memory of those that do not fit, until they do."""
        found = Beam(walks, "memory", self.collocate, limited=False).search(np.inf, _NARROW)
        tried = [
            walks.cuts(found.ends[i].tolist(), lean=True)
            for i in np.argsort(found.value, kind="stable")[:_TRIED]
        ]
        if not tried:
            return
        nearest = self.ranking.best(np.array(tried))[1]
        score, cuts, left = improved(self.ranking, nearest, work)
        if not self.ranking.allows(score):
            score, cuts = shaken(self.ranking, cuts, left)
        if self.ranking.allows(score):
            self.score, self.best = score, cuts

    def _bound(self, measure: str) -> float:
        """What is better than the best is below this."""
        if self.best is None or measure == "memory":
            return np.inf
        return self.ranking.value(measure, self.best) * (1 - 1e-9)

    def _take(self, walks: Walks, ends: list[int]) -> None:
        """Keep the cuts of a walk if they are allowed and better than the best so far."""
        kinds = (False,) if self.many.memory is None else (False, True)
        cuts = np.array([walks.cuts(ends, lean) for lean in kinds])
        score, best = self.ranking.best(cuts)
        if self.ranking.allows(score) and (self.best is None or score < self.score):
            self.score, self.best = score, best
