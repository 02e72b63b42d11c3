"""Where an exported graph falls into links of a chain, and which of its values are skips.

The links are made of the operations that depend on the noisy sample and on parameters, in order.
A value that is untouched while a whole block runs is a skip; any other is handed on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from megatron_pulse.backbone.derived.reading import (
    Reading,
    can_travel,
    is_heavy,
    path_of,
    size_of,
)

Touched = Mapping[fx.Node, Sequence[int]]
"""The positions in the chain where a value is computed and used, in order."""


class Blocks:
    """The blocks of a module, and where in the chain each begins and ends.

    ``of[i]`` is the innermost block of operation i, "" where there is none; ``spans`` gives the
    first and the last operation of each block.
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
        """Whether what is not touched between the two waits while a whole block runs, and not as
        part of a block around both (a residual of its own)."""
        inside = any(first <= begin and end <= last for first, last in self.spans.values())
        return not inside and any(
            begin < first and last < end for first, last in self.spans.values()
        )


def cut(
    chain: Sequence[fx.Node],
    reading: Reading,
    touched: Touched,
    blocks: Blocks,
    together: Sequence[tuple[int, int]],
    pieces: bool,
) -> list[int]:
    """Where links begin, and the chain's end: between blocks, and, for ``pieces``, within a block
    where no more bytes are in use than at either end of it.

    A link without a heavy operation joins its neighbour over the dearer cut. Nothing is cut
    between a value and what writes it in place, nor within the spans ``together``.
    """
    length = len(chain)
    number = {node: i for i, node in enumerate(chain)}
    alive, used, whole = ([0] * (length + 2) for _ in range(3))

    def add(counts: list[int], begin: int, end: int, amount: int) -> None:
        """To the cuts after operation ``begin`` and up to before operation ``end``."""
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

    between: dict[int, bool] = {}  # of every cut: whether it is between two blocks
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
