"""Megatron's optimizers, which may be chains of others."""

from __future__ import annotations

from typing import Any


def inner_optimizers(optimizer: Any) -> list[Any]:
    """A chain of optimizers, without those of ranks that have nothing to optimize."""
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    return [inner for inner in chain if not inner.is_stub_optimizer]
