"""Cuts of an exported graph into links of a chain.

Links consist of the operations that depend on the noisy sample and on parameters, in order. A value
that is unused while a whole block runs is a skip; other values cross the boundary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from megatron_pulse.tracing.graph_analysis import (
    GraphAnalysis,
    can_travel,
    is_heavy,
    path_of,
    size_of,
)

Touched = Mapping[fx.Node, Sequence[int]]
"""Positions in the chain where a value is computed and used, in order."""


class Blocks:
    """Blocks of a module, with their first and last operations in the chain.

    ``of[i]`` is the innermost block of operation i, "" without a block; ``spans`` gives each
    block's first and last operation.
    """

    def __init__(self, chain: Sequence[fx.Node], names: frozenset[str]) -> None:
        self._names = names
        self.of = [self._innermost(path_of(node)) for node in chain]
        self.spans: dict[str, tuple[int, int]] = {}
        for i, block in enumerate(self.of):
            while block:
                self.spans[block] = (self.spans.get(block, (i, i))[0], i)
                block = self._innermost(block.rpartition(".")[0])

    def _innermost(self, path: str) -> str:
        while path and path not in self._names:
            path = path.rpartition(".")[0]
        return path

    def rests(self, begin: int, end: int) -> bool:
        """True if a value unused between two operations waits while a whole block runs.

        False within an enclosing block, where the value belongs to the block's own residual.
        """
        inside = any(first <= begin and end <= last for first, last in self.spans.values())
        return not inside and any(
            begin < first and last < end for first, last in self.spans.values()
        )


def cut(
    chain: Sequence[fx.Node],
    reading: GraphAnalysis,
    touched: Touched,
    blocks: Blocks,
    together: Sequence[tuple[int, int]],
    pieces: bool,
) -> list[int]:
    """Starts of links, followed by the chain's end.

    Cuts lie between blocks. With ``pieces`` they also lie within a block, where no more bytes are
    in use than at either end of the block. A link without a heavy operation is merged with a
    neighbour, across the cut with more bytes. No cut separates a value from in-place writes to it,
    or lies within one of the spans ``together``.
    """
    length = len(chain)
    number = {node: i for i, node in enumerate(chain)}
    alive, used, whole = ([0] * (length + 2) for _ in range(3))

    def add(counts: list[int], begin: int, end: int, amount: int) -> None:
        """Add ``amount`` at the cuts after operation ``begin``, up to the one before operation
        ``end``.
        """
        counts[begin + 1] += amount
        counts[end + 1] -= amount

    for node, times in touched.items():
        size = size_of(node)
        for begin, end in zip(times, times[1:], strict=False):
            add(alive, begin, end, size)
            add(used, begin, end, 0 if blocks.rests(begin, end) else size)
            add(whole, begin, end, 0 if can_travel(node) else 1)
        for writer in reading.writers.get(node, ()):
            if writer in number:
                add(whole, number[node], number[writer], 1)
    for begin, end in together:
        add(whole, begin, end, 1)
    for counts in (alive, used, whole):
        for p in range(1, len(counts)):
            counts[p] += counts[p - 1]

    between: dict[int, bool] = {}  # for every cut: true if between two blocks
    for p in range(1, length):
        before, after = blocks.of[p - 1], blocks.of[p]
        if whole[p]:
            continue
        if before != after:
            between[p] = True
        elif pieces and after:
            first, last = blocks.spans[after]
            if used[p] <= min(used[first], used[last + 1]):
                between[p] = False
    heavy = [is_heavy(node) for node in chain]
    while between:
        ends = [0, *sorted(between), length]
        light = [(a, b) for a, b in zip(ends, ends[1:], strict=False) if not any(heavy[a:b])]
        if not light:
            break
        sides = [p for p in reversed(light[0]) if p in between]
        del between[max(sides, key=lambda p: (not between[p], alive[p]))]
    return [0, *sorted(between), length]
