"""A transformer of digits that is no family: 16 tokens, times alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.rows = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        """``x [b, tokens, width]`` after the block."""
        parts = self.into(self.norm(x) * scale).chunk(3, -1)
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        moved: Tensor = x + self.rows(x)
        return moved


class TinyTokens(nn.Module):
    """Patches of 2 x 2, six blocks."""

    def __init__(self, width: int, heads: int, side: int) -> None:
        super().__init__()
        self.side = side // 2
        self.enter = nn.Conv2d(1, width, 2, stride=2)
        self.places = nn.Parameter(torch.randn(1, self.side**2, width))
        self.time = nn.Linear(1, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(6))
        self.leave = nn.Linear(width, 4)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        """Prediction for ``sample [b, 1, side, side]``."""
        x = self.enter(sample).flatten(2).mT + self.places
        scale = 1 + self.time(timestep[:, None] / 1000)[:, None]
        for block in self.blocks:
            x = block(x, scale)
        patches: Tensor = self.leave(x).unflatten(1, (self.side, -1)).unflatten(3, (2, 2))
        return patches.permute(0, 1, 3, 2, 4).flatten(3).flatten(1, 2)[:, None]


def build(width: int = 16, heads: int = 4, side: int = 8) -> tuple[nn.Module, dict[str, Tensor]]:
    """The module, and what it is called with."""
    torch.manual_seed(0)
    module = TinyTokens(width, heads, side)
    return module, {"sample": torch.randn(2, 1, side, side), "timestep": torch.rand(2)}
