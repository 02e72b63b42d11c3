"""Exchanges of context-parallel ranks in an emulated step: real messages of smaller tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 120.0
"""For any one wait of a rank."""

Calls = Sequence[Callable[[], None]]
"""Exchanges of one pass."""


@dataclass(frozen=True)
class TokenSharing:
    """``size`` neighbouring ranks share tokens, and ``replicas`` of them hold equal parameters.

    For each stage or FSDP unit, the fp32 elements that a rank has for its group in each exchange of
    a forward, of a recomputation and of a backward. ``trained`` are the gradient elements that each
    stage sums over replicas.
    """

    size: int
    replicas: int
    forward: tuple[tuple[int, ...], ...]
    recompute: tuple[tuple[int, ...], ...]
    backward: tuple[tuple[int, ...], ...]
    trained: tuple[int, ...] = ()

    def passes(self, microbatches: int, parts: Sequence[int]) -> int:
        """Bytes that a rank sends to exchange the tokens of ``microbatches`` in these parts."""
        elements = sum(
            sum(each[part])
            for each in (self.forward, self.recompute, self.backward)
            for part in parts
        )
        return 4 * microbatches * elements * (self.size - 1) // self.size


class SharingGroups:
    """This rank's groups: context-parallel ranks, replicas, and its pipeline. Collective.

    Context-parallel ranks are neighbours, then data-parallel ones, as Megatron orders them.
    """

    def __init__(self, sharing: TokenSharing) -> None:
        world, size, replicas = dist.get_world_size(), sharing.size, sharing.replicas
        self.sharing, self.sent_bytes = sharing, 0
        self.tokens = join([list(range(i, i + size)) for i in range(0, world, size)])
        self.replicas = join([list(range(i, i + replicas)) for i in range(0, world, replicas)])
        self.pipeline = join([list(range(i, world, replicas)) for i in range(replicas)])

    def calls(self, elements: Sequence[int]) -> Calls:
        """All-to-alls of so many elements."""
        if self.sharing.size == 1:
            return ()
        return [self._all_to_all(count) for count in elements if count]

    def _all_to_all(self, elements: int) -> Callable[[], None]:
        """Sends and receives of all ranks at once, as NCCL's; gloo's own takes up to twice as
        long."""
        size, own = self.sharing.size, dist.get_rank(self.tokens)
        sent = torch.zeros(elements).chunk(size)
        taken = [torch.empty_like(part) for part in sent]
        ranks = dist.get_process_group_ranks(self.tokens)
        others = [i for i in range(size) if i != own]

        def exchange() -> None:
            works = [dist.irecv(taken[i], ranks[i], self.tokens) for i in others]
            works += [dist.isend(sent[i], ranks[i], self.tokens) for i in others]
            for work in works:
                work.wait()

        return exchange

    def sum_gradients(self, stages: Sequence[int]) -> None:
        """Sum the gradients of these stages over replicas."""
        if self.sharing.replicas > 1:
            for stage in stages:
                elements = self.sharing.trained[stage]
                dist.all_reduce(torch.zeros(elements), group=self.replicas)
                share = 4 * elements * (self.sharing.replicas - 1) // self.sharing.replicas
                self.sent_bytes += 2 * share


def join(groups: list[list[int]]) -> Any:
    """The one of ``groups`` that has this rank; all ranks make all of them."""
    limit = timedelta(seconds=TIMEOUT_S)
    made = [dist.new_group(ranks, timeout=limit) for ranks in groups]
    return next(g for g, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks)
