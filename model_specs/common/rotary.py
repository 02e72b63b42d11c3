"""Rotary positions of a grid of patches that depends on the microbatch's shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from model_specs.common.layers import LayerModule, Table


class RotaryOfShape:
    """Rotary embedding of attention: ``turn`` rotates heads by the table of the present shape."""

    def __init__(
        self, turn: Callable[[Table, torch.Tensor], torch.Tensor], tables: Sequence[Table]
    ) -> None:
        self.turn, self.tables = turn, tables
        self.shape_index = 0

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate queries or keys [s, b, heads, d]."""
        return self.turn(self.tables[self.shape_index], heads)


class RotatedLayer(LayerModule):
    """Layer whose attention has the rotary embedding ``rotary``."""

    rotary: RotaryOfShape

    @property
    def chain_shape(self) -> int:
        """Index of the microbatch's shape; the runtime sets it before each call."""
        return self.rotary.shape_index

    @chain_shape.setter
    def chain_shape(self, shape_index: int) -> None:
        self.rotary.shape_index = shape_index
