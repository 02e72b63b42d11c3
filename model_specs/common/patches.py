"""What transformers on image patches share: patches to tokens [s, b, d] and back, positions."""

from __future__ import annotations

import torch

from megatron_pulse.backbone.context import LayerContext
from model_specs.common.layers import LayerModule, Named, Table, Tensors, enter_sequence


def sincos_positions(
    dim: int,
    rows: int,
    columns: int,
    *,
    base_size: int,
    interpolation_scale: float = 1.0,
    max_size: int | None = None,
) -> torch.Tensor:
    """Sinusoids of each patch's place: [rows * columns, dim], as diffusers' ``PatchEmbed``.

    The first half of the features is of the column, the second of the row; each is (sines,
    cosines) of frequencies 10000^(-i / (dim/4)). Coordinates run from 0 to ``base_size`` /
    ``interpolation_scale``, whatever the number of patches. With ``max_size`` they are those of
    the centre of a grid of ``max_size`` squared (SD3).
    """

    def coordinates(count: int) -> torch.Tensor:
        grid = count if max_size is None else max_size
        first = (grid - count) // 2
        index = torch.arange(first, first + count, dtype=torch.float32)
        return index / (grid / base_size) / interpolation_scale

    def sinusoids(places: torch.Tensor) -> torch.Tensor:
        quarter = dim // 4
        frequencies = 1.0 / 10000 ** (torch.arange(quarter, dtype=torch.float64) / quarter)
        angles = torch.outer(places.double(), frequencies)
        return torch.cat([angles.sin(), angles.cos()], dim=1)

    row, column = sinusoids(coordinates(rows)), sinusoids(coordinates(columns))
    pairs = [column.expand(rows, -1, -1), row[:, None].expand(-1, columns, -1)]
    return torch.cat(pairs, dim=2).flatten(0, 1)


class PatchEmbed(LayerModule):
    """First layer of a chain: each p x p patch through one linear map, plus fixed positions.

    The map is the convolution ``proj``, drawn as ViT's: Xavier over the flattened patch, bias 0.
    ``positions`` [tokens, dim] are added in fp32. Under sequence parallelism every rank computes
    all tokens and keeps its part.
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
        self.groups = context.pg_collection
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
        return (enter_sequence(self.tokens(inputs[0]), self.config, self.groups),)


def unpatchify(tokens: torch.Tensor, rows: int, columns: int, patch_size: int) -> torch.Tensor:
    """Tokens [rows * columns, b, p * p * c] to the image [b, c, rows * p, columns * p].

    A token's features are ordered (row, column, channel) of its patch.
    """
    patch = patch_size
    grid = tokens.reshape(rows, columns, tokens.shape[1], patch, patch, -1)
    return grid.permute(2, 5, 0, 3, 1, 4).reshape(
        tokens.shape[1], -1, rows * patch, columns * patch
    )


def modulate(tokens: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Tokens [s, b, d] scaled by 1 + ``scale`` [b, d] and shifted by ``shift`` [b, d]."""
    return tokens * (1 + scale) + shift
