"""Patches to tokens [s, b, d] and back, positions and adaLN helpers of image transformers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from megatron_pulse.backbone.build_context import LayerContext
from model_specs.common.layers import LayerModule, Named, Table, Tensors


def sincos_positions(
    dim: int, side: int, *, base_size: int, interpolation_scale: float = 1.0
) -> torch.Tensor:
    """Sinusoids of each patch's position: [side * side, dim], as in diffusers' ``PatchEmbed``.

    The first half of the features encodes the column, the second the row. Each half is (sines,
    cosines) of frequencies 10000^(-i / (dim/4)). Coordinates run from 0 to ``base_size`` /
    ``interpolation_scale`` for any number of patches.
    """
    index = torch.arange(side, dtype=torch.float32)
    places = index / (side / base_size) / interpolation_scale
    quarter = dim // 4
    frequencies = 1.0 / 10000 ** (torch.arange(quarter, dtype=torch.float64) / quarter)
    angles = torch.outer(places.double(), frequencies)
    sinusoids = torch.cat([angles.sin(), angles.cos()], dim=1)
    pairs = [sinusoids.expand(side, -1, -1), sinusoids[:, None].expand(-1, side, -1)]
    return torch.cat(pairs, dim=2).flatten(0, 1)


class PatchEmbed(LayerModule):
    """First layer of a chain: one linear map of each p x p patch, plus fixed positions.

    The map is the convolution ``proj``, initialised as in ViT: Xavier over the flattened patch,
    bias 0. ``positions`` [tokens, dim] are added in fp32. Under sequence parallelism every rank
    computes all tokens and keeps its part.
    """

    def __init__(
        self,
        context: LayerContext,
        in_channels: int,
        dim: int,
        patch_size: int,
        positions: Table | None = None,
    ) -> None:
        super().__init__(context.config, context.pg_collection)
        self.positions = positions
        self.proj = torch.nn.Conv2d(in_channels, dim, patch_size, stride=patch_size)
        if context.config.perform_initialization:
            torch.nn.init.xavier_uniform_(self.proj.weight.data.flatten(1))
            torch.nn.init.zeros_(self.proj.bias)
        self.to(dtype=context.config.params_dtype)

    def tokens(self, image: torch.Tensor) -> torch.Tensor:
        """Image [b, c, h, w] to all tokens [h/p * w/p, b, dim], row by row."""
        tokens = self.proj(image).flatten(2).permute(2, 0, 1)
        if self.positions is not None:
            positions = self.positions.on(tokens.device)
            tokens = (tokens + positions[:, None]).to(tokens.dtype)
        return tokens.contiguous()

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Image [b, c, h, w] to this rank's tokens [s, b, dim]."""
        return (self.enter_sequence(self.tokens(inputs[0])),)


def unpatchify(tokens: torch.Tensor, side: int, patch_size: int) -> torch.Tensor:
    """Tokens [side * side, b, p * p * c] to the image [b, c, side * p, side * p].

    A token's features are ordered (row, column, channel) of its patch.
    """
    samples, pixels = tokens.shape[1], side * patch_size
    grid = tokens.reshape(side, side, samples, patch_size, patch_size, -1)
    return grid.permute(2, 5, 0, 3, 1, 4).reshape(samples, -1, pixels, pixels)


def normed(
    tokens: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, eps: float = 1e-6
) -> torch.Tensor:
    """LayerNorm of tokens [s, b, d], times 1 + ``scale`` [b, d], plus ``shift`` [b, d]."""
    return F.layer_norm(tokens, tokens.shape[-1:], eps=eps) * (1 + scale) + shift


def gated(
    sublayer: torch.nn.Module,
    tokens: torch.Tensor,
    shift: torch.Tensor,
    scale: torch.Tensor,
    gate: torch.Tensor,
    *,
    eps: float = 1e-6,
    **arguments: Any,
) -> torch.Tensor:
    """Residual of an attention or MLP, called with ``arguments``, under adaLN-zero."""
    out, bias = sublayer(normed(tokens, shift, scale, eps), **arguments)
    return gate * (out + bias)
