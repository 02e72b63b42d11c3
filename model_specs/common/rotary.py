"""Rotary positions of the tokens of a microbatch, whose number depends on its shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from model_specs.common.layers import Table
from model_specs.common.token_shares import TokenShares


class RotaryOfShape:
    """Rotary embedding of attention: ``turn`` rotates heads by the table of the present shape.

    ``tables`` hold the positions of all tokens of each shape, along dimension 1.
    """

    def __init__(
        self,
        turn: Callable[[Table, torch.Tensor], torch.Tensor],
        tables: Sequence[Table],
        shares: TokenShares,
    ) -> None:
        self.turn, self.shares = turn, shares
        self.tables = [shares.own_table(table, i) for i, table in enumerate(tables)]

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate this rank's queries or keys [s, b, heads, d]."""
        return self.turn(self.tables[self.shares.shape_index], heads)
