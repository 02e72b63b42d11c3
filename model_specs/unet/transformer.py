"""The UNet's transformer on pixels (diffusers' Transformer2DModel), tensor-parallel.

Its layers hand on the pair (tokens [h*w, b, c], image [b, c, h, w]); the image waits for the
residual sum of ``ProjectOut``.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_pulse.backbone.context import LayerContext
from model_specs.common.attention import cross_attention, mlp, self_attention
from model_specs.common.layers import LayerModule, LayerNorm, Named, Tensors
from model_specs.common.megatron_config import transformer_config, uniform_init
from model_specs.unet.config import UNetConfig
from model_specs.unet.convolution import Convolution, contiguous

_GROUP_NORM_EPS = 1e-6


def unet_transformer_config(
    channels: int, num_heads: int, base: TransformerConfig
) -> TransformerConfig:
    """The Megatron configuration of the transformer blocks at one level: GEGLU of width 4c.

    Sequence parallelism is off: beside the tokens, layers hand on images, and convolutions and
    GroupNorms need them whole.
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
    """SD 1.5 projects images, by 1x1 convolutions; SD 2 and SDXL project tokens."""
    if sizes.use_linear_projection:
        return torch.nn.Linear(channels, channels)
    return Convolution(channels, channels, kernel_size=1, channels_last=sizes.channels_last)


class ProjectIn(LayerModule):
    """GroupNorm and projection: the image [b, c, h, w] to the pair."""

    def __init__(self, sizes: UNetConfig, context: LayerContext, channels: int) -> None:
        super().__init__(context.config, context.pg_collection)
        self.on_tokens = sizes.use_linear_projection
        self.norm = torch.nn.GroupNorm(sizes.norm_num_groups, channels, eps=_GROUP_NORM_EPS)
        self.linear = _projection(sizes, channels)
        self.to(dtype=self.config.params_dtype)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Pixels become tokens row by row."""
        (image,) = inputs
        hidden = self.norm(image)
        if not self.on_tokens:
            hidden = self.linear(hidden)
        tokens = hidden.flatten(2).permute(2, 0, 1).contiguous()
        if self.on_tokens:
            tokens = self.linear(tokens)
        return (tokens, image)


class ProjectOut(LayerModule):
    """Projection and residual sum: the pair to the image [b, c, h, w]."""

    def __init__(self, sizes: UNetConfig, context: LayerContext, channels: int) -> None:
        super().__init__(context.config, context.pg_collection)
        self.on_tokens = sizes.use_linear_projection
        self.linear = _projection(sizes, channels)
        self.to(dtype=self.config.params_dtype)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Tokens become pixels again."""
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
        """The pair to the pair; ``conditioning``: context [b, length, dim], if it is read."""
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
