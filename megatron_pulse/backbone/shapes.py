"""Microbatches of several shapes: one chain, one set of weights, a shape for each microbatch.

Users train with aspect-ratio buckets: every microbatch has one of a few heights and widths,
numbers of frames, lengths of texts. Layers, skips and weights are the same at each; every tensor
has a shape for each (``TensorSpec.others``), so that what travels follows from which one a
microbatch has, and that from the shapes of its fields.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec


class Sized(Protocol):
    """A tensor, of which only the shape counts here; one on the meta device will do."""

    @property
    def shape(self) -> tuple[int, ...]:
        """With the batch dimension."""
        ...


class ShapeError(ValueError):
    """A microbatch of a shape that the chain does not have."""


def fields_of(backbone: Backbone) -> dict[str, TensorSpec]:
    """What a microbatch holds for each chain: ``noisy``, and the fields of the batch."""
    samples = {
        sample_field(first): first.inputs[0]
        for first in map(backbone.layers.__getitem__, backbone.starts)
    }
    return {**samples, **backbone.batch_fields}


def sample_field(layer: Layer) -> str:
    """What a microbatch calls the noisy sample of a layer's chain."""
    return f"{layer.chain}.noisy" if layer.chain else "noisy"


def own_fields(backbone: Backbone, chain: str, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """A microbatch as a chain alone has it: of a cascade its own fields, by its own names."""
    if not backbone.parts:
        return batch
    prefix = f"{chain}."
    return {name[len(prefix) :]: v for name, v in batch.items() if name.startswith(prefix)}


def shape_of(backbone: Backbone, batch: Mapping[str, Any]) -> int:
    """Which of the chain's shapes a microbatch has, by those of its fields that it holds.

    No values are read. Raises ShapeError, with what the chain takes, where it is none of them.
    """
    if backbone.num_shapes == 1:
        return 0
    fields = {name: spec for name, spec in fields_of(backbone).items() if name in batch}
    fitting = [
        which
        for which in range(backbone.num_shapes)
        if all(_without_batch(batch[name], s) == s.at(which).shape for name, s in fields.items())
    ]
    if len(fitting) == 1:
        return fitting[0]
    sizes = {name: _shown(_without_batch(batch[name], s)) for name, s in fields.items()}
    found = ", ".join(f"{name} {size}" for name, size in sizes.items()) or "no known field"
    said = "is none that" if not fitting else "could be several that"
    taken = "; ".join(_differing(fields, which) for which in range(backbone.num_shapes))
    raise ShapeError(f"a microbatch of {found} {said} {backbone.name} takes: {taken}")


def _without_batch(tensor: Sized, spec: TensorSpec) -> tuple[int, ...]:
    shape, dim = tuple(tensor.shape), spec.batch_dim
    return shape if dim is None else shape[:dim] + shape[dim + 1 :]


def _shown(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "one number"


def _differing(fields: Mapping[str, TensorSpec], which: int) -> str:
    """The shapes of those fields that have several."""
    some = {name: spec for name, spec in fields.items() if len({spec.shape, *spec.others}) > 1}
    return ", ".join(f"{name} {_shown(spec.at(which).shape)}" for name, spec in some.items())


def at_shape(backbone: Backbone, which: int) -> Backbone:
    """The same chain for microbatches of the shape ``which`` alone."""
    if backbone.num_shapes == 1:
        return backbone
    layers = tuple(
        replace(
            layer,
            build=functools.partial(_build_at, layer.build, which),
            inputs=tuple(spec.at(which) for spec in layer.inputs),
            outputs=tuple(spec.at(which) for spec in layer.outputs),
            pops={name: spec.at(which) for name, spec in layer.pops.items()},
            provides={name: spec.at(which) for name, spec in layer.provides.items()},
        )
        for layer in backbone.layers
    )
    fields = {name: spec.at(which) for name, spec in backbone.batch_fields.items()}
    return replace(backbone, layers=layers, batch_fields=fields, shares=())


def _build_at(build: Callable[[Any], Any], which: int, context: Any) -> Any:
    module = build(context)
    tell_shape(module, which)
    return module


def tell_shape(module: Any, which: int) -> None:
    """Tell a layer's module which shape it is called with next, if that makes a difference."""
    if hasattr(module, "chain_shape"):
        module.chain_shape = which


def shares_of(backbone: Backbone) -> tuple[float, ...]:
    """Which part of all microbatches is of which shape; together 1."""
    shares = backbone.shares or (1.0,) * backbone.num_shapes
    return tuple(share / sum(shares) for share in shares)


def shape_faults(backbone: Backbone) -> Iterator[str]:
    """Tensors of more or fewer shapes than the sample, and shapes that no batch could tell apart.

    Assumes a chain whose specs are sound one by one.
    """
    count, shares = backbone.num_shapes, backbone.shares
    specs = [(f"batch field {name}", spec) for name, spec in backbone.batch_fields.items()]
    for layer in backbone.layers:
        named = (*enumerate(layer.outputs), *layer.pops.items(), *layer.provides.items())
        specs += [(f"{layer.name}: {name}", spec) for name, spec in named]
    wrong = [
        f"{where}: has {1 + len(spec.others)} shapes, the sample has {count}: say one for each"
        for where, spec in specs
        if 1 + len(spec.others) != count
    ]
    yield from wrong
    if not wrong:
        fields, seen = fields_of(backbone), dict[tuple[tuple[int, ...], ...], int]()
        for which in range(count):
            key = tuple(spec.at(which).shape for spec in fields.values())
            if (same := seen.setdefault(key, which)) != which:
                yield (
                    f"shapes {same} and {which}: a batch could not say which it is of: sample and "
                    "fields are of the same sizes"
                )
    if shares and (len(shares) != count or not all(0 < s < math.inf for s in shares)):
        yield f"shares: must be {count} numbers above 0, one for each shape, are {shares}"
