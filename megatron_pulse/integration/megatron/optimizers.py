"""Access to the optimizers inside Megatron's chained optimizer."""

from __future__ import annotations

from typing import Any


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Optimizers of a chain, without stubs of ranks that have nothing to optimize."""
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    return [inner for inner in chain if not inner.is_stub_optimizer]
