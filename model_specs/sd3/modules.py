"""SD3's own modules: patches with a position table, and the parts of ``mmdit`` at its sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_pulse.backbone.build_context import LayerContext
from model_specs.common.mmdit import ContextEmbedder, Head, JointBlock, TimeTextEmbed
from model_specs.common.patches import (
    PatchEmbed,
    at_corners,
    of_grid,
    sincos_positions,
    unpatchify,
)
from model_specs.sd3.config import SD3Config

__all__ = ["ContextEmbedder", "PositionedPatches", "TimeTextEmbed", "block", "head"]


class PositionedPatches(PatchEmbed):
    """Map latents to tokens, plus the centre of the position table ``pos_embed`` [1, places, D].

    diffusers keeps the table in its state dict, so the table is a buffer here too. It stays in fp32
    when the module is cast to half precision; diffusers would cast it.
    """

    pos_embed: torch.Tensor

    def __init__(self, sizes: SD3Config, context: LayerContext) -> None:
        super().__init__(context, sizes.in_channels, sizes.dim, sizes.patch_size)
        self.sizes = sizes
        places = sizes.pos_embed_max_size
        base_size = sizes.base_sample_size // sizes.patch_size
        side = sincos_positions(sizes.dim, places, base_size=base_size)
        dtype = torch.promote_types(torch.float32, context.config.params_dtype)
        self.register_buffer("pos_embed", of_grid(side, side).float().to(dtype)[None])

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> PositionedPatches:
        table = self._buffers.get("pos_embed")
        super()._apply(fn, recurse)
        if table is not None and self.pos_embed.itemsize < table.itemsize:
            self.pos_embed = table.to(self.pos_embed.device)
        return self

    def tokens(self, image: torch.Tensor, corners: torch.Tensor | None) -> torch.Tensor:
        """Latents [b, c, h, w] to all tokens [s, b, D]; patches use their part of the centre."""
        tokens = super().tokens(image, corners)
        places, patch = self.sizes.pos_embed_max_size, self.sizes.patch_size
        own = [side // patch for side in image.shape[-2:]]
        rows, columns = (
            slice((places - count) // 2, (places + count) // 2)
            for count in (own if corners is None else self.sizes.grids[0])
        )
        centre = self.pos_embed.view(places, places, -1)[rows, columns]
        if corners is None:
            positions = centre.flatten(0, 1)[:, None]
        else:
            positions = at_corners(centre, corners // patch, own)
        return (tokens + positions).to(tokens.dtype)


def block(sizes: SD3Config, context: LayerContext, index: int) -> JointBlock:
    """Block at ``index``; the image comes first in its attention."""
    return JointBlock(
        sizes,
        context,
        head_norm=sizes.qk_norm,
        text_ends=index == sizes.num_layers - 1,
        dual_attention=index in sizes.dual_attention_layers,
    )


def head(sizes: SD3Config, context: LayerContext) -> Head:
    """Last layer; a patch's features are ordered (row, column, channel)."""
    to_image = functools.partial(unpatchify, patch_size=sizes.patch_size)
    features = sizes.patch_size**2 * sizes.out_channels
    return Head(sizes, context, features, sizes.grids, to_image)
