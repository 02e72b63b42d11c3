"""Modules that need every rule by which tokens stay divided, or that no rule can divide."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, IMAGE, TEXT = 16, 8, 7, 5


def _heads(x: Tensor, count: int = HEADS) -> Tensor:
    return x.unflatten(2, (count, -1)).transpose(1, 2)


class Mixed(nn.Module):
    """A block of image tokens beside text: joint attention with a mask, image queries of both,
    grouped heads, cross-attention with a mask of queries, a time for every token, a table, and an
    in-place write."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleDict(
            {name: nn.Linear(WIDTH, WIDTH) for name in ("q", "k", "v", "text", "cross", "out")}
        )
        self.pair = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.table = nn.Parameter(torch.randn(1, IMAGE, WIDTH))

    def forward(self, x: Tensor, text: Tensor, times: Tensor, mask: Tensor) -> Tensor:
        """The block."""
        x = self.norm(x) * (1 + times) + self.table
        text = self.maps["text"](text)
        both = torch.cat([text, x], 1)
        q, k, v = (_heads(self.maps[name](both)) for name in ("q", "k", "v"))
        joint = F.scaled_dot_product_attention(q, k, v, mask[:, None, None])
        told, seen = joint.transpose(1, 2).flatten(2).split_with_sizes([TEXT, IMAGE], 1)
        x = x + seen
        near = torch.ones(IMAGE, TEXT, dtype=torch.bool, device=x.device).tril(1)
        whole = _heads(self.maps["cross"](text))
        crossed = F.scaled_dot_product_attention(_heads(x), whole, whole, near)
        both = torch.cat([told + text, x + crossed.transpose(1, 2).flatten(2)], dim=1)
        grouped = [_heads(part, HEADS // 2) for part in self.pair(both).chunk(2, -1)]
        grown = F.scaled_dot_product_attention(_heads(x), *grouped, enable_gqa=True)
        result = torch.zeros_like(x)
        result[..., ::2] = grown.transpose(1, 2).flatten(2)[..., ::2]
        return result + x


class Blocks(nn.Module):
    """A patch embedding, two blocks, and a head that mixes tokens."""

    def __init__(self, kind: type[nn.Module] = Mixed) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)
        self.mix = nn.Linear(IMAGE, IMAGE)

    def forward(self, sample: Tensor, context: Tensor, times: Tensor, mask: Tensor) -> Tensor:
        """Prediction for ``sample [b, tokens, 4]``."""
        x = self.embed(sample)
        for block in self.blocks:
            x = block(x, context, times, mask)
        predicted: Tensor = self.mix(self.head(x).mT).mT
        return predicted


class Pooled(nn.Module):
    """Attention, and a mean over tokens between two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, text: Tensor, times: Tensor, mask: Tensor) -> Tensor:
        """The block."""
        q = _heads(self.map(x))
        x = x + F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
        return x - x.mean(1, keepdim=True)


class ThreeHeads(nn.Module):
    """Attention with three heads."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, 12)
        self.out = nn.Linear(12, WIDTH)

    def forward(self, x: Tensor, text: Tensor, times: Tensor, mask: Tensor) -> Tensor:
        """The block."""
        q = _heads(self.map(x), 3)
        attended = self.attend(q, mask[:, -IMAGE:])
        return x + self.out(attended.transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, mask: Tensor) -> Tensor:
        """Attention of a block."""
        return F.scaled_dot_product_attention(q, q.sin(), q.cos(), scale=0.7)


class ThreeHeadsCausal(ThreeHeads):
    """Attention to earlier tokens."""

    def attend(self, q: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)


class ThreeHeadsWithBias(ThreeHeads):
    """Attention with a mask that is added."""

    def attend(self, q: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, mask[:, None, None].to(q.dtype))


def given(size: int) -> dict[str, Any]:
    """Inputs of ``Blocks``; a third of the tokens is masked."""
    mask = torch.ones(size, TEXT + IMAGE, dtype=torch.bool)
    mask[:, ::3] = False
    return {
        "sample": torch.randn(size, IMAGE, 4),
        "context": torch.randn(size, TEXT, WIDTH),
        "times": torch.randn(size, IMAGE, 1),
        "mask": mask,
    }
