"""Hunyuan-DiT's modules (arXiv:2405.08748, section 2.1; diffusers' HunyuanDiT2DModel).

Tokens are [s, b, D], the text of cross-attention is [length, b, width]. Initialised as in the
authors' code: Xavier in linears, zeros in the modulations and the last linear.
"""

from __future__ import annotations

import functools
import math

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_pulse.backbone.build_context import LayerContext
from model_specs.common.attention import cross_attention, mlp, self_attention
from model_specs.common.layers import (
    LayerModule,
    LayerNorm,
    Named,
    Table,
    Tensors,
    linear,
    works_on_shards,
)
from model_specs.common.megatron_config import dit_config, xavier_init
from model_specs.common.patches import PatchEmbed, normed, of_grid, unpatchify
from model_specs.common.rotary import RotaryOfShape
from model_specs.common.token_shares import TokenLayer, TokenShares
from model_specs.common.token_slices import TokenSliced
from model_specs.hunyuan_dit.config import HunyuanDiTConfig
from model_specs.hunyuan_dit.embedders import TextEmbedding, TimeEmbedding, drawn_zeros, silu_fp32

__all__ = [
    "CrossAttentionLayer",
    "FeedForwardLayer",
    "Head",
    "Patches",
    "SelfAttentionLayer",
    "TextEmbedding",
    "TimeEmbedding",
]

_BASE_SIDE = 512 // 8  # side of the latent whose positions run from 0 to its number of patches


@functools.cache
def _rotary_table(grid: tuple[int, int], base: int, width: int) -> Table:
    """Cosines and sines [2, rows * columns, width] of the patch positions; all blocks share one.

    The first half of the features rotates with the column, the second with the row, in pairs of
    neighbours. Positions are scaled so that the longer side spans ``base``. The shorter side spans
    the centre of ``base``, in proportion, in whole positions.
    """

    def angles(count: int) -> torch.Tensor:
        span = round(base / max(grid) * count)
        start = round((base - span) / 2)
        places = torch.linspace(start, (start + span) * (count - 1) / count, count)
        exponents = torch.arange(0, width // 2, 2, dtype=torch.float32) / (width // 2)
        return torch.outer(places, 1.0 / 10000**exponents).repeat_interleave(2, dim=1)

    def make() -> torch.Tensor:
        both = of_grid(*map(angles, grid))
        return torch.stack([both.cos(), both.sin()])

    return Table(make)


def _turn(table: Table, heads: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys [s, b, heads, d] by their positions, in fp32."""
    cos, sin = table.on(heads.device)[:, :, None, None]
    real, imaginary = heads.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([-imaginary, real], dim=-1).flatten(-2)
    return (heads.float() * cos + turned.float() * sin).to(heads.dtype)


def _rotary(sizes: HunyuanDiTConfig, shares: TokenShares) -> RotaryOfShape:
    base, width = _BASE_SIDE // sizes.patch_size, sizes.attention_head_dim
    return RotaryOfShape(_turn, [_rotary_table(grid, base, width) for grid in sizes.grids], shares)


def _shares(sizes: HunyuanDiTConfig, context: LayerContext) -> TokenShares:
    return TokenShares(context.pg_collection, [(count,) for count in sizes.token_counts])


class Patches(PatchEmbed):
    """Patches without added positions; attention uses rotary positions."""

    def __init__(self, sizes: HunyuanDiTConfig, context: LayerContext) -> None:
        super().__init__(context, sizes.in_channels, sizes.dim, sizes.patch_size)


class ShiftedNorm(torch.nn.Module):
    """Norm of tokens plus Linear(SiLU(temb))."""

    def __init__(self, dim: int, config: TransformerConfig) -> None:
        super().__init__()
        self.linear = linear(dim, dim, config, drawn_zeros)
        self.norm = LayerNorm(config, dim)

    def forward(self, tokens: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        """Tokens [s, b, D], temb [b, D]."""
        shifted: torch.Tensor = self.norm(tokens) + self.linear(silu_fp32(temb))
        return shifted


class SelfAttentionLayer(TokenLayer):
    """x + attention(norm(x) + shift); with ``pop``, x is Linear(2D -> D) of norm([x, skip]).

    ``skip_linear`` is replicated over tensor-parallel ranks. Under sequence parallelism each rank
    multiplies its own tokens.
    """

    def __init__(
        self, sizes: HunyuanDiTConfig, context: LayerContext, pop: str | None = None
    ) -> None:
        config = dit_config(sizes, context.config, sizes.ffn_dim)
        super().__init__(config, context.pg_collection)
        self.pop = pop
        dim = sizes.dim
        if pop is not None:
            self.skip_norm = LayerNorm(config, 2 * dim)
            self.skip_linear = linear(2 * dim, dim, config, xavier_init)
        self.norm1 = ShiftedNorm(dim, config)
        self.to(dtype=config.params_dtype)
        works_on_shards(self, config)
        shares = _shares(sizes, context)
        self.shares = (shares,)
        self.attention = self_attention(
            config,
            context.pg_collection,
            shares,
            qkv_bias=True,
            head_norm=_head_norm(config),
            rotary=_rotary(sizes, shares),
        )

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """``conditioning``: temb."""
        (tokens,) = inputs
        if self.pop is not None:
            both = torch.cat([tokens, skips[self.pop]], dim=-1)
            tokens = self.skip_linear(self.skip_norm(both))
        out, bias = self.attention(self.norm1(tokens, conditioning["temb"]), attention_mask=None)
        return (tokens + (out + bias),)


class CrossAttentionLayer(TokenLayer):
    """x + cross-attention(norm(x), text), with rotary positions on the queries."""

    def __init__(self, sizes: HunyuanDiTConfig, context: LayerContext) -> None:
        config = dit_config(sizes, context.config, sizes.ffn_dim)
        super().__init__(config, context.pg_collection)
        self.norm2 = LayerNorm(config, sizes.dim)
        shares = _shares(sizes, context)
        self.shares = (shares,)
        self.attention = cross_attention(
            config,
            context.pg_collection,
            sizes.cross_attention_dim,
            qkv_bias=True,
            head_norm=_head_norm(config),
            rotary=_rotary(sizes, shares),
        )

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """``conditioning``: text."""
        (tokens,) = inputs
        out, bias = self.attention(
            self.norm2(tokens), attention_mask=None, key_value_states=conditioning["text"]
        )
        return (tokens + (out + bias),)


def _head_norm(config: TransformerConfig) -> functools.partial[torch.nn.LayerNorm]:
    return functools.partial(
        torch.nn.LayerNorm, eps=config.layernorm_epsilon, dtype=config.params_dtype
    )


class FeedForwardLayer(LayerModule, TokenSliced):
    """x + MLP(norm(x)), GELU approximated with tanh."""

    def __init__(self, sizes: HunyuanDiTConfig, context: LayerContext) -> None:
        config = dit_config(sizes, context.config, sizes.ffn_dim)
        super().__init__(config, context.pg_collection)
        self.norm3 = LayerNorm(config, sizes.dim)
        self.mlp = mlp(config, context.pg_collection)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Tokens [s, b, D] to tokens."""
        return (self.in_slices(self._changed, [self.norm3, self.mlp], inputs),)

    def _changed(self, tokens: torch.Tensor) -> torch.Tensor:
        out, bias = self.mlp(self.norm3(tokens))
        changed: torch.Tensor = tokens + (out + bias)
        return changed


class ModulatedNorm(torch.nn.Module):
    """Norm of tokens, scaled and shifted by Linear(SiLU(temb))."""

    def __init__(self, dim: int, config: TransformerConfig) -> None:
        super().__init__()
        self.linear = linear(dim, 2 * dim, config, drawn_zeros)

    def forward(self, tokens: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        """Tokens [s, b, D], temb [b, D]; the linear gives scale, then shift."""
        scale, shift = self.linear(silu_fp32(temb)).chunk(2, dim=1)
        return normed(tokens, shift, scale)


class Head(LayerModule):
    """Modulated norm, linear to patches, and the prediction [b, c, h, w]."""

    def __init__(self, sizes: HunyuanDiTConfig, context: LayerContext) -> None:
        config = context.config
        super().__init__(config, context.pg_collection)
        self.chain_shape, self.sizes = 0, sizes
        dim, features = sizes.dim, sizes.patch_size**2 * sizes.out_channels
        self.norm_out = ModulatedNorm(dim, config)
        self.proj_out = linear(dim, features, config, drawn_zeros)
        self.to(dtype=config.params_dtype)
        works_on_shards(self, config)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """``conditioning``: temb."""
        features = self.proj_out(self.norm_out(inputs[0], conditioning["temb"]))
        grid = self.sizes.grids[self.chain_shape]
        patches = self.leave_sequence(features, math.prod(grid))
        return (unpatchify(patches, grid, self.sizes.patch_size),)
