"""PixArt's modules (diffusers' ``PixArtTransformer2DModel``): tokens are [s, b, D].

Initialised as in PixArt: Xavier in blocks, N(0, 0.02) in embeddings and caption projections, zeros
at the end of cross-attention and in the head.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F

from megatron_pulse.backbone.build_context import LayerContext
from model_specs.common.attention import cross_attention, left_out, mlp, self_attention
from model_specs.common.layers import (
    LayerModule,
    Named,
    Tensors,
    TimestepEmbedder,
    linear,
    works_on_shards,
)
from model_specs.common.megatron_config import dit_config, normal_init, tanh_gelu
from model_specs.common.patches import PatchEmbed, gated, normed, sincos_table, unpatchify
from model_specs.common.token_shares import TokenLayer, TokenShares
from model_specs.common.token_slices import TokenSliced
from model_specs.pixart.config import PixArtConfig


def _table(rows: int, dim: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(rows, dim) / dim**0.5)


class PatchLayer(PatchEmbed):
    """Patches plus fixed positions."""

    def __init__(self, sizes: PixArtConfig, context: LayerContext) -> None:
        positions = functools.partial(
            sincos_table,
            sizes.dim,
            base_size=sizes.base_size // sizes.patch_size,
            interpolation_scale=sizes.position_scale,
        )
        channels, patch = sizes.in_channels, sizes.patch_size
        super().__init__(context, channels, sizes.dim, patch, positions, sizes.grids[0])


class AdalnSingle(LayerModule):
    """Provides t6 [b, 6 * D], which modulates every block, and embedded_timestep [b, D].

    Additional conditions add the embeddings of height, width and aspect ratio, D / 3 each, to the
    timestep embedding.
    """

    def __init__(self, sizes: PixArtConfig, context: LayerContext) -> None:
        config = context.config
        super().__init__(config, context.pg_collection)
        initialize, dim = config.perform_initialization, sizes.dim
        self.emb = torch.nn.ModuleDict()
        self.emb["timestep_embedder"] = TimestepEmbedder(dim, initialize=initialize)
        if sizes.use_additional_conditions:
            for name in ("resolution_embedder", "aspect_ratio_embedder"):
                self.emb[name] = TimestepEmbedder(dim // 3, initialize=initialize)
        self.linear = linear(dim, 6 * dim, config, normal_init)
        self.to(dtype=config.params_dtype)
        works_on_shards(self, config)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """``conditioning``: timesteps, and resolution and aspect_ratio if embedded; in fp32."""
        embedded = self.emb["timestep_embedder"](conditioning["timesteps"])
        if "resolution" in conditioning:
            conditions = [
                self.emb[f"{name}_embedder"](conditioning[name].flatten()).view(len(embedded), -1)
                for name in ("resolution", "aspect_ratio")
            ]
            embedded = embedded + torch.cat(conditions, dim=1)
        return (*inputs, self.linear(F.silu(embedded)), embedded)


class CaptionProjection(LayerModule):
    """Provides the caption [length, b, D] that every block attends to.

    Caption and gradient are whole on every rank under sequence parallelism.
    """

    def __init__(self, sizes: PixArtConfig, context: LayerContext) -> None:
        super().__init__(context.config, context.pg_collection)
        config = context.config
        self.linear_1 = linear(sizes.caption_channels, sizes.dim, config, normal_init)
        self.linear_2 = linear(sizes.dim, sizes.dim, config, normal_init)
        self.to(dtype=context.config.params_dtype)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """``conditioning``: context [b, length, caption_channels]."""
        states = conditioning["context"].to(self.linear_1.weight.dtype).transpose(0, 1)
        caption = self.linear_2(tanh_gelu(self.linear_1(states)))
        return (*inputs, caption.contiguous())


class _Modulated(LayerModule):
    """Base of sublayers with shift, scale and gate: one half of t6 plus the layer's own table."""

    def __init__(self, sizes: PixArtConfig, context: LayerContext, half: int) -> None:
        config = dit_config(sizes, context.config)
        super().__init__(config, context.pg_collection)
        self.half = half
        self.scale_shift_table = _table(3, sizes.dim)
        self.to(dtype=config.params_dtype)
        works_on_shards(self, config)

    def modulation(self, conditioning: Named) -> Tensors:
        """Shift, scale and gate [b, D] of this layer."""
        change = conditioning["t6"].chunk(2, dim=1)[self.half].unflatten(1, (3, -1))
        vectors: Tensors = (self.scale_shift_table + change).unbind(1)
        return vectors


class SelfAttention(_Modulated, TokenLayer):
    """Tokens + gate * self-attention(modulated norm of tokens)."""

    def __init__(self, sizes: PixArtConfig, context: LayerContext) -> None:
        super().__init__(sizes, context, half=0)
        shares = TokenShares(context.pg_collection, [(count,) for count in sizes.token_counts])
        self.shares = (shares,)
        self.attention = self_attention(self.config, context.pg_collection, shares, qkv_bias=True)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """``conditioning``: t6."""
        (tokens,) = inputs
        vectors = self.modulation(conditioning)
        return (tokens + gated(self.attention, tokens, *vectors, attention_mask=None),)


class CrossAttention(LayerModule):
    """Tokens + attention to the caption, without norm or modulation."""

    def __init__(self, sizes: PixArtConfig, context: LayerContext) -> None:
        config = dit_config(sizes, context.config)
        super().__init__(config, context.pg_collection)
        self.attention = cross_attention(
            config, context.pg_collection, sizes.dim, qkv_bias=True, key_mask=True
        )
        if config.perform_initialization:
            torch.nn.init.zeros_(self.attention.linear_proj.weight)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """``conditioning``: caption [length, b, D] and context_mask [b, length], 1 for words."""
        (tokens,) = inputs
        out, bias = self.attention(
            tokens,
            attention_mask=left_out(conditioning["context_mask"]),
            key_value_states=conditioning["caption"],
        )
        return (tokens + (out + bias),)


class FeedForward(_Modulated, TokenSliced):
    """Tokens + gate * MLP(modulated norm of tokens)."""

    def __init__(self, sizes: PixArtConfig, context: LayerContext) -> None:
        super().__init__(sizes, context, half=1)
        self.mlp = mlp(self.config, context.pg_collection)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """``conditioning``: t6."""
        vectors = self.modulation(conditioning)
        return (self.in_slices(self._changed, [self.mlp], inputs, *vectors),)

    def _changed(self, tokens: torch.Tensor, *vectors: torch.Tensor) -> torch.Tensor:
        shift, scale, gate = vectors
        return tokens + gated(self.mlp, tokens, shift, scale, gate)


class Head(LayerModule):
    """Modulated norm, linear to patches, and the prediction [b, c, h, w]."""

    def __init__(self, sizes: PixArtConfig, context: LayerContext) -> None:
        config = context.config
        super().__init__(config, context.pg_collection)
        self.chain_shape, self.sizes = 0, sizes
        self.scale_shift_table = _table(2, sizes.dim)
        features = sizes.patch_size**2 * sizes.out_channels
        self.proj_out = linear(sizes.dim, features, config, torch.nn.init.zeros_)
        self.to(dtype=config.params_dtype)
        works_on_shards(self, config)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """``conditioning``: embedded_timestep."""
        embedded = conditioning["embedded_timestep"]
        shift, scale = (self.scale_shift_table + embedded[:, None]).unbind(1)
        features = self.proj_out(normed(inputs[0], shift, scale))
        grid = self.sizes.grids[self.chain_shape]
        patches = self.leave_sequence(features, math.prod(grid))
        return (unpatchify(patches, grid, self.sizes.patch_size),)
