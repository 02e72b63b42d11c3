"""Bytes of an optimizer's state per trained parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_pulse.profile.measurement.layer_context import meta_context

if TYPE_CHECKING:
    from megatron_pulse.backbone.chain import Backbone

OPTIMIZERS = ("adam", "sgd", "muon", "lion")
_ADAM, _MOMENTUM = 8, 4


def optimizer_bytes(name: str, backbone: Backbone | None, momentum: bool = True) -> float:
    """Bytes of the fp32 state of optimizer ``name`` per trained parameter, on average.

    Adam keeps two moments, SGD one or none, muon and lion one. The latter two update matrices;
    Adam updates the other parameters (biases, convolutions), as in Megatron. Without a
    ``backbone`` none is known to be a matrix.
    """
    if name == "sgd":
        return _MOMENTUM if momentum else 0
    if name == "adam":
        return _ADAM
    share = 0.0 if backbone is None else matrix_share(backbone)
    return _MOMENTUM * share + _ADAM * (1 - share)


def matrix_share(backbone: Backbone) -> float:
    """Share of the trained parameters that are in matrices; layers are built on the meta device."""
    import torch

    matrices = every = 0
    with torch.device("meta"):
        context = meta_context()
        for layer in backbone.layers:
            for parameter in layer.build(context).parameters():
                if parameter.requires_grad:
                    every += parameter.numel()
                    matrices += parameter.numel() * (parameter.dim() == 2)
    return matrices / max(every, 1)
