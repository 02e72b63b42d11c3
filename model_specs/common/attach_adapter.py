"""Backbones with an adapter: all weights frozen, and trained factors beside the targeted ones."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_pulse.adapters.adapter import Adapter
from megatron_pulse.adapters.files import AdapterFile
from megatron_pulse.adapters.low_rank import PART, AdapterDropout, is_factor
from megatron_pulse.backbone.chain import Backbone, Layer
from megatron_pulse.profile.measurement.layer_context import meta_context
from megatron_pulse.profile.measurement.module_check import naming_module_faults


class Adaptable(Protocol):
    """Layer module that takes adapters."""

    def adaptable(self) -> Collection[str]:
        """Names of the layers whose weight takes an adapter, as adapter files have them."""
        ...

    def add_adapter(
        self, layers: Collection[str], adapter: Adapter, start: Mapping[str, Tensor]
    ) -> None:
        """Add trained factors beside the weights of ``layers``.

        First values are those of ``start``, by their names in adapter files, or new ones. The
        layer's module has its ``adapter_dropout`` already.
        """
        ...


Adapt = Callable[[Layer, Any], Adaptable]
"""Function that maps a layer and its module to what takes the layer's adapters."""


def _itself(layer: Layer, module: Any) -> Adaptable:
    if not hasattr(module, "adaptable"):
        raise ValueError(f"{layer.name}: {type(module).__name__} takes no adapter")
    return module  # type: ignore[no-any-return]


def with_adapter(
    backbone: Backbone,
    adapter: Adapter,
    start: AdapterFile | None = None,
    adapt: Adapt = _itself,
) -> Backbone:
    """``backbone`` with frozen weights, and with the adapter's factors beside them.

    Names of the weights do not change. The record contains the adapter. New factors have no effect;
    those of ``start`` are copied. Raises Faults for targets without a match, and UserError for a
    file of another model.
    """
    every = [tuple(_adaptable(adapt, *pair)) for pair in _on_meta(backbone)]
    layers = [name for names in every for name in names]
    adapter = adapter.fitted(layers)
    adapter.require_matches(layers)
    targeted = [tuple(filter(adapter.matches, names)) for names in every]
    first = {} if start is None else start.named_as(layers).factors
    chain = tuple(
        dataclasses.replace(
            layer,
            build=functools.partial(_build, layer.build, layer, names, adapter, first, adapt),
            trained=bool(names),
        )
        for layer, names in zip(backbone.layers, targeted, strict=True)
    )
    record = {**backbone.record, "adapter": adapter.to_record()} if backbone.record else {}
    return dataclasses.replace(backbone, layers=chain, record=record)


def adaptable_layers(backbone: Backbone, adapt: Adapt = _itself) -> list[str]:
    """Names of the layers whose weight takes an adapter, as adapter files have them."""
    return [name for pair in _on_meta(backbone) for name in _adaptable(adapt, *pair)]


def adapter_names(backbone: Backbone) -> dict[str, str]:
    """Names of an adapter's factors in the backbone, each with its name in files.

    In a cascade, names in files begin with their chain's name.
    """
    if "adapter" not in backbone.record:
        return {}
    return {
        layer.prefix + name: _of_chain(layer) + name.removeprefix(f"{PART}.")
        for layer, module in _on_meta(backbone)
        for name, _ in module.named_parameters()
        if is_factor(name)
    }


def _adaptable(adapt: Adapt, layer: Layer, module: Any) -> list[str]:
    return [_of_chain(layer) + name for name in adapt(layer, module).adaptable()]


def _of_chain(layer: Layer) -> str:
    return f"{layer.chain}." if layer.chain else ""


def _on_meta(backbone: Backbone) -> list[tuple[Layer, Any]]:
    """Each layer, with its module on the meta device."""
    context = meta_context()
    with naming_module_faults(backbone), torch.device("meta"):
        return [(layer, layer.build(context)) for layer in backbone.layers]


def _build(
    build: Callable[[Any], Any],
    layer: Layer,
    layers: Collection[str],
    adapter: Adapter,
    start: Mapping[str, Tensor],
    adapt: Adapt,
    context: Any,
) -> Any:
    module = build(context)
    module.requires_grad_(False)
    if layers:
        chain = _of_chain(layer)
        own = {name.removeprefix(chain): tensor for name, tensor in start.items()}
        names = [name.removeprefix(chain) for name in layers]
        if adapter.dropout:
            module.adapter_dropout = AdapterDropout(adapter.dropout)
        adapt(layer, module).add_adapter(names, adapter, own)
    return module
