"""DiT's modules (diffusers' ``DiTTransformer2DModel``): tokens are [s, b, D].

Initialised as in DiT: Xavier in blocks, N(0, 0.02) in embeddings, zeros in modulations and head.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict

import torch
import torch.nn.functional as F

from megatron_pulse.backbone.build_context import LayerContext
from model_specs.common.attention import mlp, self_attention
from model_specs.common.layers import (
    LayerModule,
    Named,
    Tensors,
    TimestepEmbedder,
    linear,
    works_on_shards,
)
from model_specs.common.megatron_config import dit_config
from model_specs.common.patches import PatchEmbed, gated, normed, sincos_table, unpatchify
from model_specs.common.token_shares import TokenLayer, TokenShares
from model_specs.common.token_slices import TokenSliced
from model_specs.dit.config import DiTConfig

_FEED_FORWARD_NORM_EPS = 1e-5


class PatchLayer(PatchEmbed):
    """Patches plus fixed positions."""

    def __init__(self, sizes: DiTConfig, context: LayerContext) -> None:
        base = sizes.base_size // sizes.patch_size
        positions = functools.partial(sincos_table, sizes.dim, base_size=base)
        channels, patch = sizes.in_channels, sizes.patch_size
        super().__init__(context, channels, sizes.dim, patch, positions, sizes.grids[0])


class TimeClassEmbedder(torch.nn.Module):
    """Map timesteps [b] and labels [b] to the sum of their embeddings [b, D].

    Labels are used as given. Label dropout for guidance happens when batches are made.
    """

    def __init__(self, sizes: DiTConfig, initialize: bool) -> None:
        super().__init__()
        self.timestep_embedder = TimestepEmbedder(sizes.dim, 1, initialize)
        table = torch.nn.Embedding(sizes.num_classes + 1, sizes.dim)
        if initialize:
            torch.nn.init.normal_(table.weight, std=0.02)
        self.class_embedder = torch.nn.Sequential(OrderedDict(embedding_table=table))

    def forward(self, conditioning: Named) -> torch.Tensor:
        """Embeds ``timesteps`` (fp32) and ``labels``."""
        time: torch.Tensor = self.timestep_embedder(conditioning["timesteps"])
        return time + self.class_embedder(conditioning["labels"])


class Embedding(LayerModule):
    """Provides temb0 [b, D], the embedding of block 0; the head uses the same."""

    def __init__(self, sizes: DiTConfig, context: LayerContext) -> None:
        super().__init__(context.config, context.pg_collection)
        self.emb = TimeClassEmbedder(sizes, context.config.perform_initialization)
        self.to(dtype=context.config.params_dtype)
        works_on_shards(self, context.config)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """``conditioning``: timesteps and labels."""
        return (*inputs, self.emb(conditioning))


class Attention(TokenLayer):
    """Self-attention with adaLN-zero: tokens + gate * attention(modulated norm of tokens).

    With ``own_embedder`` the layer embeds timestep and class; otherwise it takes temb0 from
    ``Embedding``. The second output [b, 3 * D] is shift, scale and gate of the block's
    feed-forward. Under sequence parallelism every rank holds it whole, with the gradient of its own
    part of the sequence.
    """

    def __init__(self, sizes: DiTConfig, context: LayerContext, own_embedder: bool = True) -> None:
        config = dit_config(sizes, context.config)
        super().__init__(config, context.pg_collection)
        self.emb = None
        if own_embedder:
            self.emb = TimeClassEmbedder(sizes, config.perform_initialization)
        self.modulation = linear(sizes.dim, 6 * sizes.dim, config, torch.nn.init.zeros_)
        self.to(dtype=config.params_dtype)
        works_on_shards(self, config)
        shares = TokenShares(context.pg_collection, [(count,) for count in sizes.token_counts])
        self.shares = (shares,)
        self.attention = self_attention(config, context.pg_collection, shares, qkv_bias=True)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """``conditioning``: timesteps and labels, or in block 0 temb0."""
        (tokens,) = inputs
        temb = conditioning["temb0"] if self.emb is None else self.emb(conditioning)
        here, feed_forward = self.modulation(F.silu(temb)).chunk(2, dim=1)
        change = gated(self.attention, tokens, *here.chunk(3, dim=1), attention_mask=None)
        return tokens + change, feed_forward.contiguous()


class FeedForward(LayerModule, TokenSliced):
    """Tokens + gate * MLP(modulated norm of tokens), with the modulation from ``Attention``."""

    def __init__(self, sizes: DiTConfig, context: LayerContext) -> None:
        config = dit_config(sizes, context.config)
        super().__init__(config, context.pg_collection)
        self.mlp = mlp(config, context.pg_collection)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Tokens [s, b, D] and modulation [b, 3 * D] to tokens."""
        tokens, modulation = inputs
        vectors = modulation.chunk(3, dim=1)
        return (self.in_slices(self._changed, [self.mlp], [tokens], *vectors),)

    def _changed(self, tokens: torch.Tensor, *vectors: torch.Tensor) -> torch.Tensor:
        shift, scale, gate = vectors
        return tokens + gated(self.mlp, tokens, shift, scale, gate, eps=_FEED_FORWARD_NORM_EPS)


class Head(LayerModule):
    """Modulated norm, linear to patches, and the prediction [b, c, h, w]."""

    def __init__(self, sizes: DiTConfig, context: LayerContext) -> None:
        config = context.config
        super().__init__(config, context.pg_collection)
        self.chain_shape, self.sizes = 0, sizes
        self.proj_out_1 = linear(sizes.dim, 2 * sizes.dim, config, torch.nn.init.zeros_)
        features = sizes.patch_size**2 * sizes.out_channels
        self.proj_out_2 = linear(sizes.dim, features, config, torch.nn.init.zeros_)
        self.to(dtype=config.params_dtype)
        works_on_shards(self, config)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """``conditioning``: temb0."""
        shift, scale = self.proj_out_1(F.silu(conditioning["temb0"])).chunk(2, dim=1)
        features = self.proj_out_2(normed(inputs[0], shift, scale))
        grid = self.sizes.grids[self.chain_shape]
        patches = self.leave_sequence(features, math.prod(grid))
        return (unpatchify(patches, grid, self.sizes.patch_size),)
