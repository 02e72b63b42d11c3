"""Cuts of a cascade: every chain is folded over the same devices, with a common load.

The measures count the total of all chains on a device. Each chain in turn is cut by the optimal
fold, given the loads of the others (``fold``), until a round brings no gain. Every order of the
chains is tried. Local search then moves cuts of all chains at once (``multi_chunk.local_search``),
and restarts from random perturbations.

The busier a device is with one chain, the less it gets of the next (P = 4)::

    base   folded 0 1 2 3 3 2 1 0       ####   ###    ####   ##
    upper  folded 3 2 1 0 0 1 2 3       ##     ###    ##     ####
    device                              0      1      2      3
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.placement import Partition, Placement
from megatron_pulse.planner.partition.evaluate import Evaluation, MemoryRule, evaluate
from megatron_pulse.planner.partition.fold_dp import optimal_fold
from megatron_pulse.planner.partition.legal_cuts import legal_cut_pairs
from megatron_pulse.planner.partition.multi_chunk.batched_cost import BatchedEvaluator
from megatron_pulse.planner.partition.multi_chunk.local_search import (
    Ranking,
    iterated_local_search,
    steepest_descent,
)
from megatron_pulse.planner.partition.pair_costs import PairCosts

_TURNS = 8
"""Maximum number of rounds over all chains."""

_MOVED = 20_000
"""Approximate number of moved cuts to evaluate."""

Cuts = tuple[int, ...]


@dataclass(frozen=True)
class CascadePartitioner:
    """Chains of ``costs`` over a placement that folds each of them."""

    costs: ChainCosts
    placement: Placement
    link: Link
    lam: float
    memory: MemoryRule | None

    def cuts(self, order: tuple[str, ...], collocate: bool, slack: float) -> Cuts | None:
        """Cuts that are small by the measures of ``order``, most important first; None if none
        fit."""
        if self.placement.num_devices == 1:
            return (*self.costs.starts, len(self.costs))
        found = []
        for turns in permutations(range(len(self.costs.starts))):
            if (cuts := self._in_turns(turns, order, collocate, slack)) is not None:
                found.append((self._score(cuts, order), cuts))
        if not found:
            return None
        many = BatchedEvaluator(self.costs, self.placement, self.link, self.lam, self.memory)
        ranking = Ranking(many, order, collocate)
        _, best, left = steepest_descent(ranking, np.array(min(found)[1]), _MOVED)
        score, best = iterated_local_search(ranking, best, left)
        return tuple(map(int, best)) if ranking.allows(score) else min(found)[1]

    def _in_turns(
        self, turns: tuple[int, ...], order: tuple[str, ...], collocate: bool, slack: float
    ) -> Cuts | None:
        """Cut the chains in this order, round after round, until a round brings no gain."""
        own: dict[int, Cuts] = {}
        best: tuple[float, ...] = ()
        kept: Cuts | None = None
        for _ in range(_TURNS):
            for chain in turns:
                cuts = self._beside(chain, own, order, collocate, slack)
                if cuts is None:
                    return kept
                own[chain] = cuts
            whole = self._whole(own)
            if kept is not None and self._score(whole, order) >= best:
                break
            kept, best = whole, self._score(whole, order)
        return kept

    def _beside(
        self,
        chain: int,
        own: dict[int, Cuts],
        order: tuple[str, ...],
        collocate: bool,
        slack: float,
    ) -> Cuts | None:
        """Best cuts of ``chain``, given the cuts of the other chains."""
        costs = self.costs.chains[chain]
        beside_s, beside_bytes = np.zeros((2, self.placement.num_devices))
        for other, cuts in own.items():
            if other != chain:
                found = self._alone(other, cuts)
                beside_s += found.load_s
                beside_bytes += found.memory_bytes
        homes = list(self._homes(chain)[: self.placement.num_devices])
        pairs = PairCosts(
            costs,
            self.link,
            self.lam,
            self._rule(chain),
            self.placement.num_devices,
            beside_s[homes],
            beside_bytes[homes],
        )
        closed = legal_cut_pairs(len(costs), costs.skips) if collocate and costs.skips else None
        return optimal_fold(pairs, closed, order, slack)

    def _alone(self, chain: int, cuts: Cuts) -> Evaluation:
        """Evaluation of one chain alone."""
        placement = replace(self.placement, device_of_stage=self._homes(chain), starts=(0,))
        partition = Partition(placement, cuts)
        return evaluate(self.costs.chains[chain], partition, self.link, self.lam, self._rule(chain))

    def _homes(self, chain: int) -> tuple[int, ...]:
        placement = self.placement
        first, last = placement.starts[chain], placement.ends[chain]
        return placement.device_of_stage[first : last + 1]

    def _rule(self, chain: int) -> MemoryRule | None:
        if self.memory is None:
            return None
        first, last = self.placement.starts[chain], self.placement.ends[chain]
        return replace(self.memory, in_flight=self.memory.in_flight[first : last + 1])

    def _whole(self, own: dict[int, Cuts]) -> Cuts:
        """Join the cuts of all chains into those of one row of layers."""
        starts = self.costs.starts
        inner = (start + cut for i, start in enumerate(starts) for cut in own[i][:-1])
        return (*inner, len(self.costs))

    def _score(self, cuts: Cuts, order: tuple[str, ...]) -> tuple[float, ...]:
        """Values of the measures of ``order``; less is better."""
        found = evaluate(
            self.costs, Partition(self.placement, cuts), self.link, self.lam, self.memory
        )
        measures = {
            "load": max(found.load_s),
            "stage": max(found.stage_s),
            "bytes": float(found.boundary_bytes + found.skip_bytes),
        }
        return tuple(_rounded(measures[name]) for name in order)


def _rounded(value: float, digits: int = 10) -> float:
    """Round to ``digits`` significant digits, so that numerical noise does not count."""
    return float(f"{value:.{digits}g}")
