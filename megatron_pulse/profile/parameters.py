"""Number of parameters of each layer, and their names and shapes, without allocating any."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.check import BackboneError
from megatron_pulse.faults import raised
from megatron_pulse.profile.measuring.building import count_module_parameters, meta_context

if TYPE_CHECKING:
    from torch import Tensor

_counted: dict[str, tuple[tuple[int, int], ...]] = {}


def count_parameters(backbone: Backbone) -> tuple[int, ...]:
    """Parameters of each layer of the whole model, i.e. at tensor-parallel size 1.

    Layers are built on the meta device, once per process and backbone (by its record). Works
    inside a distributed run of any layout as well as without one. Raises BackboneError that names
    every layer which cannot be built.
    """
    return tuple(whole for whole, _ in _counts(backbone))


def count_trained(backbone: Backbone) -> tuple[int, ...]:
    """``count_parameters`` of those that ask for a gradient."""
    return tuple(trained for _, trained in _counts(backbone))


def _counts(backbone: Backbone) -> tuple[tuple[int, int], ...]:
    key = json.dumps([backbone.record, [layer.name for layer in backbone.layers]])
    if not backbone.record or key not in _counted:
        _counted[key] = _count(backbone)
    return _counted[key]


def _count(backbone: Backbone) -> tuple[tuple[int, int], ...]:
    import torch

    from megatron_pulse.profile.measuring.module_check import naming_module_faults

    context = meta_context()
    with naming_module_faults(backbone), torch.device("meta"):
        modules = (layer.build(context) for layer in backbone.layers)
        return tuple(
            (count_module_parameters(m), count_module_parameters(m, True)) for m in modules
        )


def meta_weights(backbone: Backbone, most: float = math.inf) -> dict[str, Tensor]:
    """Names, shapes and types of the whole model's parameters and persistent buffers, on meta.

    Ends after the layer with which they have more than ``most`` values. Raises BackboneError for
    sizes of which no tensor can be.
    """
    import torch

    context = meta_context()
    weights: dict[str, Tensor] = {}
    values = 0
    with torch.device("meta"):
        for i, layer in enumerate(backbone.layers):
            try:
                state = layer.build(context).state_dict(prefix=layer.prefix)
            except (RuntimeError, OverflowError) as error:  # beyond what a tensor's size can be
                fault = f"layer {i} ({layer.name}): cannot be built: {raised(error)}"
                raise BackboneError(backbone.name, [fault]) from error
            # Extra states belong to Transformer Engine's recipes.
            weights |= {k: v for k, v in state.items() if not k.endswith("_extra_state")}
            values += sum(v.numel() for v in state.values() if isinstance(v, torch.Tensor))
            if values > most:
                break
    return weights
