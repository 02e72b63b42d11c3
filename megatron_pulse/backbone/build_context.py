"""Context of a run for building layers. Imports neither torch nor Megatron."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig


LOCAL, TRANSFORMER_ENGINE = TRANSFORMER_IMPLS = ("local", "transformer_engine")
"""Implementations of linear layers and attention: Megatron's own, or NVIDIA's."""


@dataclass(frozen=True)
class LayerContext:
    """Argument of ``Layer.build``.

    ``config`` is the run's configuration: parallel sizes, dtypes, recomputation, implementation.
    Its model sizes (hidden size, heads, number of layers) are ignored: every family derives its own
    copy. ``pg_collection`` holds at least ``tp`` and ``cp``; None means Megatron's globals.
    """

    config: TransformerConfig
    pg_collection: ProcessGroupCollection | None = None
