"""Patches to tokens [s, b, d] and back, positions and adaLN helpers of image transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from megatron_pulse.backbone.build_context import LayerContext
from megatron_pulse.backbone.shape_buckets import PATCH_CORNER
from model_specs.common.layers import LayerModule, Named, Table, Tensors


def sincos_positions(
    dim: int, count: int, *, base_size: int, interpolation_scale: float = 1.0
) -> torch.Tensor:
    """Sinusoids of ``count`` positions along one side: [count, dim / 2].

    As in diffusers' ``PatchEmbed``: sines, then cosines, of frequencies 10000^(-i / (dim/4)).
    Coordinates run from 0 to ``base_size`` / ``interpolation_scale`` for any ``count``.
    """
    index = torch.arange(count, dtype=torch.float32)
    places = index / (count / base_size) / interpolation_scale
    quarter = dim // 4
    frequencies = 1.0 / 10000 ** (torch.arange(quarter, dtype=torch.float64) / quarter)
    angles = torch.outer(places.double(), frequencies)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


@functools.cache
def sincos_table(dim: int, count: int, base_size: int, interpolation_scale: float = 1.0) -> Table:
    """``sincos_positions`` as a table; all chains share one."""
    scale = interpolation_scale
    return Table(
        lambda: sincos_positions(dim, count, base_size=base_size, interpolation_scale=scale)
    )


def of_grid(of_rows: torch.Tensor, of_columns: torch.Tensor) -> torch.Tensor:
    """Features [rows * columns, d] of patches, row by row: those of the column, then of the row."""
    rows, columns = len(of_rows), len(of_columns)
    pairs = [of_columns.expand(rows, -1, -1), of_rows[:, None].expand(-1, columns, -1)]
    return torch.cat(pairs, dim=2).flatten(0, 1)


def at_corners(whole: torch.Tensor, corners: torch.Tensor, grid: Sequence[int]) -> torch.Tensor:
    """Features [rows * columns, b, d] of parts of a ``whole`` grid [R, C, d].

    ``corners [b, 2]`` are the first row and column of each part, ``grid`` is (rows, columns).
    """
    rows, columns = (
        # Measurements have integers of 1, which may be beyond the last corner.
        (corner[:, None] + torch.arange(count, device=corner.device)).clamp(max=most - 1)
        for corner, count, most in zip(corners.unbind(1), grid, whole.shape, strict=False)
    )
    return whole[rows[:, :, None], columns[:, None]].flatten(1, 2).transpose(0, 1)


class PatchEmbed(LayerModule):
    """First layer of a chain: one linear map of each p x p patch, plus fixed positions.

    The map is the convolution ``proj``, initialised as in ViT: Xavier over the flattened patch,
    bias 0. ``positions`` gives those [count, dim / 2] of a number of rows, or of columns; they are
    added in fp32. In patch-wise training, samples are parts of a ``whole`` grid of tokens, and have
    its positions there. Under sequence parallelism every rank computes all tokens and keeps its
    part.
    """

    def __init__(
        self,
        context: LayerContext,
        in_channels: int,
        dim: int,
        patch_size: int,
        positions: Callable[[int], Table] | None = None,
        whole: tuple[int, int] = (0, 0),
    ) -> None:
        super().__init__(context.config, context.pg_collection)
        self.positions, self.whole, self.patch_size = positions, whole, patch_size
        self.proj = torch.nn.Conv2d(in_channels, dim, patch_size, stride=patch_size)
        if context.config.perform_initialization:
            torch.nn.init.xavier_uniform_(self.proj.weight.data.flatten(1))
            torch.nn.init.zeros_(self.proj.bias)
        self.to(dtype=context.config.params_dtype)

    def tokens(self, image: torch.Tensor, corners: torch.Tensor | None) -> torch.Tensor:
        """Image [b, c, h, w] to all tokens [h/p * w/p, b, dim], row by row.

        ``corners [b, 2]`` are the places of the images in their wholes, in elements; None if they
        are wholes.
        """
        patches = self.proj(image)
        tokens = patches.flatten(2).permute(2, 0, 1)
        if self.positions is not None:
            grid = patches.shape[-2:] if corners is None else self.whole
            positions = of_grid(*(self.positions(count).on(tokens.device) for count in grid))
            positions = positions[:, None]
            if corners is not None:
                whole = positions.view(*grid, -1)
                positions = at_corners(whole, corners // self.patch_size, patches.shape[-2:])
            tokens = (tokens + positions).to(tokens.dtype)
        return tokens.contiguous()

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Image [b, c, h, w] to this rank's tokens [s, b, dim].

        ``conditioning``: patch_corner [b, 2] in patch-wise training.
        """
        return (self.enter_sequence(self.tokens(inputs[0], conditioning.get(PATCH_CORNER))),)


def unpatchify(tokens: torch.Tensor, grid: tuple[int, int], patch_size: int) -> torch.Tensor:
    """Tokens [rows * columns, b, p * p * c] of a grid to the image [b, c, rows * p, columns * p].

    A token's features are ordered (row, column, channel) of its patch.
    """
    (rows, columns), samples = grid, tokens.shape[1]
    squares = tokens.reshape(rows, columns, samples, patch_size, patch_size, -1)
    image = squares.permute(2, 5, 0, 3, 1, 4)
    return image.reshape(samples, -1, rows * patch_size, columns * patch_size)


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
