"""How chains name the modules of their layers before torch is imported."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from megatron_pulse.backbone.chain import Layer, TensorSpec
from megatron_pulse.backbone.context import LayerContext
from model_specs.common.options import FamilyConfig


def builder(modules: str, config: FamilyConfig) -> Callable[..., Callable[[LayerContext], Any]]:
    """``build`` of layers: ``build(kind, **arguments)`` is a ``Layer.build``.

    It calls ``kind``, a class or function of the Python module ``modules``, as
    ``kind(config, context, **arguments)``; only then is that imported, and torch with it.
    """

    def build(kind: str, **arguments: Any) -> Callable[[LayerContext], Any]:
        return functools.partial(_make, modules, config, kind, arguments)

    return build


def _make(
    modules: str,
    config: FamilyConfig,
    kind: str,
    arguments: Mapping[str, Any],
    context: LayerContext,
) -> Any:
    return getattr(importlib.import_module(modules), kind)(config, context, **arguments)


def embedder(
    name: str,
    build: Callable[[LayerContext], Any],
    carried: TensorSpec,
    provides: Mapping[str, TensorSpec],
    uses: tuple[str, ...],
) -> Layer:
    """A layer that computes ``provides`` of ``uses`` from the batch, and hands ``carried`` on."""
    return Layer(name, build, (carried,), (carried,), provides=provides, uses=uses, embedder=True)
