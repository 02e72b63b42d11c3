"""The UNet's transformer on pixels (diffusers' Transformer2DModel), tensor-parallel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_pulse.backbone.context import LayerContext
from model_specs.modules.attention import (
    Builder,
    cross_attention_spec,
    mlp_spec,
    self_attention_spec,
)
from model_specs.modules.common import LayerModule, LayerNorm, ShardedModuleList
from model_specs.modules.config import transformer_config, uniform_init
from model_specs.unet import UNetConfig

_TRANSFORMER_GROUP_NORM_EPS = 1e-6


def unet_transformer_config(
    channels: int, num_heads: int, base: TransformerConfig
) -> TransformerConfig:
    """The Megatron configuration of the transformer blocks at one level: GEGLU of width 4c.

    Sequence parallelism is off: what passes between layers is images, and convolutions and
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


@dataclass
class TransformerBlockSubmodules:
    """The replaceable parts of a transformer block; ``attn2`` is None without cross-attention."""

    norm1: Builder
    attn1: ModuleSpec
    norm2: Builder
    attn2: ModuleSpec | None
    norm3: Builder
    ff: ModuleSpec


class TransformerBlock(LayerModule):
    """Pre-norm self-attention, cross-attention (if any) and feed-forward, each with a residual."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerBlockSubmodules,
        pg_collection: ProcessGroupCollection | None,
    ) -> None:
        super().__init__(config, pg_collection)
        width, eps = config.hidden_size, config.layernorm_epsilon
        groups = {"config": config, "pg_collection": pg_collection}
        self.norm1 = submodules.norm1(config, width, eps=eps)
        self.attn1 = build_module(submodules.attn1, **groups)
        self.attn2 = None
        if submodules.attn2 is not None:
            self.norm2 = submodules.norm2(config, width, eps=eps)
            self.attn2 = build_module(submodules.attn2, **groups)
        self.norm3 = submodules.norm3(config, width, eps=eps)
        self.ff = build_module(
            submodules.ff,
            config=config,
            ffn_hidden_size=config.ffn_hidden_size,
            tp_group=pg_collection.tp if pg_collection is not None else None,
        )

    def forward(self, tokens: torch.Tensor, context: torch.Tensor | None) -> torch.Tensor:
        """Tokens [h*w, b, c] and context [length, b, dim] to tokens [h*w, b, c]."""
        out, bias = self.attn1(self.norm1(tokens), attention_mask=None)
        tokens = tokens + (out + bias)
        if self.attn2 is not None:
            out, bias = self.attn2(
                self.norm2(tokens), attention_mask=None, key_value_states=context
            )
            tokens = tokens + (out + bias)
        out, bias = self.ff(self.norm3(tokens))
        return tokens + (out + bias)


def transformer_block_spec(
    config: TransformerConfig,
    cross_attention_dim: int | None,
    pg_collection: ProcessGroupCollection | None,
) -> ModuleSpec:
    """The block with Megatron-Core's attention and MLP."""
    attn2 = None
    if cross_attention_dim is not None:
        attn2 = cross_attention_spec(config, cross_attention_dim, pg_collection)
    return ModuleSpec(
        TransformerBlock,
        submodules=TransformerBlockSubmodules(
            norm1=LayerNorm,
            attn1=self_attention_spec(config),
            norm2=LayerNorm,
            attn2=attn2,
            norm3=LayerNorm,
            ff=mlp_spec(config),
        ),
    )


class ImageTransformer(LayerModule):
    """GroupNorm, projection, transformer blocks on pixels as tokens, projection, residual."""

    def __init__(
        self, sizes: UNetConfig, context: LayerContext, channels: int, level: int, depth: int
    ) -> None:
        config = unet_transformer_config(channels, sizes.heads(level), context.config)
        super().__init__(config, context.pg_collection)
        self.norm = torch.nn.GroupNorm(
            sizes.norm_num_groups, channels, eps=_TRANSFORMER_GROUP_NORM_EPS
        )
        self.linear_projection = sizes.use_linear_projection
        self.proj_in = self._projection(channels)
        spec = transformer_block_spec(config, sizes.cross_attention_dim, context.pg_collection)
        self.transformer_blocks = ShardedModuleList(
            build_module(spec, config=config, pg_collection=context.pg_collection)
            for _ in range(depth)
        )
        self.proj_out = self._projection(channels)

    def _projection(self, channels: int) -> torch.nn.Module:
        if self.linear_projection:
            return torch.nn.Linear(channels, channels)
        return torch.nn.Conv2d(channels, channels, 1)

    def forward(self, image: torch.Tensor, context: torch.Tensor | None) -> torch.Tensor:
        """Image [b, c, h, w] and context [b, length, dim] to image [b, c, h, w]."""
        hidden = self.norm(image)
        if not self.linear_projection:
            hidden = self.proj_in(hidden)
        tokens = hidden.flatten(2).permute(2, 0, 1).contiguous()
        if self.linear_projection:
            tokens = self.proj_in(tokens)
        if context is not None:
            context = context.to(tokens.dtype).transpose(0, 1).contiguous()
        for block in self.transformer_blocks:
            tokens = block(tokens, context)
        if self.linear_projection:
            tokens = self.proj_out(tokens)
        hidden = tokens.permute(1, 2, 0).reshape(image.shape)
        if not self.linear_projection:
            hidden = self.proj_out(hidden)
        return hidden + image
