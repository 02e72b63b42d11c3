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
    one tensor. All these are of ``spec``, or the step fails with the layer's name. Parameters are
    named ``layers.<index>.<own name>``.
    Backbones of several or unequal tensors, or with conditioning, are made of ``Layer``.
    Raises BackboneError that lists every fault.
    """
    backbone = Backbone(
        name,
        tuple(
            Layer(
                name=f"layers.{i}",
                build=_builder(make, f"layers.{i}"),
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


def _builder(make: Callable[[], Any], name: str) -> Callable[[Any], Any]:
    def as_layer(module: Any, given: tuple[Any, ...], result: Any) -> tuple[Any, ...]:
        """What a plain module returns, as a layer of a chain does."""
        shape = getattr(result, "shape", None)
        if shape != given[0].shape:
            found = type(result).__name__ if shape is None else f"a tensor of {tuple(shape)}"
            raise ValueError(
                f"{name} returned {found}; given one of {tuple(given[0].shape)} it has to return "
                "another: layers that differ in shapes are made of megatron_pulse.Layer"
            )
        return (result,)

    def build(context: Any) -> Any:
        module = make()
        if not hasattr(module, "register_forward_hook"):
            raise TypeError(f"{name}: its maker returned {type(module).__name__}, no torch module")
        if _as_plain not in module._forward_pre_hooks.values():  # a maker may keep its module
            module.register_forward_pre_hook(_as_plain)
            module.register_forward_hook(as_layer)
        return module

    return build


def _as_plain(module: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a layer of a chain is called with, as a plain module takes it."""
    inputs, skips, _ = given
    return (*inputs, *skips.values())
