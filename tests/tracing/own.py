"""Modules unlike diffusers'."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tracing.context_parallel import modules as context_modules

WIDTH = 8


class Block(nn.Module):
    def __init__(self, pops: int = 0) -> None:
        super().__init__()
        self.mix = nn.Conv2d(WIDTH * (1 + pops), WIDTH, 3, padding=1)
        self.out = nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, *x: Tensor) -> Tensor:
        return self.out(F.silu(self.mix(torch.cat(x, 1)))) + x[0]


class Dense(nn.Module):
    """Like UNet++: each level's nodes take all before them; the sample comes back at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, WIDTH, 1)
        self.nodes = nn.ModuleList(Block(n) for n in (0, 0, 1, 0, 2, 3))
        self.leave = nn.Conv2d(WIDTH, 3, 1)

    def forward(self, image: Tensor, when: Tensor) -> Tensor:
        first = self.enter(image) + when.sin()[:, None, None, None]
        kept = [self.nodes[0](first)]
        kept.append(self.nodes[1](kept[0]))
        kept.append(self.nodes[2](kept[1], kept[0]))
        kept.append(self.nodes[3](kept[2]))
        kept.append(self.nodes[4](kept[3], kept[0], kept[2]))
        last = self.nodes[5](kept[4], kept[0], kept[1], kept[2])
        return self.leave(last) + image


class InPlace(nn.Module):
    """Writes to what it has computed, and reads a table; ``counts`` changes a buffer too."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.counts = counts
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(4))
        self.register_buffer("table", torch.linspace(0, 1, WIDTH))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.calls.add_(1)
        for block in self.blocks:
            y = block(x)
            half = y[:, : WIDTH // 2]
            half.mul_(self.table[: WIDTH // 2]).add_(1)
            x = y.relu_() + self.table
        full = torch.zeros(x.shape[0], 2 * WIDTH)
        full[:, WIDTH:] = x
        return full


class Regions(nn.Module):
    """Has regions without gradients and of another precision."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.device = device
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        with torch.no_grad():
            scale = torch.arange(1, WIDTH + 1, device="cpu") * kept.sum(1, keepdim=True)
        for block in self.blocks:
            with torch.autocast(self.device, torch.bfloat16):
                y = block(x)
            x = x + y.float() / scale
        return x


class Hidden(nn.Module):
    """Writes in a region, to a part of what it was given, of which nothing comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).clone()
            with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
                x[:, 1:].mul_(2)
        return x


class TwoOutputs(nn.Module):
    """Returns a prediction and another one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, n) for n in (2, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.body(x)
        return tuple(head(y) for head in self.heads)


class Masked(nn.Module):
    """Blocks that share a mask too large to be made by each, and a table that is learnt."""

    TOKENS = 280

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Linear(1, self.TOKENS)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(4))

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        mask = kept[:, :, None] & kept[:, None, :]
        bias = self.places(torch.ones(1, 1))[0, :, None]
        for block in self.blocks:
            y = block(x) + bias
            x = x + F.scaled_dot_product_attention(y, y, y, mask)
        return x


def dense() -> tuple[nn.Module, dict[str, Tensor], str]:
    return Dense(), {"image": torch.randn(2, 3, 4, 4), "when": torch.rand(2)}, "image"


def masked() -> tuple[nn.Module, dict[str, Tensor], str]:
    kept = torch.ones(2, Masked.TOKENS, dtype=torch.bool)
    return Masked(), {"x": torch.randn(2, Masked.TOKENS, WIDTH), "kept": kept}, "x"


def mixed() -> tuple[nn.Module, dict[str, Tensor], str]:
    return context_modules.Blocks(), context_modules.given(2), "sample"


def three_heads() -> tuple[nn.Module, dict[str, Tensor], str]:
    return context_modules.Blocks(context_modules.ThreeHeads), context_modules.given(2), "sample"


OWN = {"dense": dense, "masked": masked, "mixed": mixed, "three_heads": three_heads}
"""Modules, what they are called with, and which of that is the sample."""
