"""References to layer modules by name, resolved when a layer builds, to defer importing torch."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from megatron_pulse.backbone.build_context import LayerContext
from megatron_pulse.backbone.chain import Layer, TensorSpec
from model_specs.common.options import FamilyConfig


def builder(modules: str, config: FamilyConfig) -> Callable[..., Callable[[LayerContext], Any]]:
    """Factory of ``Layer.build`` functions: ``build(kind, **arguments)``.

    The result calls ``kind``, a class or function of the Python module ``modules``, as
    ``kind(config, context, **arguments)``. The module, and torch with it, is imported only at that
    call.
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
    """Layer that computes ``provides`` from the batch fields ``uses`` and passes ``carried`` on."""
    return Layer(name, build, (carried,), (carried,), provides=provides, uses=uses, embedder=True)
