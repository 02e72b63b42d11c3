"""Number of parameters of each layer, without allocating any."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.context import LayerContext

_counted: dict[str, tuple[int, ...]] = {}


class _SingleRank:
    """Stands in for a process group of one rank, whatever groups this process is really in."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def meta_context(dtype: str = "float32") -> LayerContext:
    """A context in which layers build whole (no tensor parallelism) and without initialisation.

    Use under ``torch.device("meta")``, or fill the parameters before use. Needs no process group,
    and ignores those there are. ``dtype`` is that of parameters.
    """
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    groups = ProcessGroupCollection()
    groups.tp = groups.cp = _SingleRank()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        use_cpu_initialization=True,
        perform_initialization=False,
        transformer_impl="local",
        params_dtype=getattr(torch, dtype),
    )
    return LayerContext(config, groups)


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


def count_module_parameters(module: Any) -> int:
    """Number of parameters of one built layer."""
    return sum(parameter.numel() for parameter in module.parameters())


@dataclass(frozen=True)
class Sizes:
    """What a built layer holds, and what tensor parallelism does to it (see ``ProfiledLayer``)."""

    parameters: int
    sharded: int
    sums: int


def module_sizes(module: Any) -> Sizes:
    """The sizes of one layer, built whole."""
    sharded = (p for p in module.parameters() if getattr(p, "tensor_model_parallel", False))
    sums = [m for m in module.modules() if "RowParallel" in type(m).__name__]
    return Sizes(count_module_parameters(module), sum(p.numel() for p in sharded), len(sums))
