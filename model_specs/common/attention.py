"""Attention and MLP: Megatron-Core's classes over local or Transformer Engine parts.

The local variant computes attention with ``torch.nn.functional.scaled_dot_product_attention``. The
Transformer Engine variant is used if the run asks for it and it can be imported.
"""

from __future__ import annotations

import copy
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
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_pg_size
from torch import Tensor

from model_specs.common.layers import cp_group, tp_group
from model_specs.common.megatron_config import InitMethod
from model_specs.common.token_shares import TokenShares

Builder = Callable[..., Any]
Rotary = Callable[[torch.Tensor], torch.Tensor]


class SublayerParts(NamedTuple):
    """The three replaceable parts of a transformer sublayer."""

    column: Builder
    row: Builder
    core_attention: Builder


class SdpaCoreAttention(torch.nn.Module):
    """Attention through torch, with the calling convention of Megatron's core attention.

    Takes query [sq, b, heads, d] and key, value [sk, b, heads, d]; returns [sq, b, heads * d].
    Cross-attention of mask type ``padding`` needs a mask of keys [b, 1, 1, sk]. In Megatron's
    convention, True excludes a key. No other mask type takes a mask.
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
        self.masked = attn_mask_type == AttnMaskType.padding and attention_type == "cross"
        if not self.masked and attn_mask_type != AttnMaskType.no_mask:
            raise ValueError("SdpaCoreAttention supports masks of cross-attention keys only")
        if config.attention_dropout:
            raise ValueError("SdpaCoreAttention supports no dropout")
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
        """Attention of every query position over all unmasked key positions."""
        if attention_bias is not None or packed_seq_params:
            raise ValueError("SdpaCoreAttention supports no bias or packed sequences")
        if not self.masked and attention_mask is not None:
            raise ValueError("SdpaCoreAttention takes no mask in this layer")
        expected = (key.shape[1], 1, 1, key.shape[0])
        if self.masked and (attention_mask is None or attention_mask.shape != expected):
            raise ValueError(f"SdpaCoreAttention needs a key mask of shape {list(expected)}")
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        context = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if attention_mask is None else ~attention_mask,
            scale=self.softmax_scale,
        )
        return context.permute(2, 0, 1, 3).flatten(2)


def left_out(mask: torch.Tensor) -> torch.Tensor:
    """Convert a batch's key mask [b, sk] (1: attended to) to the form of ``SdpaCoreAttention``.

    A sample with every key masked attends to all keys, the effect of diffusers' bias of -10000.
    """
    masked = mask == 0
    return (masked & ~masked.all(dim=1, keepdim=True))[:, None, None]


def parts(config: TransformerConfig) -> SublayerParts:
    """Transformer Engine's parts if ``config.transformer_impl`` asks for them, else local ones."""
    if config.transformer_impl == "transformer_engine" and HAVE_TE:
        return SublayerParts(TEColumnParallelLinear, TERowParallelLinear, TEDotProductAttention)
    return SublayerParts(BiasColumnParallelLinear, RowParallelLinear, SdpaCoreAttention)


class PreparedCoreAttention(torch.nn.Module):
    """Core attention after per-head norms of query and key, and rotary positions.

    ``head_norm`` is called with the head's width. ``rotary`` rotates queries [s, b, heads, d], and
    keys too if ``rotary_keys``. Each tensor-parallel rank normalises its own heads, so norm
    gradients must be summed over ranks. Megatron finds these norms by their attribute names.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        inner: Builder,
        head_norm: Builder | None,
        rotary: Rotary | None,
        rotary_keys: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.inner = inner(config, *args, **kwargs)
        width = config.kv_channels
        self.q_layernorm = head_norm(width) if head_norm is not None else torch.nn.Identity()
        self.k_layernorm = head_norm(width) if head_norm is not None else torch.nn.Identity()
        self.rotary = rotary
        self.rotary_keys = rotary_keys

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Same arguments and result as the core attention."""
        query, key = self.q_layernorm(query), self.k_layernorm(key)
        if self.rotary is not None:
            query = self.rotary(query)
            if self.rotary_keys:
                key = self.rotary(key)
        attended: torch.Tensor = self.inner(query, key, *args, **kwargs)
        return attended


def prepared(
    part: SublayerParts, head_norm: Builder | None, rotary: Rotary | None, rotary_keys: bool
) -> Builder:
    """Core attention of ``part``, wrapped in ``PreparedCoreAttention`` if there are norms or
    rotary.
    """
    if head_norm is None and rotary is None:
        return part.core_attention
    return functools.partial(
        PreparedCoreAttention,
        inner=part.core_attention,
        head_norm=head_norm,
        rotary=rotary,
        rotary_keys=rotary_keys,
    )


def column_linear(
    config: TransformerConfig,
    groups: ProcessGroupCollection | None,
    inputs: int,
    outputs: int,
    name: str,
) -> Any:
    """Column-parallel linear with bias; ``name`` names its communication buffer in TE."""
    return parts(config).column(
        inputs,
        outputs,
        config=config,
        init_method=config.init_method,
        bias=True,
        gather_output=False,
        skip_bias_add=False,
        is_expert=False,
        tp_comm_buffer_name=name,
        tp_group=tp_group(groups),
    )


def row_linear(
    config: TransformerConfig,
    groups: ProcessGroupCollection | None,
    inputs: int,
    outputs: int,
    name: str,
    draw: InitMethod | None = None,
    bias: bool = True,
) -> Any:
    """Row-parallel linear; returns its outputs and its bias separately."""
    return parts(config).row(
        inputs,
        outputs,
        config=config,
        init_method=draw or config.output_layer_init_method,
        bias=bias,
        input_is_parallel=True,
        skip_bias_add=True,
        is_expert=False,
        tp_comm_buffer_name=name,
        tp_group=tp_group(groups),
    )


def with_bias(linear: Builder, bias: bool) -> Builder:
    """``linear`` with ``bias`` fixed, overriding Megatron's ``config.add_bias_linear``."""

    @functools.wraps(linear, updated=())
    def build(*args: Any, **kwargs: Any) -> Any:
        return linear(*args, **{**kwargs, "bias": bias})

    return build


def self_attention(
    config: TransformerConfig,
    groups: ProcessGroupCollection | None,
    shares: TokenShares | None = None,
    *,
    qkv_bias: bool = False,
    head_norm: Builder | None = None,
    rotary: Rotary | None = None,
) -> Any:
    """Self-attention without mask; the output projection has a bias.

    ``head_norm`` and ``rotary`` as in ``PreparedCoreAttention``. Raises ValueError for tokens that
    context-parallel ranks divide without ``shares``.
    """
    part = parts(config)
    if shares is not None:
        part = part._replace(core_attention=shares.exchanged(part.core_attention))
    elif get_pg_size(cp_group(groups)) > 1:
        raise ValueError("self-attention without TokenShares is not context-parallel")
    spec = ModuleSpec(
        SelfAttention,
        params={"layer_number": 1, "attn_mask_type": AttnMaskType.no_mask},
        submodules=SelfAttentionSubmodules(
            linear_qkv=with_bias(part.column, qkv_bias),
            core_attention=prepared(part, head_norm, rotary, rotary_keys=True),
            linear_proj=part.row,
        ),
    )
    return build_module(spec, config=config, pg_collection=groups)


def cross_attention(
    config: TransformerConfig,
    groups: ProcessGroupCollection | None,
    context_dim: int,
    *,
    qkv_bias: bool = False,
    head_norm: Builder | None = None,
    rotary: Rotary | None = None,
    key_mask: bool = False,
) -> Any:
    """Attention over a context [sk, b, context_dim]; only queries have rotary positions.

    With ``key_mask``, the module takes the ``attention_mask`` of ``SdpaCoreAttention``. Masked
    attention is computed by that class beside Transformer Engine's linears too.

    Megatron's CrossAttention assumes a context of width ``hidden_size``, sharded under sequence
    parallelism, and does not pass on its tensor-parallel group. All three are corrected here: the
    context is whole on every rank.
    """
    part = parts(config)
    column = functools.partial(with_bias(part.column, qkv_bias), tp_group=tp_group(groups))
    whole = copy.copy(config)
    whole.sequence_parallel = False
    if key_mask:
        part = part._replace(core_attention=SdpaCoreAttention)

    def linear_kv(input_size: int, output_size: int, **kwargs: Any) -> Any:
        return column(context_dim, output_size, **{**kwargs, "config": whole})

    mask_type = AttnMaskType.padding if key_mask else AttnMaskType.no_mask
    spec = ModuleSpec(
        CrossAttention,
        params={"layer_number": 1, "attn_mask_type": mask_type},
        submodules=CrossAttentionSubmodules(
            linear_q=column,
            linear_kv=linear_kv,
            core_attention=prepared(part, head_norm, rotary, rotary_keys=False),
            linear_proj=part.row,
        ),
    )
    return build_module(spec, config=config, pg_collection=groups)


def mlp(
    config: TransformerConfig, groups: ProcessGroupCollection | None, *, bias: bool = True
) -> Any:
    """GELU MLP, or GEGLU if ``config.gated_linear_unit``; both linears with bias, or neither."""
    first, second = (with_bias(part, bias) for part in parts(config)[:2])
    return build_module(
        ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=first, linear_fc2=second)),
        config=config,
        ffn_hidden_size=config.ffn_hidden_size,
        tp_group=tp_group(groups),
    )


class BiasColumnParallelLinear(ColumnParallelLinear):
    """ColumnParallelLinear that computes the bias gradient of a frozen weight; Megatron
    drops it."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        bias: Tensor | None = kwargs.get("bias")
        if weight.requires_grad or bias is None or not bias.requires_grad:
            return super()._forward_impl(input, weight, *args, **kwargs)
        product: Tensor = super()._forward_impl(input, weight, *args, **{**kwargs, "bias": None})
        return product + bias
