"""Costs of stages as functions of their ends: arrays of pairs of a fold, or of single stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_pulse.backbone.costs import ChainCosts, Floats, running_sum
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.partition.evaluate import MemoryRule

type Ints = NDArray[np.int64]
type Bools = NDArray[np.bool_]

SLACK = 1 + 1e-12  # sums in another order must not make an optimum illegal


@dataclass
class PairCosts:
    """Costs of the pair of stages [a, a2) and [b2, b) on device k, for arrays of such pairs.

    ``beside_s[k]`` and ``beside_bytes[k]`` are seconds and bytes that other chains take on the
    device of pair k (default: none).
    """

    costs: ChainCosts
    link: Link
    lam: float
    memory: MemoryRule | None
    num_pairs: int
    beside_s: Floats = field(default_factory=lambda: np.zeros(0))
    beside_bytes: Floats = field(default_factory=lambda: np.zeros(0))
    forward: Floats = field(init=False)
    compute: Floats = field(init=False)

    def __post_init__(self) -> None:
        costs = self.costs
        self.forward = running_sum(costs.forward_s)
        self.compute = running_sum(np.add(costs.forward_s, costs.backward_s).tolist())
        if not len(self.beside_s):
            self.beside_s = np.zeros(self.num_pairs)
        if not len(self.beside_bytes):
            self.beside_bytes = np.zeros(self.num_pairs)
        rule = self.memory
        self._parameters = running_sum(costs.parameters if rule is None else rule.weighed(costs))
        self._saved = running_sum(costs.saved_bytes)
        # Cuts 0 and num are the ends of the chain, where nothing is sent.
        self._bytes = np.array([0, *costs.boundary_bytes[1:], 0], dtype=np.float64)
        self.send = np.array([self.link.time_s(size) for size in self._bytes])
        self._skip_s = SkipSums(costs, [self.link.time_s(s.num_bytes) for s in costs.skips])
        self._skip_bytes = SkipSums(costs, [s.num_bytes for s in costs.skips])

    def load(self, pair: int | Ints, a: Ints, a2: Ints, b2: Ints, b: Ints) -> Floats:
        """Forward and backward time of both stages and all messages of the device, plus
        ``beside_s``."""
        compute = self.compute[a2] - self.compute[a] + self.compute[b] - self.compute[b2]
        inner = np.where(a2 == b2, 0.0, self.send[a2] + self.send[b2])
        sent = self.send[a] + self.send[b] + inner + self._skip_s.single_ends(a, a2, b2, b)
        result: Floats = compute + 2 * sent + self.beside_s[pair]
        return result

    def stage(self, pair: int | Ints, a: Ints, a2: Ints, b2: Ints, b: Ints) -> Floats:
        """Measure of the larger of both stages, by equation 1 of the paper."""
        left = self.forward[a2] - self.forward[a] + self.lam * self.send[a2] * (a2 != b2)
        right = self.forward[b] - self.forward[b2] + self.lam * self.send[b]
        result: Floats = np.maximum(left, right)
        return result

    def bytes(self, pair: int | Ints, a: Ints, a2: Ints, b2: Ints, b: Ints) -> Floats:
        """Forward bytes of the inner boundaries, and half of each skip with one end in the pair.

        A skip that is itself the boundary tensor before one of the stages is not sent again.
        """
        innermost = a2 == b2
        inner = np.where(innermost, 0.0, self._bytes[a2] + self._bytes[b2])
        again = self.merged_bytes(a, a2) + np.where(innermost, 0.0, self.merged_bytes(b2, b))
        result: Floats = inner + self._skip_bytes.single_ends(a, a2, b2, b) / 2 - again
        return result

    def merged_bytes(self, begin: Ints, end: Ints) -> Floats:
        """Bytes of skips that are the boundary tensor before the stage [begin, end), which pops
        them."""
        return self._skip_bytes.merged(begin, end)

    def row(self, measure: str, begin: Ints, end: Ints) -> Floats:
        """Value of ``measure`` for single stages [begin, end), one on each device."""
        sent = self.send[begin] + self.send[end]
        if measure == "load":
            skips = self._skip_s.single_ends(begin, end, end, end)
            load: Floats = self.compute[end] - self.compute[begin] + 2 * (sent + skips)
            return load
        if measure == "stage":
            stage: Floats = self.forward[end] - self.forward[begin] + self.lam * self.send[end]
            return stage
        skip_bytes = self._skip_bytes.single_ends(begin, end, end, end) / 2
        moved: Floats = self._bytes[end] + skip_bytes - self.merged_bytes(begin, end)
        return moved

    def row_bytes_held(self, stage: int, begin: Ints, end: Ints) -> Floats:
        """Memory of the layers [begin, end) as stage number ``stage``, in bytes."""
        if self.memory is None:
            return np.zeros(len(begin))
        rule = self.memory
        held: Floats = rule.bytes_per_parameter * (self._parameters[end] - self._parameters[begin])
        return held + rule.in_flight[stage] * (self._saved[end] - self._saved[begin])

    def fits(self, pair: int, a: Ints, a2: Ints, b2: Ints, b: Ints) -> Bools:
        """True for pairs that fit in their device's memory."""
        if self.memory is None:
            return np.ones(len(a), dtype=np.bool_)
        there, back = self._held_up_to[pair]
        held = there[a2] - there[a] + back[b] - back[b2]
        result: Bools = held <= self.memory.limit_bytes * SLACK - self.beside_bytes[pair]
        return result

    @cached_property
    def _held_up_to(self) -> list[tuple[Floats, Floats]]:
        """For each pair, the memory of all layers before each cut, as the pair's first and second
        stage."""
        rule = self.memory
        if rule is None:
            return []
        state = rule.bytes_per_parameter * self._parameters
        held = [state + flying * self._saved for flying in rule.in_flight]
        return [(held[pair], held[-1 - pair]) for pair in range(self.num_pairs)]


class SkipSums:
    """Sums of a weight over skips, selected by the positions of their ends."""

    def __init__(self, costs: ChainCosts, weights: Sequence[float]) -> None:
        num = len(costs.names)
        ends, edges = np.zeros(num), np.zeros((num, num))
        for skip, weight in zip(costs.skips, weights, strict=True):
            ends[skip.source] += weight
            ends[skip.destination] += weight
            edges[skip.source, skip.destination] += weight
        self._any = bool(costs.skips)
        self._ends = running_sum(ends.tolist())
        table = np.zeros((num + 1, num + 1))
        table[1:, 1:] = edges.cumsum(0).cumsum(1)
        self._edges, self._width = table.ravel(), num + 1
        begin, end = np.indices(table.shape)
        self._inside = self._between(begin, end, begin, end).ravel()

    def single_ends(self, a: Ints, a2: Ints, b2: Ints, b: Ints) -> Floats:
        """Weight of skips with exactly one end in [a, a2) and [b2, b) together."""
        if not self._any:
            return np.zeros(len(a))
        within, width = self._inside, self._width
        inside = within[a * width + a2] + within[b2 * width + b] + self._between(a, a2, b2, b)
        ends = self._ends[a2] - self._ends[a] + self._ends[b] - self._ends[b2]
        result: Floats = ends - 2 * inside
        return result

    def merged(self, begin: Ints, end: Ints) -> Floats:
        """Weight of skips from the layer before ``begin`` to a layer in [begin, end).

        Such a skip is sent as the boundary tensor (see ``crossing``).
        """
        if not self._any:
            return np.zeros(len(begin))
        return self._between(np.maximum(begin - 1, 0), begin, begin, end)

    def _between(self, from_: Ints, from_end: Ints, to: Ints, to_end: Ints) -> Floats:
        """Weight of skips from a layer in [from_, from_end) to a layer in [to, to_end)."""
        table, above, below = self._edges, from_ * self._width, from_end * self._width
        result: Floats = (
            table[below + to_end] - table[above + to_end] - table[below + to] + table[above + to]
        )
        return result


def ragged(begin: Ints, end: Ints) -> tuple[Ints, Ints]:
    """(i, every value from begin[i] to end[i] - 1) for all i, as two flat arrays."""
    counts = np.maximum(end - begin, 0)
    owner: Ints = np.repeat(np.arange(len(counts)), counts)
    firsts: Ints = np.repeat(np.cumsum(counts) - counts, counts)
    return owner, np.arange(len(owner)) - firsts + begin[owner]
