"""Microbatches of several shapes: one chain and one set of weights, a shape per microbatch.

Training with aspect-ratio buckets uses microbatches of several heights and widths, frame counts or
text lengths. Layers, skips and weights are the same for all. Every tensor has one shape per bucket
(``TensorSpec.others``). Message shapes follow from the microbatch's shape index, which follows from
the shapes of its fields.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec

PATCH_CORNER = "patch_corner"
"""Batch field of patch-wise training: the patch's top and left in the whole sample, int64 ``[2]``.
Shape 0 of such a chain is the whole sample."""


class HasShape(Protocol):
    """Object with a shape, such as a tensor, also on the meta device."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape including the batch dimension."""
        ...


class ShapeError(ValueError):
    """Microbatch of a shape that the chain does not have."""


def fields_of(backbone: Backbone) -> dict[str, TensorSpec]:
    """Fields of a microbatch: ``noisy`` for each chain, and the batch fields."""
    samples = {
        sample_field(first): first.inputs[0]
        for first in map(backbone.layers.__getitem__, backbone.starts)
    }
    return {**samples, **backbone.batch_fields}


def sample_field(layer: Layer) -> str:
    """Batch field of the noisy sample of a layer's chain."""
    return f"{layer.chain}.noisy" if layer.chain else "noisy"


def own_fields(backbone: Backbone, chain: str, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Microbatch of one chain; for a cascade, the chain's own fields without its prefix."""
    if not backbone.parts:
        return batch
    prefix = f"{chain}."
    return {name[len(prefix) :]: v for name, v in batch.items() if name.startswith(prefix)}


def shape_of(backbone: Backbone, batch: Mapping[str, Any]) -> int:
    """Index of a microbatch's shape among the chain's shapes, from the fields present.

    No values are read. Raises ShapeError listing the chain's shapes if none or several match.
    """
    if backbone.num_shapes == 1:
        return 0
    fields = {name: spec for name, spec in fields_of(backbone).items() if name in batch}
    fitting = [
        shape_index
        for shape_index in range(backbone.num_shapes)
        if all(
            _without_batch(batch[name], s) == s.at(shape_index).shape for name, s in fields.items()
        )
    ]
    if len(fitting) == 1:
        return fitting[0]
    sizes = {name: _shown(_without_batch(batch[name], s)) for name, s in fields.items()}
    found = ", ".join(f"{name} {size}" for name, size in sizes.items()) or "no known batch field"
    said = "matches no shape that" if not fitting else "matches several shapes that"
    taken = "; ".join(_differing(fields, shape_index) for shape_index in range(backbone.num_shapes))
    raise ShapeError(f"a microbatch of {found} {said} {backbone.name} takes: {taken}")


def _without_batch(tensor: HasShape, spec: TensorSpec) -> tuple[int, ...]:
    shape, dim = tuple(tensor.shape), spec.batch_dim
    return shape if dim is None else shape[:dim] + shape[dim + 1 :]


def _shown(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "one number"


def _differing(fields: Mapping[str, TensorSpec], shape_index: int) -> str:
    """Text with the shapes of those fields that have several."""
    some = {name: spec for name, spec in fields.items() if len({spec.shape, *spec.others}) > 1}
    return ", ".join(f"{name} {_shown(spec.at(shape_index).shape)}" for name, spec in some.items())


def at_shape(backbone: Backbone, shape_index: int) -> Backbone:
    """Chain for microbatches of the shape ``shape_index`` alone."""
    if backbone.num_shapes == 1:
        return backbone
    layers = tuple(
        replace(
            layer,
            build=functools.partial(_build_at, layer.build, shape_index),
            inputs=tuple(spec.at(shape_index) for spec in layer.inputs),
            outputs=tuple(spec.at(shape_index) for spec in layer.outputs),
            pops={name: spec.at(shape_index) for name, spec in layer.pops.items()},
            provides={name: spec.at(shape_index) for name, spec in layer.provides.items()},
        )
        for layer in backbone.layers
    )
    fields = {name: spec.at(shape_index) for name, spec in backbone.batch_fields.items()}
    return replace(backbone, layers=layers, batch_fields=fields, shares=())


def join_shapes(chains: Sequence[Backbone]) -> Backbone:
    """Chain of several shapes, from the same chain at each of them; the inverse of ``at_shape``."""
    first = chains[0]
    if len(chains) == 1:
        return first

    def join(*specs: TensorSpec) -> TensorSpec:
        return replace(specs[0], others=tuple(spec.shape for spec in specs[1:]))

    def join_all(*every: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        return tuple(join(*specs) for specs in zip(*every, strict=True))

    def join_named(*every: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        return {name: join(*(specs[name] for specs in every)) for name in every[0]}

    layers = tuple(
        replace(
            same[0],
            inputs=join_all(*(layer.inputs for layer in same)),
            outputs=join_all(*(layer.outputs for layer in same)),
            pops=join_named(*(layer.pops for layer in same)),
            provides=join_named(*(layer.provides for layer in same)),
        )
        for same in zip(*(chain.layers for chain in chains), strict=True)
    )
    fields = join_named(*(chain.batch_fields for chain in chains))
    return replace(first, layers=layers, batch_fields=fields)


def _build_at(build: Callable[[Any], Any], shape_index: int, context: Any) -> Any:
    module = build(context)
    set_shape_index(module, shape_index)
    return module


def set_shape_index(module: Any, shape_index: int) -> None:
    """Set the module's ``chain_shape`` for its next call, if the attribute exists."""
    if hasattr(module, "chain_shape"):
        module.chain_shape = shape_index


def shares_of(backbone: Backbone) -> tuple[float, ...]:
    """Fraction of all microbatches of each shape; the sum is 1."""
    shares = backbone.shares or (1.0,) * backbone.num_shapes
    return tuple(share / sum(shares) for share in shares)


def shape_names(backbone: Backbone) -> list[str]:
    """Names of the chain's shapes, those of the sample, as in 4x64x96; all are different."""
    names = [
        "x".join(map(str, backbone.sample_spec.at(shape_index).shape))
        for shape_index in range(backbone.num_shapes)
    ]
    return [f"{name}, {i}" if names.count(name) > 1 else name for i, name in enumerate(names)]


def shape_faults(backbone: Backbone) -> Iterator[str]:
    """Tensors without one shape per sample shape, and shapes that no batch can tell apart.

    Assumes that each spec is valid on its own.
    """
    count, shares = backbone.num_shapes, backbone.shares
    specs = [(f"batch field {name}", spec) for name, spec in backbone.batch_fields.items()]
    for layer in backbone.layers:
        named = (*enumerate(layer.outputs), *layer.pops.items(), *layer.provides.items())
        specs += [(f"{layer.name}: {name}", spec) for name, spec in named]
    wrong = [
        f"{where}: has {1 + len(spec.others)} shapes, but the sample has {count}: give one for each"
        for where, spec in specs
        if 1 + len(spec.others) != count
    ]
    yield from wrong
    if not wrong:
        fields, seen = fields_of(backbone), dict[tuple[tuple[int, ...], ...], int]()
        for shape_index in range(count):
            key = tuple(spec.at(shape_index).shape for spec in fields.values())
            if (same := seen.setdefault(key, shape_index)) != shape_index:
                yield (
                    f"shapes {same} and {shape_index}: samples and batch fields have equal sizes, "
                    "so batches could not be told apart"
                )
    if shares and (len(shares) != count or not all(0 < s < math.inf for s in shares)):
        yield f"shares: must be {count} numbers above 0, one for each shape, are {shares}"
