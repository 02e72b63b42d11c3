"""Transformer on the UNet's pixels (diffusers' Transformer2DModel), tensor-parallel.

Its layers pass on the pair (tokens [h*w, b, c], image [b, c, h, w]). ``ProjectOut`` adds the image
as the residual.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_pulse.backbone.build_context import LayerContext
from model_specs.common.attention import cross_attention, mlp, self_attention
from model_specs.common.layers import LayerModule, LayerNorm, Named, Tensors
from model_specs.common.megatron_config import transformer_config, uniform_init
from model_specs.unet.config import UNetConfig
from model_specs.unet.convolution import Convolution, contiguous

_GROUP_NORM_EPS = 1e-6


def unet_transformer_config(
    channels: int, num_heads: int, base: TransformerConfig
) -> TransformerConfig:
    """Megatron configuration of the transformer blocks at one level: GEGLU of width 4c.

    Sequence parallelism is off: layers also pass on images, which convolutions and GroupNorms need
    whole.
    """
    return transformer_config(
        base,
        hidden_size=channels,
        num_attention_heads=num_heads,
        ffn_hidden_size=4 * channels,
        init_method=uniform_init,
        gated_linear_unit=True,
        sequence_parallel=False,
    )


def _projection(sizes: UNetConfig, channels: int) -> torch.nn.Module:
    """Projection layer: on images, by 1x1 convolutions (SD 1.5), or on tokens (SD 2, SDXL)."""
    if sizes.use_linear_projection:
        return torch.nn.Linear(channels, channels)
    return Convolution(channels, channels, kernel_size=1, channels_last=sizes.channels_last)


class ProjectIn(LayerModule):
    """GroupNorm and projection of the image [b, c, h, w] to the pair."""

    def __init__(self, sizes: UNetConfig, context: LayerContext, channels: int) -> None:
        super().__init__(context.config, context.pg_collection)
        self.on_tokens = sizes.use_linear_projection
        self.norm = torch.nn.GroupNorm(sizes.norm_num_groups, channels, eps=_GROUP_NORM_EPS)
        self.linear = _projection(sizes, channels)
        self.to(dtype=self.config.params_dtype)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Flatten pixels to tokens row by row."""
        (image,) = inputs
        hidden = self.norm(image)
        if not self.on_tokens:
            hidden = self.linear(hidden)
        tokens = hidden.flatten(2).permute(2, 0, 1).contiguous()
        if self.on_tokens:
            tokens = self.linear(tokens)
        return (tokens, image)


class ProjectOut(LayerModule):
    """Projection and residual sum of the pair to the image [b, c, h, w]."""

    def __init__(self, sizes: UNetConfig, context: LayerContext, channels: int) -> None:
        super().__init__(context.config, context.pg_collection)
        self.on_tokens = sizes.use_linear_projection
        self.linear = _projection(sizes, channels)
        self.to(dtype=self.config.params_dtype)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Reshape tokens to pixels and add the image."""
        tokens, image = inputs
        tokens = contiguous(tokens)
        if self.on_tokens:
            tokens = self.linear(tokens)
        hidden = tokens.permute(1, 2, 0).contiguous().view(image.shape)
        if not self.on_tokens:
            hidden = self.linear(hidden)
        return (hidden + image,)


class TransformerBlock(LayerModule):
    """Pre-norm self-attention, cross-attention (if any) and feed-forward, each with a residual."""

    def __init__(
        self, sizes: UNetConfig, context: LayerContext, channels: int, num_heads: int
    ) -> None:
        config = unet_transformer_config(channels, num_heads, context.config)
        groups = context.pg_collection
        super().__init__(config, groups)
        self.norm1 = LayerNorm(config, channels)
        self.attn1 = self_attention(config, groups)
        self.attn2 = None
        if sizes.cross_attention_dim is not None:
            self.norm2 = LayerNorm(config, channels)
            self.attn2 = cross_attention(config, groups, sizes.cross_attention_dim)
        self.norm3 = LayerNorm(config, channels)
        self.ff = mlp(config, groups)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Map the pair to the pair; ``conditioning``: context [b, length, dim] with
        cross-attention.
        """
        tokens, image = inputs
        out, bias = self.attn1(self.norm1(tokens), attention_mask=None)
        tokens = tokens + (out + bias)
        if self.attn2 is not None:
            context = conditioning["context"].to(tokens.dtype).transpose(0, 1).contiguous()
            out, bias = self.attn2(
                self.norm2(tokens), attention_mask=None, key_value_states=context
            )
            tokens = tokens + (out + bias)
        out, bias = self.ff(self.norm3(tokens))
        return (tokens + (out + bias), image)
