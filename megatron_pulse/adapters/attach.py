"""Backbones with an adapter: all weights frozen, and trained factors beside the targeted ones."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_pulse.adapters.choice import Adapter
from megatron_pulse.adapters.files import AdapterFile
from megatron_pulse.adapters.low_rank import factor_names
from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.profile.measurement.layer_context import meta_context
from megatron_pulse.profile.measurement.module_check import naming_module_faults


class Adaptable(Protocol):
    """Layer module that takes adapters."""

    def adaptable(self) -> Collection[str]:
        """Names of the layers whose weight takes an adapter, as adapter files have them."""
        ...

    def add_adapter(self, layers: Collection[str], rank: int, scale: float) -> None:
        """Add trained factors beside the weights of ``layers``."""
        ...


def with_adapter(
    backbone: Backbone, adapter: Adapter, start: AdapterFile | None = None
) -> Backbone:
    """``backbone`` with frozen weights, and with the adapter's factors beside them.

    Names of the weights do not change. The record contains the adapter. New factors have no effect;
    those of ``start`` are copied. Raises Faults for targets without a match, and UserError for a
    file of another model.
    """
    every = _adaptable_layers(backbone)
    targeted = [tuple(filter(adapter.matches, names)) for names in every]
    layers = [name for names in every for name in names]
    adapter.require_matches(layers)
    first = {} if start is None else start.named_as(layers).factors
    chain = tuple(
        dataclasses.replace(
            layer,
            build=functools.partial(_build, layer.build, names, adapter, first),
            trained=bool(names),
        )
        for layer, names in zip(backbone.layers, targeted, strict=True)
    )
    record = {**backbone.record, "adapter": adapter.to_record()} if backbone.record else {}
    return dataclasses.replace(backbone, layers=chain, record=record)


def adapter_names(backbone: Backbone) -> dict[str, str]:
    """Names of an adapter's factors in the backbone, each with its name in files."""
    if "adapter" not in backbone.record:
        return {}
    adapter = Adapter.from_record(backbone.record["adapter"])
    targeted = [n for names in _adaptable_layers(backbone) for n in names if adapter.matches(n)]
    return {name: name for layer in targeted for name in factor_names(f"{layer}.weight")}


def _adaptable_layers(backbone: Backbone) -> list[tuple[str, ...]]:
    """Names of the layers that take an adapter, for each link of the chain."""
    context = meta_context()
    with naming_module_faults(backbone), torch.device("meta"):
        return [tuple(_adaptable(layer.build(context)).adaptable()) for layer in backbone.layers]


def _adaptable(module: Any) -> Adaptable:
    if not hasattr(module, "adaptable"):
        raise ValueError(f"{type(module).__name__} takes no adapter")
    return module  # type: ignore[no-any-return]


def _build(
    build: Callable[[Any], Any],
    layers: Collection[str],
    adapter: Adapter,
    start: Mapping[str, Tensor],
    context: Any,
) -> Any:
    module = build(context)
    module.requires_grad_(False)
    if layers:
        module.add_adapter(layers, adapter.rank, adapter.scale)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in start and not parameter.is_meta:
                parameter.copy_(start[name])
    return module
