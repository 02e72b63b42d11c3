"""Backbones with an adapter: all weights frozen, and trained factors beside the targeted ones."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch

from megatron_pulse.adapters.choice import Adapter
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


def with_adapter(backbone: Backbone, adapter: Adapter) -> Backbone:
    """``backbone`` with frozen weights, and with the adapter's factors beside them.

    Names of the weights do not change. The record contains the adapter. Raises Faults for targets
    without a match.
    """
    every = _adaptable_layers(backbone)
    targeted = [tuple(filter(adapter.matches, names)) for names in every]
    adapter.require_matches([name for names in every for name in names])
    layers = tuple(
        dataclasses.replace(
            layer, build=functools.partial(_build, layer.build, names, adapter), trained=bool(names)
        )
        for layer, names in zip(backbone.layers, targeted, strict=True)
    )
    record = {**backbone.record, "adapter": adapter.to_record()} if backbone.record else {}
    return dataclasses.replace(backbone, layers=layers, record=record)


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
    build: Callable[[Any], Any], layers: Collection[str], adapter: Adapter, context: Any
) -> Any:
    module = build(context)
    module.requires_grad_(False)
    if layers:
        module.add_adapter(layers, adapter.rank, adapter.scale)
    return module
