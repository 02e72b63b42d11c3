"""Backbones from layers that take and return one tensor. Imports no torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec
from megatron_pulse.backbone.check import BackboneError, require_valid, spec_faults


def chain(
    layers: Sequence[Callable[[], Any]],
    spec: TensorSpec,
    skips: Sequence[tuple[int, int]] = (),
    name: str = "chain",
) -> Backbone:
    """Backbone of torch modules, each made by calling an element of ``layers``.

    A module is called with the previous module's output, followed by the outputs of its skips'
    sources in ascending order. ``skips`` are pairs (source, destination) of layer indices. Each
    module returns one tensor. All tensors have ``spec``; otherwise the step fails naming the layer.
    Parameters are named ``layers.<index>.<own name>``.

    Backbones of several or unequal tensors, or with conditioning, need ``Layer``. Raises
    BackboneError listing every fault.
    """
    if faults := list(_faults(layers, spec, skips)):
        raise BackboneError(name, faults)
    backbone = Backbone(
        name,
        tuple(
            Layer(
                name=f"layers.{i}",
                build=_builder(make, f"layers.{i}", sum(b == i for _, b in skips)),
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


def _faults(layers: object, spec: object, skips: object) -> Iterator[str]:
    """Faults of the arguments of ``chain``."""
    if not isinstance(spec, TensorSpec):
        yield f"spec must be a TensorSpec, is {spec!r:.60}: use TensorSpec({spec!r:.40})"
    else:
        yield from spec_faults("spec", spec)
    if not isinstance(layers, Sequence) or isinstance(layers, str):
        yield f"layers must be a list of classes or functions, is of type {type(layers).__name__}"
        return
    for i, make in enumerate(layers):
        if hasattr(make, "named_parameters") and not isinstance(make, type):
            yield (
                f"layer {i} is a module ({type(make).__name__}). Give its class, or a function "
                "that returns a new module each time"
            )
        elif not callable(make):
            yield f"layer {i} must be a class or function that makes a module, is {make!r:.60}"
    if not isinstance(skips, Sequence) or isinstance(skips, str):
        yield f"skips must be a list of (source, destination), is of type {type(skips).__name__}"
        return
    seen: set[tuple[int, int]] = set()
    there = f"layers are 0 to {len(layers) - 1}"
    for i, skip in enumerate(skips):
        if not (isinstance(skip, tuple | list) and [type(end) for end in skip] == [int, int]):
            yield f"skip {i} must be two layer numbers, is {skip!r:.60}"
            continue
        source, destination = skip
        if missing := [end for end in skip if not 0 <= end < len(layers)]:
            yield f"skip {source} to {destination}: {there}, no {' or '.join(map(str, missing))}"
        elif destination <= source:
            yield f"skip {source} to {destination}: the destination must be after the source"
        if (source, destination) in seen:
            yield f"skip {source} to {destination} is given twice"
        seen.add((source, destination))


def _builder(make: Callable[[], Any], name: str, num_skips: int) -> Callable[[Any], Any]:
    def as_layer(module: Any, given: tuple[Any, ...], result: Any) -> tuple[Any, ...]:
        """Check a plain module's result and wrap it in a tuple."""
        shape = getattr(result, "shape", None)
        if shape != given[0].shape:
            found = type(result).__name__ if shape is None else f"a tensor of {tuple(shape)}"
            raise ValueError(
                f"{name} returned {found}; given one of {tuple(given[0].shape)} it must return "
                "one of the same shape. For layers of different shapes, use megatron_pulse.Layer"
            )
        return (result,)

    def build(context: Any) -> Any:
        module = make()
        if not hasattr(module, "register_forward_hook"):
            raise TypeError(
                f"{name}: its class or function returned {type(module).__name__} instead of a "
                "torch module"
            )
        _require_call(name, module, num_skips)
        if (
            _as_plain not in module._forward_pre_hooks.values()
        ):  # a factory may return the same module again
            module.register_forward_pre_hook(
                _as_plain, prepend=True
            )  # before hooks of the module's own
            module.register_forward_hook(as_layer)
        return module

    return build


def _require_call(name: str, module: Any, num_skips: int) -> None:
    """Raise TypeError unless the module accepts its input and ``num_skips`` skips."""
    try:
        inspect.signature(module.forward).bind(*range(1 + num_skips))
    except TypeError as error:
        raise TypeError(
            f"{name}: {type(module).__name__}.forward is called with the previous layer's output "
            f"and {num_skips} skip(s): {error}"
        ) from None
    except ValueError:  # no Python function
        return


def _as_plain(module: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert arguments of a chain's layer into those of a plain module."""
    inputs, skips, _ = given
    return (*inputs, *skips.values())
