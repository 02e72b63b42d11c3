"""Division of a value's tokens over the ranks of a context-parallel group."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_pulse.backbone.token_shares import share_of


@dataclass(frozen=True)
class Division:
    """Dimension ``dim`` of a value holds tokens, of each of whose ``segments`` a rank has a share.

    Segments (text, image) are lengths over all ranks, in order.
    """

    dim: int
    segments: tuple[int, ...]

    @property
    def length(self) -> int:
        """Number of tokens over all ranks."""
        return sum(self.segments)

    def own_segments(self, rank: int, size: int) -> tuple[int, ...]:
        """Number of tokens that ``rank`` has of each segment."""
        return tuple(share_of(length, rank, size)[1] for length in self.segments)

    def counts(self, size: int) -> tuple[int, ...]:
        """Number of tokens of each rank."""
        return tuple(sum(self.own_segments(rank, size)) for rank in range(size))

    def own_shape(self, shape: Sequence[int], rank: int, size: int) -> tuple[int, ...]:
        """Shape of a rank's share of a value of ``shape``."""
        return (*shape[: self.dim], sum(self.own_segments(rank, size)), *shape[self.dim + 1 :])

    def own_tokens(self, rank: int, size: int) -> torch.Tensor:
        """Token numbers of ``rank``, on the CPU: [tokens]."""
        first = sum(self.counts(size)[:rank])
        order = token_order(self.segments, size, torch.device("cpu"))
        return order[first : first + self.counts(size)[rank]]

    def at(self, dim: int) -> Division:
        """The same tokens in another dimension."""
        return Division(dim, self.segments)


@functools.lru_cache(maxsize=32)
def token_order(segments: tuple[int, ...], size: int, device: torch.device) -> torch.Tensor:
    """Token numbers in the order in which the ranks' shares follow each other: [tokens]."""
    ranges, start = [list[torch.Tensor]() for _ in range(size)], 0
    for length in segments:
        for rank in range(size):
            first, count = share_of(length, rank, size)
            ranges[rank].append(torch.arange(start + first, start + first + count, device=device))
        start += length
    return torch.cat([each for of_rank in ranges for each in of_rank])
