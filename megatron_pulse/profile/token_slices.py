"""Layers whose token-wise parts can run in slices of tokens."""

from __future__ import annotations

import torch

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.rng_state import generators_kept
from megatron_pulse.backbone.token_slices import set_token_slices
from megatron_pulse.errors import Faults
from megatron_pulse.profile.measurement.layer_context import meta_context, some_process_group
from megatron_pulse.tracing.context_parallel.divided_backbone import divisions_of
from megatron_pulse.tracing.from_module import source_of


def require_token_slices(backbone: Backbone, token_slices: int = 1) -> None:
    """Raise Faults if no layer of ``backbone`` can be sliced, or has fewer tokens than slices.

    A derived chain must have tokens by the rules of context parallelism.
    """
    if source_of(backbone) is not None:
        lengths = [
            division.length
            for chain in divisions_of(backbone, 0, 1)
            for division in chain.divisions.values()
        ]
    else:
        _require_sliced(backbone)
        lengths = [length for _, _, length in backbone.sequences]
    if token_slices > (most := max(lengths, default=1)):
        raise Faults([f"{backbone.name} has {most} tokens: give a smaller number of slices"])


def _require_sliced(backbone: Backbone) -> None:
    with generators_kept(), some_process_group(), torch.device("meta"):
        for layer in backbone.layers:
            if set_token_slices(layer.build(meta_context()).modules(), 1):
                return
    raise Faults(
        [
            f"{backbone.name} has no layer that can be sliced: convolutions and GroupNorm take "
            "pixels together, and layers of your own have no attribute token_slices. Leave it out"
        ]
    )
