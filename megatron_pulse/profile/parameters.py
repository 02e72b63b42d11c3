"""Number of parameters of each layer, without allocating any."""

from __future__ import annotations

import json

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.profile.measuring.building import count_module_parameters, meta_context

_counted: dict[str, tuple[int, ...]] = {}


def count_parameters(backbone: Backbone) -> tuple[int, ...]:
    """Parameters of each layer of the whole model, i.e. at tensor-parallel size 1.

    Layers are built on the meta device, once per process and backbone (by its record). Works
    inside a distributed run of any layout as well as without one. Raises BackboneError that names
    every layer which cannot be built.
    """
    key = json.dumps([backbone.record, [layer.name for layer in backbone.layers]])
    if not backbone.record or key not in _counted:
        _counted[key] = _count(backbone)
    return _counted[key]


def _count(backbone: Backbone) -> tuple[int, ...]:
    import torch

    from megatron_pulse.profile.measuring.module_check import naming_module_faults

    context = meta_context()
    with naming_module_faults(backbone), torch.device("meta"):
        return tuple(count_module_parameters(layer.build(context)) for layer in backbone.layers)
