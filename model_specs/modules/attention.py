"""Specs of attention and MLP: Megatron-Core's classes over local or Transformer Engine parts.

The local variant computes attention with ``torch.nn.functional.scaled_dot_product_attention``;
the Transformer Engine variant is chosen when the run asks for it and it imports.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import (
    HAVE_TE,
    TEColumnParallelLinear,
    TEDotProductAttention,
    TERowParallelLinear,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import (
    CrossAttention,
    CrossAttentionSubmodules,
    SelfAttention,
    SelfAttentionSubmodules,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

Builder = Callable[..., Any]


class Parts(NamedTuple):
    """The three replaceable parts of a transformer sublayer."""

    column: Builder
    row: Builder
    core_attention: Builder


class SdpaCoreAttention(torch.nn.Module):
    """Unmasked attention through torch, with the calling convention of Megatron's core attention.

    Takes query [sq, b, heads, d] and key, value [sk, b, heads, d]; returns [sq, b, heads * d].
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__()
        if attn_mask_type != AttnMaskType.no_mask or config.attention_dropout:
            raise ValueError("SdpaCoreAttention has neither masks nor dropout")
        self.softmax_scale = softmax_scale

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
            raise ValueError("SdpaCoreAttention takes no mask, bias or packed sequences")
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        context = F.scaled_dot_product_attention(query, key, value, scale=self.softmax_scale)
        return context.permute(2, 0, 1, 3).flatten(2)


def parts(config: TransformerConfig) -> Parts:
    """Transformer Engine's parts if ``config.transformer_impl`` asks for them, else local ones."""
    if config.transformer_impl == "transformer_engine" and HAVE_TE:
        return Parts(TEColumnParallelLinear, TERowParallelLinear, TEDotProductAttention)
    return Parts(ColumnParallelLinear, RowParallelLinear, SdpaCoreAttention)


def without_bias(linear: Builder) -> Builder:
    """``linear`` that never has a bias, whatever ``config.add_bias_linear`` makes Megatron ask."""

    @functools.wraps(linear, updated=())
    def build(*args: Any, **kwargs: Any) -> Any:
        return linear(*args, **{**kwargs, "bias": False})

    return build


def self_attention_spec(config: TransformerConfig) -> ModuleSpec:
    """Self-attention without mask: q, k, v without bias, output projection with bias."""
    part = parts(config)
    return ModuleSpec(
        SelfAttention,
        params={"layer_number": 1, "attn_mask_type": AttnMaskType.no_mask},
        submodules=SelfAttentionSubmodules(
            linear_qkv=without_bias(part.column),
            core_attention=part.core_attention,
            linear_proj=part.row,
        ),
    )


def cross_attention_spec(
    config: TransformerConfig, context_dim: int, pg_collection: ProcessGroupCollection | None
) -> ModuleSpec:
    """Attention over a context [sk, b, context_dim]; biases as in ``self_attention_spec``.

    Megatron's CrossAttention takes the context to be ``hidden_size`` wide and does not hand its
    tensor-parallel group on; both are settled here.
    """
    part = parts(config)
    tp_group = pg_collection.tp if pg_collection is not None else None
    column = functools.partial(without_bias(part.column), tp_group=tp_group)

    def linear_kv(input_size: int, output_size: int, **kwargs: Any) -> Any:
        return column(context_dim, output_size, **kwargs)

    return ModuleSpec(
        CrossAttention,
        params={"layer_number": 1, "attn_mask_type": AttnMaskType.no_mask},
        submodules=CrossAttentionSubmodules(
            linear_q=column,
            linear_kv=linear_kv,
            core_attention=part.core_attention,
            linear_proj=part.row,
        ),
    )


def mlp_spec(config: TransformerConfig) -> ModuleSpec:
    """GELU MLP, or GEGLU if ``config.gated_linear_unit``; both linears with bias."""
    part = parts(config)
    return ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=part.column, linear_fc2=part.row))
