"""SD3's own modules: positioned patches, and the parts of ``mmdit`` at its sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_pulse.backbone.context import LayerContext
from model_specs.common.megatron_config import dit_config
from model_specs.common.mmdit import (
    ContextEmbedder,
    Head,
    JointBlock,
    TimeTextEmbed,
    joint_block_spec,
)
from model_specs.common.patches import PatchEmbed, sincos_positions, unpatchify
from model_specs.sd3.config import SD3Config


def _config(sizes: SD3Config, context: LayerContext) -> TransformerConfig:
    return dit_config(sizes.dim, sizes.num_attention_heads, context.config)


class PositionedPatches(PatchEmbed):
    """Latents to tokens, plus the centre of the table of positions ``pos_embed`` [1, places, D].

    diffusers keeps the table in its state dict, so it is a buffer here too. It stays in fp32
    when the module is cast to half precision, and leaves as it came; diffusers would cast it.
    """

    pos_embed: torch.Tensor

    def __init__(self, sizes: SD3Config, context: LayerContext) -> None:
        super().__init__(context, sizes.in_channels, sizes.dim, sizes.patch_size)
        self.sizes = sizes
        places = sizes.pos_embed_max_size
        base_size = sizes.base_sample_size // sizes.patch_size
        table = sincos_positions(sizes.dim, places, places, base_size=base_size)
        dtype = torch.promote_types(torch.float32, context.config.params_dtype)
        self.register_buffer("pos_embed", table.float().to(dtype)[None])

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> PositionedPatches:
        table = self._buffers.get("pos_embed")
        super()._apply(fn, recurse)
        if table is not None and self.pos_embed.itemsize < table.itemsize:
            self.pos_embed = table.to(self.pos_embed.device)
        return self

    def tokens(self, image: torch.Tensor) -> torch.Tensor:
        """Latents [b, c, h, w] to all tokens [s, b, D]."""
        tokens = super().tokens(image)
        places, side = self.sizes.pos_embed_max_size, self.sizes.side
        first = (places - side) // 2
        square = self.pos_embed.view(places, places, 1, -1)
        centre = square[first : first + side, first : first + side].flatten(0, 1)
        return (tokens + centre).to(tokens.dtype)


def time_text_embed(sizes: SD3Config, context: LayerContext) -> TimeTextEmbed:
    """The embedder of timestep and pooled text."""
    return TimeTextEmbed(_config(sizes, context), context, sizes.pooled_projection_dim)


def context_embedder(sizes: SD3Config, context: LayerContext) -> ContextEmbedder:
    """The beginning of the text's stream."""
    return ContextEmbedder(_config(sizes, context), context, sizes.joint_attention_dim)


def block(sizes: SD3Config, context: LayerContext, index: int) -> JointBlock:
    """The block at ``index``; the image comes first in its attention."""
    config = _config(sizes, context)
    spec = joint_block_spec(
        config,
        head_norm=sizes.qk_norm,
        text_ends=index == sizes.num_layers - 1,
        dual_attention=index in sizes.dual_attention_layers,
    )
    built: JointBlock = build_module(spec, config=config, pg_collection=context.pg_collection)
    return built


def head(sizes: SD3Config, context: LayerContext) -> Head:
    """The last layer; a patch's features are ordered (row, column, channel)."""
    side, patch = sizes.side, sizes.patch_size
    to_image = functools.partial(unpatchify, rows=side, columns=side, patch_size=patch)
    features = patch**2 * sizes.out_channels
    return Head(_config(sizes, context), context, features, to_image)
