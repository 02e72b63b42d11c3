"""Search for cuts with several stages per device: beam search, then local search, within a budget.

With few devices or layers all paths are followed, and the first measure is proven minimal.
Otherwise the most promising paths are followed, and local search improves their results. The memory
limit prunes paths, so that feasible cuts are found even if they are rare.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_pulse.backbone.costs import running_sum
from megatron_pulse.planner.partition.legal_cuts import balanced_cut_pairs
from megatron_pulse.planner.partition.multi_chunk.batched_cost import BatchedEvaluator
from megatron_pulse.planner.partition.multi_chunk.beam import Beam
from megatron_pulse.planner.partition.multi_chunk.local_search import (
    Ranking,
    iterated_local_search,
    steepest_descent,
)
from megatron_pulse.planner.partition.multi_chunk.states import StateSpace
from megatron_pulse.planner.partition.pair_costs import Bools, Ints

WORK = 200_000
"""Approximate number of partial paths and moved cuts to visit: some 50 ms for 60 layers."""


_NARROW, _WIDER, _WORTH = 64, 4, 1.5
"""Initial beam width, largest growth factor of the width, and smallest growth worth a new
search."""

_PLACES = 400
"""Number of mirror pairs of cuts above which the balanced pairs are searched first."""

_TRIED = 16
"""Number of complete paths of a search that are evaluated exactly."""


@dataclass(frozen=True)
class SearchResult:
    """Best cuts found, or None; with None, ``proved`` means that there are no legal cuts."""

    cuts: tuple[int, ...] | None
    proved: bool


def search_cuts(
    many: BatchedEvaluator,
    nested: Bools | None,
    collocate: bool,
    order: tuple[str, ...],
    slack: float,
    work: int,
) -> SearchResult:
    """Cuts that are smallest by the measures of ``order``, the most important first.

    A measure may exceed its smallest value by the share ``slack`` if a later measure gains. With
    ``collocate`` both ends of every skip must be on one device. ``nested`` (as ``closed`` of
    ``optimal_fold``) tells which mirror pairs of cuts allow that. It is None without skips or
    mirrors.
    """
    return _Seeker(many, nested, collocate, order).search_cuts(slack, work)


class _Seeker:
    """Best cuts so far, and their score."""

    def __init__(
        self, many: BatchedEvaluator, nested: Bools | None, collocate: bool, order: tuple[str, ...]
    ) -> None:
        self.many, self.nested, self.collocate, self.order = many, nested, collocate, order
        self.ranking = Ranking(many, order, collocate)
        self.best: Ints | None = None
        self.score: tuple[float, ...] = ()

    def search_cuts(self, slack: float, work: int) -> SearchResult:
        """Beam search over all cuts and over mirror pairs that collocate skips; then local
        search."""
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
            return SearchResult(None, proved)
        for measure in self.order if slack else self.order[-1:]:
            self.score, self.best, left = steepest_descent(self.ranking, self.best, work // 3)
            if not proved and self.many.memory is not None:
                self.score, self.best = iterated_local_search(self.ranking, self.best, left // 5)
            if slack:
                value = self.ranking.value(measure, self.best)
                self.ranking.caps[measure] = value * (1 + slack)
        return SearchResult(tuple(map(int, self.best)), proved)

    def _places(self) -> Iterator[StateSpace]:
        """Search spaces: balanced mirror pairs, then all mirror pairs if need be, then all cuts."""
        if self.nested is not None:
            costs = self.many.costs
            compute = running_sum(np.add(costs.forward_s, costs.backward_s).tolist())
            few = balanced_cut_pairs(self.nested, compute, _PLACES)
            yield StateSpace(self.many, few)
            if self.best is None and few is not self.nested:
                yield StateSpace(self.many, self.nested)
        yield StateSpace(self.many, stepwise=self.order[0] == "bytes")

    def _walk(self, walks: StateSpace, measure: str, work: int) -> bool:
        """Search with growing width; true if no path that could be better was left out."""
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

    def _repair(self, walks: StateSpace, work: int) -> None:
        """Local search from infeasible cuts that need the least memory, until they fit."""
        found = Beam(walks, "memory", self.collocate, limited=False).search(np.inf, _NARROW)
        tried = [
            walks.cuts(found.ends[i].tolist(), lean=True)
            for i in np.argsort(found.value, kind="stable")[:_TRIED]
        ]
        if not tried:
            return
        nearest = self.ranking.best(np.array(tried))[1]
        score, cuts, left = steepest_descent(self.ranking, nearest, work)
        if not self.ranking.allows(score):
            score, cuts = iterated_local_search(self.ranking, cuts, left)
        if self.ranking.allows(score):
            self.score, self.best = score, cuts

    def _bound(self, measure: str) -> float:
        """Value that the measure of better cuts stays below."""
        if self.best is None or measure == "memory":
            return np.inf
        return self.ranking.value(measure, self.best) * (1 - 1e-9)

    def _take(self, walks: StateSpace, ends: list[int]) -> None:
        """Keep the cuts of a path if they are allowed and better than the best so far."""
        kinds = (False,) if self.many.memory is None else (False, True)
        cuts = np.array([walks.cuts(ends, lean) for lean in kinds])
        score, best = self.ranking.best(cuts)
        if self.ranking.allows(score) and (self.best is None or score < self.score):
            self.score, self.best = score, best
