"""DiT's modules (diffusers' ``DiTTransformer2DModel``): tokens are [s, b, D].

Initialised as DiT is: Xavier in blocks, N(0, 0.02) in embeddings, zeros in modulations and head.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from megatron.core.transformer.spec_utils import build_module

from megatron_pulse.backbone.context import LayerContext
from model_specs.common.attention import make_mlp, mlp_spec, self_attention_spec
from model_specs.common.layers import (
    LayerModule,
    LayerNorm,
    Named,
    Table,
    Tensors,
    TimestepEmbedder,
    leave_sequence,
    linear,
    works_on_shards,
)
from model_specs.common.megatron_config import dit_config
from model_specs.common.patches import PatchEmbed, modulate, sincos_positions, unpatchify
from model_specs.dit.config import DiTConfig

_FEED_FORWARD_NORM_EPS = 1e-5
_NORM_EPS = 1e-6


class PatchLayer(PatchEmbed):
    """Patches plus fixed positions."""

    def __init__(self, sizes: DiTConfig, context: LayerContext) -> None:
        dim, side, base = sizes.dim, sizes.side, sizes.base_size // sizes.patch_size
        positions = Table(lambda: sincos_positions(dim, side, side, base_size=base))
        super().__init__(context, sizes.in_channels, dim, sizes.patch_size, positions)


class TimeClassEmbedder(torch.nn.Module):
    """Timesteps [b] and labels [b] to the sum of their embeddings [b, D].

    Labels are as the batch has them: dropping some for guidance is the data's business.
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
    """Provides temb0 [b, D], what block 0 embeds, which the head uses too."""

    def __init__(self, sizes: DiTConfig, context: LayerContext) -> None:
        super().__init__(context.config, context.pg_collection)
        self.emb = TimeClassEmbedder(sizes, context.config.perform_initialization)
        self.to(dtype=context.config.params_dtype)
        works_on_shards(self, context.config)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """``conditioning``: timesteps and labels."""
        return (*inputs, self.emb(conditioning))


class Attention(LayerModule):
    """Self-attention with adaLN-zero: tokens + gate * attention(modulated norm of tokens).

    Embeds timestep and class itself with ``own_embedder``, else takes temb0 from ``Embedding``.
    The second output [b, 3 * D] is shift, scale and gate of the block's feed-forward. Under
    sequence parallelism every rank has it whole, with the gradient of its part of the sequence.
    """

    def __init__(self, sizes: DiTConfig, context: LayerContext, own_embedder: bool = True) -> None:
        config = dit_config(sizes.dim, sizes.num_attention_heads, context.config)
        super().__init__(config, context.pg_collection)
        self.emb = None
        if own_embedder:
            self.emb = TimeClassEmbedder(sizes, config.perform_initialization)
        self.modulation = linear(sizes.dim, 6 * sizes.dim, config, torch.nn.init.zeros_)
        self.norm = LayerNorm(config, sizes.dim, _NORM_EPS, elementwise_affine=False)
        self.to(dtype=config.params_dtype)
        works_on_shards(self, config)
        self.attention = build_module(
            self_attention_spec(config, qkv_bias=True),
            config=config,
            pg_collection=context.pg_collection,
        )

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """``conditioning``: timesteps and labels, or in block 0 temb0."""
        (tokens,) = inputs
        temb = conditioning["temb0"] if self.emb is None else self.emb(conditioning)
        here, feed_forward = self.modulation(F.silu(temb)).chunk(2, dim=1)
        shift, scale, gate = here.chunk(3, dim=1)
        out, bias = self.attention(modulate(self.norm(tokens), shift, scale), attention_mask=None)
        return tokens + gate * (out + bias), feed_forward.contiguous()


class FeedForward(LayerModule):
    """Tokens + gate * MLP(modulated norm of tokens), with the vectors that ``Attention`` made."""

    def __init__(self, sizes: DiTConfig, context: LayerContext) -> None:
        config = dit_config(sizes.dim, sizes.num_attention_heads, context.config)
        super().__init__(config, context.pg_collection)
        groups = context.pg_collection
        self.norm = LayerNorm(config, sizes.dim, _FEED_FORWARD_NORM_EPS, elementwise_affine=False)
        self.mlp = make_mlp(mlp_spec(config), config, groups)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Tokens [s, b, D] and modulation [b, 3 * D] to tokens."""
        tokens, modulation = inputs
        shift, scale, gate = modulation.chunk(3, dim=1)
        out, bias = self.mlp(modulate(self.norm(tokens), shift, scale))
        return (tokens + gate * (out + bias),)


class Head(LayerModule):
    """Modulated norm, linear to patches, and the prediction [b, c, h, w]."""

    def __init__(self, sizes: DiTConfig, context: LayerContext) -> None:
        config = context.config
        super().__init__(config, context.pg_collection)
        self.sizes, self.groups = sizes, context.pg_collection
        self.norm = LayerNorm(config, sizes.dim, _NORM_EPS, elementwise_affine=False)
        self.proj_out_1 = linear(sizes.dim, 2 * sizes.dim, config, torch.nn.init.zeros_)
        features = sizes.patch_size**2 * sizes.out_channels
        self.proj_out_2 = linear(sizes.dim, features, config, torch.nn.init.zeros_)
        self.to(dtype=config.params_dtype)
        works_on_shards(self, config)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """``conditioning``: temb0."""
        shift, scale = self.proj_out_1(F.silu(conditioning["temb0"])).chunk(2, dim=1)
        patches = self.proj_out_2(modulate(self.norm(inputs[0]), shift, scale))
        patches = leave_sequence(patches, self.config, self.groups)
        side = self.sizes.side
        return (unpatchify(patches, side, side, self.sizes.patch_size),)
