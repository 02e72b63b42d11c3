"""Keys of microbatches for the dropout of adapters (``megatron_pulse/adapters/low_rank.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.shape_buckets import own_fields


def set_dropout_key(module: Any, key: tuple[int, int] | None) -> None:
    """Set the key of the module's adapter dropout for its next call, if it has dropout."""
    if (dropout := getattr(module, "adapter_dropout", None)) is not None:
        dropout.key = key


def first_position(backbone: Backbone, chain: str, batch: Mapping[str, Any]) -> int | None:
    """Position in the run of a microbatch's first sample; None without positions."""
    positions = own_fields(backbone, chain, batch).get("positions")
    return None if positions is None else int(positions[0])
