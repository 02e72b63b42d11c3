"""U-ViT's modules (arXiv:2209.12152, section 3): tokens are [s, b, D] in Megatron's order."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_pulse.backbone.build_context import LayerContext
from model_specs.common.attention import mlp, self_attention
from model_specs.common.layers import (
    LayerModule,
    LayerNorm,
    Named,
    Tensors,
    linear,
    timestep_embedding,
    works_on_shards,
)
from model_specs.common.megatron_config import transformer_config, truncated_normal_init
from model_specs.common.patches import unpatchify
from model_specs.common.token_shares import TokenLayer, TokenShares
from model_specs.common.token_slices import TokenSliced
from model_specs.uvit.config import UViTConfig


def uvit_transformer_config(sizes: UViTConfig, base: TransformerConfig) -> TransformerConfig:
    """The Megatron configuration of every block of this U-ViT."""
    return transformer_config(
        base,
        hidden_size=sizes.embed_dim,
        num_attention_heads=sizes.num_heads,
        ffn_hidden_size=sizes.mlp_ratio * sizes.embed_dim,
        init_method=truncated_normal_init,
    )


class Embed(LayerModule):
    """Map the image [b, c, h, w] to tokens [s, b, D]: (class,) time, (text,) patches; plus
    positions.
    """

    def __init__(self, sizes: UViTConfig, context: LayerContext) -> None:
        config = uvit_transformer_config(sizes, context.config)
        super().__init__(config, context.pg_collection)
        dim, patch = sizes.embed_dim, sizes.patch_size
        self.patch_embed = torch.nn.Conv2d(sizes.in_channels, dim, patch, stride=patch)
        if sizes.num_classes:
            self.label_emb = torch.nn.Embedding(sizes.num_classes + 1, dim)
        if sizes.context_length:
            self.context_embed = linear(sizes.context_dim, dim, config, truncated_normal_init)
        self.pos_embed = torch.nn.Parameter(torch.zeros(1, sizes.sequence_length, dim))
        if config.perform_initialization:
            truncated_normal_init(self.pos_embed)
        self.to(dtype=config.params_dtype)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """``conditioning``: timesteps [b] in fp32; labels [b] or context [b, length, width]."""
        (image,) = inputs
        dtype = self.pos_embed.dtype
        time = timestep_embedding(conditioning["timesteps"], self.pos_embed.shape[-1])
        tokens = [time.to(dtype)[:, None], self.patch_embed(image).flatten(2).transpose(1, 2)]
        if "labels" in conditioning:
            tokens.insert(0, self.label_emb(conditioning["labels"])[:, None])
        if "context" in conditioning:
            tokens.insert(1, self.context_embed(conditioning["context"]))
        sequence = (torch.cat(tokens, dim=1) + self.pos_embed).transpose(0, 1).contiguous()
        return (self.enter_sequence(sequence),)


class Attention(TokenLayer):
    """x + attention(norm(x)); with ``pop``, x is Linear(2D -> D) of [x, skip].

    ``skip_linear`` is replicated over tensor-parallel ranks, so its sums equal those of one
    process. The cost is a seventh of an out-block's weights, multiplied on every rank. Under
    sequence parallelism each rank multiplies its own tokens.
    """

    def __init__(self, sizes: UViTConfig, context: LayerContext, pop: str | None = None) -> None:
        config = uvit_transformer_config(sizes, context.config)
        super().__init__(config, context.pg_collection)
        self.pop = pop
        dim = sizes.embed_dim
        if pop is not None:
            self.skip_linear = linear(2 * dim, dim, config, truncated_normal_init)
            works_on_shards(self.skip_linear, config)
        self.norm1 = LayerNorm(config, dim)
        shares = TokenShares(context.pg_collection, [(sizes.sequence_length,)])
        self.shares = (shares,)
        self.attention = self_attention(config, context.pg_collection, shares)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Tokens [s, b, D] to tokens [s, b, D]."""
        (tokens,) = inputs
        if self.pop is not None:
            tokens = self.skip_linear(torch.cat([tokens, skips[self.pop]], dim=-1))
        out, bias = self.attention(self.norm1(tokens), attention_mask=None)
        return (tokens + (out + bias),)


class Mlp(LayerModule, TokenSliced):
    """x + MLP(norm(x))."""

    def __init__(self, sizes: UViTConfig, context: LayerContext) -> None:
        config = uvit_transformer_config(sizes, context.config)
        super().__init__(config, context.pg_collection)
        self.norm2 = LayerNorm(config, sizes.embed_dim)
        self.mlp = mlp(config, context.pg_collection)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Tokens [s, b, D] to tokens [s, b, D]."""
        return (self.in_slices(self._changed, [self.norm2, self.mlp], inputs),)

    def _changed(self, tokens: torch.Tensor) -> torch.Tensor:
        out, bias = self.mlp(self.norm2(tokens))
        changed: torch.Tensor = tokens + (out + bias)
        return changed


class Head(LayerModule):
    """Map tokens [s, b, D] to the prediction [b, c, h, w]: norm, linear, unpatchify, (conv)."""

    def __init__(self, sizes: UViTConfig, context: LayerContext) -> None:
        config = uvit_transformer_config(sizes, context.config)
        super().__init__(config, context.pg_collection)
        self.sizes = sizes
        channels = sizes.in_channels
        self.norm = LayerNorm(config, sizes.embed_dim)
        self.decoder_pred = linear(
            sizes.embed_dim, sizes.patch_size**2 * channels, config, truncated_normal_init
        )
        works_on_shards(self.decoder_pred, config)
        self.final_layer = (
            torch.nn.Conv2d(channels, channels, 3, padding=1)
            if sizes.final_conv
            else torch.nn.Identity()
        )
        self.to(dtype=config.params_dtype)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Drop the extra tokens; each patch's features are ordered (row, column, channel)."""
        features = self.decoder_pred(self.norm(inputs[0]))
        tokens = self.leave_sequence(features, self.sizes.sequence_length)
        side = self.sizes.image_size // self.sizes.patch_size
        patches = tokens[self.sizes.num_extra_tokens :]
        image = unpatchify(patches, (side, side), self.sizes.patch_size)
        return (self.final_layer(image),)
