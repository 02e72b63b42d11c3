"""A chain of layers that take and return one tensor, as a backbone. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec
from megatron_pulse.backbone.check import require_valid


def chain(
    layers: Sequence[Callable[[], Any]],
    spec: TensorSpec,
    skips: Sequence[tuple[int, int]] = (),
    name: str = "chain",
) -> Backbone:
    """A backbone of torch modules, each of them made by calling one of ``layers``.

    A module is called with the output of the one before it and, for every (source, destination)
    of ``skips`` that ends at it, the output of layer ``source``, in order of sources; it returns
    one tensor. All these are of ``spec``. Parameters are named ``layers.<index>.<own name>``.
    Backbones of several or unequal tensors, or with conditioning, are made of ``Layer``.
    Raises BackboneError that lists every fault.
    """
    backbone = Backbone(
        name,
        tuple(
            Layer(
                name=f"layers.{i}",
                build=_builder(make),
                inputs=(spec,),
                outputs=(spec,),
                pushes={f"{a} to {b}": 0 for a, b in sorted(skips) if a == i},
                pops={f"{a} to {b}": spec for a, b in sorted(skips) if b == i},
            )
            for i, make in enumerate(layers)
        ),
    )
    require_valid(backbone)
    return backbone


def _builder(make: Callable[[], Any]) -> Callable[[Any], Any]:
    def build(context: Any) -> Any:
        module = make()
        module.register_forward_pre_hook(_as_plain)
        module.register_forward_hook(_as_layer)
        return module

    return build


def _as_plain(module: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a layer of a chain is called with, as a plain module takes it."""
    inputs, skips, _ = given
    return (*inputs, *skips.values())


def _as_layer(module: Any, given: tuple[Any, ...], result: Any) -> tuple[Any, ...]:
    """What a plain module returns, as a layer of a chain does."""
    return (result,)
