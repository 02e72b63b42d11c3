"""A layer's tokens over context-parallel ranks, which exchange heads for tokens in attention.

A rank has a share of each sequence (text, image) between the layers. Self-attention exchanges its
own tokens of all heads for all tokens of a share of the heads, and back: DeepSpeed Ulysses
(arXiv 2309.14509). Where heads do not divide over ranks, it is ring attention. The loss is computed
whole on every rank, so a rank's gradients count context-parallel-size times; Megatron's average
over data- and context-parallel ranks undoes that.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_pg_rank, get_pg_size

from megatron_pulse.backbone.token_shares import share_of, uses_ring
from megatron_pulse.tracing.context_parallel.collectives import to_heads, to_tokens
from megatron_pulse.tracing.context_parallel.division import Division
from megatron_pulse.tracing.context_parallel.ring import ring_attention
from model_specs.common.layers import LayerModule, Table, cp_group


class TokenShares:
    """Shares of a layer's tokens. ``segments`` holds, for each shape of samples, the numbers of
    tokens of the sequences that the layer joins, in order.

    ``shape_index`` is that of the present microbatch.
    """

    def __init__(
        self, groups: ProcessGroupCollection | None, segments: Sequence[tuple[int, ...]]
    ) -> None:
        self.group = cp_group(groups)
        self.rank, self.size = get_pg_rank(self.group), get_pg_size(self.group)
        self.shape_index = 0
        self._divisions = [Division(0, each) for each in segments]

    def own_table(self, table: Table, shape_index: int) -> Table:
        """Rows, along dimension 1, of this rank's tokens of samples of a shape."""
        if self.size == 1:
            return table
        return _own_table(table, self._divisions[shape_index], self.rank, self.size)

    def exchanged(self, core: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
        """Builder of ``core`` attention of this rank's share of the heads, to all tokens.

        It is ``RingCoreAttention`` instead if the heads do not divide over ranks. The module is
        called with queries, keys and values [own tokens, b, heads, d] and returns [own tokens, b,
        heads * d], as without context parallelism. ``core`` sees tokens rank after rank; further
        arguments reach it as they are. A ring takes no mask.
        """
        if self.size == 1:
            return core

        def build(config: TransformerConfig, *args: Any, **kwargs: Any) -> torch.nn.Module:
            heads = config.num_attention_heads, config.num_query_groups
            if uses_ring(heads, self.size, config.tensor_model_parallel_size):
                return RingCoreAttention(self, kwargs.get("softmax_scale"))
            of_share = copy.copy(config)
            of_share.num_attention_heads //= self.size
            of_share.num_query_groups //= self.size
            made = core(of_share, *args, **kwargs)
            # Hooks, because a module around it would change its names in checkpoints.
            made.register_forward_pre_hook(self._gather_tokens)
            made.register_forward_hook(self._return_tokens)
            return made

        return build

    @property
    def segments(self) -> tuple[int, ...]:
        """Numbers of tokens, over all ranks, of the present microbatch's sequences."""
        return self._divisions[self.shape_index].segments

    def in_order(self, gathered: torch.Tensor) -> list[torch.Tensor]:
        """Sequences of tokens that ``exchanged`` attention is called with, rank after rank."""
        of_ranks = zip(*map(self._shares_of, self.segments), strict=True)
        pieces = gathered.split([count for of_rank in of_ranks for count in of_rank])
        num_sequences = len(self.segments)
        return [torch.cat(pieces[i::num_sequences]) for i in range(num_sequences)]

    def by_rank(self, sequences: Sequence[torch.Tensor]) -> torch.Tensor:
        """Inverse of ``in_order``."""
        pieces = [tokens.split(self._shares_of(len(tokens))) for tokens in sequences]
        return torch.cat([piece for of_rank in zip(*pieces, strict=True) for piece in of_rank])

    def _shares_of(self, length: int) -> list[int]:
        return [share_of(length, rank, self.size)[1] for rank in range(self.size)]

    @property
    def _counts(self) -> tuple[int, ...]:
        return self._divisions[self.shape_index].counts(self.size)

    def _gather_tokens(self, core: torch.nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*to_heads(given[:3], self._counts, self.group), *given[3:])

    def _return_tokens(
        self, core: torch.nn.Module, given: tuple[Any, ...], attended: torch.Tensor
    ) -> torch.Tensor:
        heads = attended.unflatten(2, (given[0].shape[2], -1))
        return to_tokens(heads, self._counts, self.group).flatten(2)


class RingCoreAttention(torch.nn.Module):
    """Unmasked attention of own queries to the keys of all ranks, for any number of heads.

    Takes queries, keys and values [own tokens, b, heads, d] and returns [own tokens, b, heads * d].
    """

    def __init__(self, shares: TokenShares, softmax_scale: float | None) -> None:
        super().__init__()
        self._shares, self.softmax_scale = shares, softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Attention of every query position over all key positions."""
        if attention_mask is not None or attention_bias is not None or packed_seq_params:
            raise ValueError("RingCoreAttention supports no mask, bias or packed sequences")
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        segments, group = self._shares.segments, self._shares.group
        of_all = (segments, segments), self.softmax_scale, group
        return ring_attention(query, key, value, None, *of_all).permute(2, 0, 1, 3).flatten(2)


@functools.cache
def _own_table(table: Table, division: Division, rank: int, size: int) -> Table:
    """Table of a rank's tokens; all layers share one."""
    return table.mapped(lambda whole: whole.index_select(1, division.own_tokens(rank, size)))


class TokenLayer(LayerModule):
    """Layer that joins or counts tokens; ``shares`` are those of its attentions."""

    shares: Sequence[TokenShares]

    @property
    def chain_shape(self) -> int:
        """Index of the microbatch's shape; the runtime sets it before each call."""
        return self.shares[0].shape_index

    @chain_shape.setter
    def chain_shape(self, shape_index: int) -> None:
        for each in self.shares:
            each.shape_index = shape_index
