"""Random inputs of modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

type Given = Callable[[int], Mapping[str, Any]]
"""What a module is called with, for a microbatch size."""
type Made = tuple[nn.Module, Given]

TEXT, SIZE = 5, 16


def rand(*shape: int) -> Tensor:
    """Normal numbers."""
    return torch.randn(*shape)


def whole(*shape: int, below: int = 1000) -> Tensor:
    """Whole numbers from 0 on."""
    return torch.randint(0, below, shape)


def mask(*shape: int) -> Tensor:
    """All ones, but for the first sample's last two."""
    kept = torch.ones(*shape, dtype=torch.long)
    kept[0, -2:] = 0
    return kept
