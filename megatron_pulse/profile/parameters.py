"""Parameter counts of each layer, with names and shapes, without allocating memory."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.check import BackboneError
from megatron_pulse.errors import describe_exception
from megatron_pulse.profile.measurement.layer_context import (
    count_module_parameters,
    count_quantized,
    meta_context,
)

if TYPE_CHECKING:
    from torch import Tensor

_counted: dict[str, tuple[tuple[int, int, int, int], ...]] = {}
"""Parameters of each layer, trained ones, quantised ones, and the bytes of these."""


def count_parameters(backbone: Backbone) -> tuple[int, ...]:
    """Number of parameters of each layer of the whole model (tensor-parallel size 1).

    Layers are built on the meta device, once per process and backbone (by its record). Works inside
    a distributed run of any layout, and without one. Raises BackboneError naming every layer that
    cannot be built.
    """
    return tuple(whole for whole, *_ in _counts(backbone))


def count_trained(backbone: Backbone) -> tuple[int, ...]:
    """Number of each layer's parameters with ``requires_grad``. See ``count_parameters``."""
    return tuple(trained for _, trained, *_ in _counts(backbone))


def weight_bytes(backbone: Backbone, each: int) -> tuple[int, ...]:
    """Bytes of each layer's parameters: ``each``, and what quantised ones take.

    See ``count_parameters``.
    """
    return tuple(
        each * (whole - quantized) + num_bytes
        for whole, _, quantized, num_bytes in _counts(backbone)
    )


def _counts(backbone: Backbone) -> tuple[tuple[int, int, int, int], ...]:
    key = json.dumps([backbone.record, [layer.name for layer in backbone.layers]])
    if not backbone.record or key not in _counted:
        _counted[key] = _count(backbone)
    return _counted[key]


def _count(backbone: Backbone) -> tuple[tuple[int, int, int, int], ...]:
    import torch

    from megatron_pulse.profile.measurement.module_check import naming_module_faults

    context = meta_context()
    with naming_module_faults(backbone), torch.device("meta"):
        modules = (layer.build(context) for layer in backbone.layers)
        return tuple(
            (count_module_parameters(m), count_module_parameters(m, True), *count_quantized(m))
            for m in modules
        )


def meta_weights(backbone: Backbone, most: float = math.inf) -> dict[str, Tensor]:
    """Meta tensors of the whole model's parameters and persistent buffers, by name.

    Stops after the layer at which the number of values exceeds ``most``. Raises BackboneError for
    sizes that no tensor can have.
    """
    import torch

    context = meta_context()
    weights: dict[str, Tensor] = {}
    values = 0
    with torch.device("meta"):
        for i, layer in enumerate(backbone.layers):
            try:
                state = layer.build(context).state_dict(prefix=layer.prefix)
            except (RuntimeError, OverflowError) as error:  # beyond the maximum size of a tensor
                fault = f"layer {i} ({layer.name}): cannot be built: {describe_exception(error)}"
                raise BackboneError(backbone.name, [fault]) from error
            # Extra states belong to Transformer Engine's recipes.
            weights |= {k: v for k, v in state.items() if not k.endswith("_extra_state")}
            values += sum(v.numel() for v in state.values() if isinstance(v, torch.Tensor))
            if values > most:
                break
    return weights
