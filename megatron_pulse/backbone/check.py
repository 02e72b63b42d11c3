"""Validation of a backbone before planning or building; lists every fault at once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise

from megatron_pulse.backbone.chain import COMPUTE, DTYPE_BYTES, Backbone, Layer, TensorSpec
from megatron_pulse.backbone.shape_buckets import shape_faults
from megatron_pulse.errors import PicklableError, format_faults

_LAYER_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*", re.ASCII)

_MOST_VALUES = 2**38
"""Maximum number of elements of one tensor of one sample: a terabyte in fp32."""
_DTYPES = (COMPUTE, *DTYPE_BYTES)


class BackboneError(PicklableError, ValueError):
    """A backbone that cannot be run; ``faults`` lists the reasons."""

    def __init__(self, backbone: str, faults: list[str]) -> None:
        self.faults = faults
        super().__init__(format_faults(f"backbone {backbone!r} is invalid", faults))


def require_valid(backbone: Backbone) -> None:
    """Raise BackboneError listing all faults that ``check_backbone`` finds."""
    if faults := check_backbone(backbone):
        raise BackboneError(backbone.name, faults)


def check_backbone(backbone: Backbone) -> list[str]:
    """All faults of the chain's names, boundaries, skips and conditioning; empty if valid."""
    if faults := list(_forms(backbone)):
        return faults
    if not backbone.layers:
        return ["the chain is empty; a backbone needs at least one layer"]
    tensors = list(_tensors(backbone))
    return [
        *_names(backbone.layers),
        *tensors,
        *([] if tensors else shape_faults(backbone)),
        *_boundaries(backbone),
        *_beside(backbone.layers),
        *_attends(backbone.layers),
        *_skips(backbone.layers),
        *_conditioning(backbone),
        *_embedders(backbone),
        *_said(backbone),
    ]


def _forms(backbone: Backbone) -> Iterator[str]:
    """Faults of field types, which prevent all further checks."""
    if not isinstance(backbone.layers, tuple):
        yield f"layers: must be a tuple of Layer, is {_kind(backbone.layers)}"
        return
    yield from _spec_map("batch_fields", backbone.batch_fields)
    for name, least in (("num_classes", 1), ("null_label", 0), ("patch_size", 1)):
        value = getattr(backbone, name)
        if value is None and name != "patch_size":
            continue
        if type(value) is not int or value < least:
            yield f"{name}: must be a whole number from {least} on, is {value!r}"
    heads = backbone.num_heads
    if not isinstance(heads, tuple) or not all(type(n) is int and n > 0 for n in heads):
        yield f"num_heads: must be a tuple of whole numbers from 1 on, is {heads!r}"
    for i, layer in enumerate(backbone.layers):
        if not isinstance(layer, Layer):
            yield f"layer {i}: must be a Layer, is {_kind(layer)}"
            continue
        where = f"layer {i} ({layer.name})"
        if not isinstance(layer.name, str):
            yield f"{where}: its name must be text"
        if layer.build is not None and not callable(layer.build):  # planning needs no build
            yield (
                f"{where}: build must be a function that makes the module, is {_kind(layer.build)}"
            )
        for side in ("inputs", "outputs"):
            specs = getattr(layer, side)
            if not isinstance(specs, tuple) or not all(isinstance(s, TensorSpec) for s in specs):
                yield f"{where}: {side} must be a tuple of TensorSpec, is {_kind(specs)}"
        if not isinstance(layer.uses, tuple) or not all(isinstance(n, str) for n in layer.uses):
            yield f"{where}: uses must be a tuple of names, is {_kind(layer.uses)}"
        for maps in ("pops", "provides"):
            yield from _spec_map(f"{where}: {maps}", getattr(layer, maps))
        pushes = layer.pushes
        if not isinstance(pushes, Mapping) or not all(type(n) is int for n in pushes.values()):
            yield f"{where}: pushes must map names to the numbers of outputs, is {_kind(pushes)}"
        beside = layer.beside
        if not isinstance(beside, Mapping) or not all(
            type(n) is int for n in (*beside, *beside.values())
        ):
            yield f"{where}: beside must map output numbers to input numbers"


def _spec_map(where: str, specs: object) -> Iterator[str]:
    if not isinstance(specs, Mapping):
        yield f"{where}: must map names to TensorSpec, is {_kind(specs)}"
        return
    for name, spec in specs.items():
        if not isinstance(name, str) or not isinstance(spec, TensorSpec):
            yield f"{where}: {name!r} must be a TensorSpec, is {_kind(spec)}"


def _kind(value: object) -> str:
    if isinstance(value, str):
        return f"the text {value!r}"
    if isinstance(value, tuple) and value:
        return f"a tuple of {', '.join(sorted({type(item).__name__ for item in value}))}"
    return f"of type {type(value).__name__}"


def _names(layers: tuple[Layer, ...]) -> Iterator[str]:
    first: dict[str, int] = {}
    for i, layer in enumerate(layers):
        if not _LAYER_NAME.fullmatch(layer.name):
            yield (
                f"layer {i}: {layer.name!r} cannot prefix parameter names; use letters, digits, "
                "underscores and single dots, as in 'down_blocks.0.resnets.0'"
            )
        if layer.name in first:
            yield f"layer {i}: layer {first[layer.name]} is already called {layer.name!r}"
        else:
            first[layer.name] = i
    first = {name: i for name, i in first.items() if not layers[i].qualified}
    for name, i in first.items():
        parts = name.split(".")
        for cut in range(1, len(parts)):
            outer = ".".join(parts[:cut])
            if outer in first:
                yield (
                    f"layer {i}: {name!r} lies inside layer {first[outer]} ({outer!r}), so "
                    "parameter names could collide"
                )


def _describe(spec: TensorSpec) -> str:
    dims = [str(d) for d in spec.shape]
    if spec.batch_dim is not None:
        dims.insert(spec.batch_dim, "b")
    others = f" (others {spec.others})" if spec.others else ""
    return f"{spec.dtype}[{', '.join(dims)}]{others}"


def _tensors(backbone: Backbone) -> Iterator[str]:
    """Invalid tensor specs, and chain ends that are not a single tensor."""
    for i in backbone.starts:
        if (count := len(backbone.layers[i].inputs)) != 1:
            yield (
                f"layer {i} ({backbone.layers[i].name}): takes {count} boundary tensors; the first "
                "layer takes exactly one, the noisy sample"
            )
    for i in backbone.ends:
        if (count := len(backbone.layers[i].outputs)) != 1:
            yield (
                f"layer {i} ({backbone.layers[i].name}): returns {count} boundary tensors; the "
                "last layer returns exactly one, the prediction"
            )
    specs = [("batch field", name, spec) for name, spec in backbone.batch_fields.items()]
    for layer in backbone.layers:
        specs += [(f"{layer.name}: input", str(i), spec) for i, spec in enumerate(layer.inputs)]
        specs += [(f"{layer.name}: output", str(i), spec) for i, spec in enumerate(layer.outputs)]
        specs += [(f"{layer.name}: popped skip", name, spec) for name, spec in layer.pops.items()]
        specs += [(f"{layer.name}: provided", name, spec) for name, spec in layer.provides.items()]
    for where, name, spec in specs:
        yield from spec_faults(f"{where} {name}", spec)


def spec_faults(where: str, spec: TensorSpec) -> Iterator[str]:
    """Reasons why ``spec`` describes no tensor."""
    if not isinstance(spec.shape, tuple) or not all(type(d) is int for d in spec.shape):
        yield f"{where}: the shape must be a tuple of whole numbers, is {spec.shape!r}"
        return
    if spec.dtype not in _DTYPES:
        yield f"{where}: the dtype {spec.dtype!r} is none of {', '.join(_DTYPES)}"
    if not isinstance(spec.others, tuple):
        yield f"{where}: others must be a tuple of shapes, is {spec.others!r}"
        return
    if any(d < 1 for d in spec.shape):
        yield f"{where}: the shape {spec.shape} has a dimension below 1"
    elif spec.others:
        for shape_index in range(1, 1 + len(spec.others)):
            yield from spec_faults(f"{where}, shape {shape_index}", spec.at(shape_index))
    elif spec.numel_per_sample > _MOST_VALUES:
        yield (
            f"{where}: the shape {spec.shape} has {spec.numel_per_sample:,} values for "
            f"each sample, {4 * spec.numel_per_sample / 1e12:,.1f} TB"
        )
    if spec.batch_dim is not None and not 0 <= spec.batch_dim <= len(spec.shape):
        yield f"{where}: batch_dim {spec.batch_dim} is outside the shape {spec.shape}"


def _boundaries(backbone: Backbone) -> Iterator[str]:
    for i, (before, after) in enumerate(pairwise(backbone.layers)):
        if i in backbone.ends:
            continue
        where = f"boundary {i}|{i + 1} ({before.name} -> {after.name})"
        if len(before.outputs) != len(after.inputs):
            yield f"{where}: {len(before.outputs)} tensors leave, {len(after.inputs)} are expected"
            continue
        for k, (out, into) in enumerate(zip(before.outputs, after.inputs, strict=True)):
            if out != into:
                yield f"{where}: tensor {k} is {_describe(out)}, expected {_describe(into)}"


def _beside(layers: tuple[Layer, ...]) -> Iterator[str]:
    for i, layer in enumerate(layers):
        where = f"layer {i} ({layer.name})"
        for out, into in layer.beside.items():
            if not (0 <= out < len(layer.outputs) and 0 <= into < len(layer.inputs)):
                yield (
                    f"{where}: output {out} passes by as input {into}, but the layer has "
                    f"{len(layer.outputs)} outputs and {len(layer.inputs)} inputs"
                )
            elif layer.outputs[out] != layer.inputs[into]:
                yield (
                    f"{where}: input {into} passes by as {_describe(layer.inputs[into])}, output "
                    f"{out} is {_describe(layer.outputs[out])}"
                )


def _attends(layers: tuple[Layer, ...]) -> Iterator[str]:
    for i, layer in enumerate(layers):
        sequences = {j for j, spec in enumerate(layer.inputs) if spec.sequence}
        for index in sorted({j for group in layer.attends for j in group} - sequences):
            yield f"layer {i} ({layer.name}): attends to input {index}, which is no sequence"


def _skips(layers: tuple[Layer, ...]) -> Iterator[str]:
    where = _places(layers)
    pushed: dict[str, int] = {}
    popped: dict[str, int] = {}
    for i, layer in enumerate(layers):
        for name, index in layer.pushes.items():
            yield from _again(f"skip {name!r}: pushed", name, i, pushed, where)
            if not 0 <= index < len(layer.outputs):
                yield (
                    f"skip {name!r}: {where[i]} pushes output {index}, but has "
                    f"{len(layer.outputs)} boundary output(s)"
                )
        for name in layer.pops:
            yield from _again(f"skip {name!r}: popped", name, i, popped, where)
    for name, i in pushed.items():
        if name not in popped:
            yield f"skip {name!r}: pushed by {where[i]} but never popped"
    for name, j in popped.items():
        if name not in pushed:
            yield f"skip {name!r}: popped by {where[j]} but never pushed"
            continue
        i = pushed[name]
        if j <= i:
            yield (
                f"skip {name!r}: popped by {where[j]}, which is not after {where[i]}, where it is "
                "pushed"
            )
        index = layers[i].pushes[name]
        if 0 <= index < len(layers[i].outputs):
            source, expected = layers[i].outputs[index], layers[j].pops[name]
            if source != expected:
                yield (
                    f"skip {name!r}: {where[i]} pushes {_describe(source)}, {where[j]} expects "
                    f"{_describe(expected)}"
                )


def _places(layers: tuple[Layer, ...]) -> list[str]:
    return [f"layer {i} ({layer.name})" for i, layer in enumerate(layers)]


def _again(what: str, name: str, i: int, first: dict[str, int], where: list[str]) -> Iterator[str]:
    """Register layer ``i`` as the first with ``name``; yield a fault if another came before."""
    if name in first:
        yield f"{what} by both {where[first[name]]} and {where[i]}"
    first.setdefault(name, i)


def _conditioning(backbone: Backbone) -> Iterator[str]:
    layers, where = backbone.layers, _places(backbone.layers)
    provided: dict[str, int] = {}
    for i, layer in enumerate(layers):
        for name in layer.provides:
            if name in backbone.batch_fields:
                yield (
                    f"conditioning {name!r}: provided by {where[i]}, but also a batch field; "
                    "rename one"
                )
            yield from _again(f"conditioning {name!r}: provided", name, i, provided, where)
    used = {name for layer in layers for name in layer.uses}
    for name, i in provided.items():
        if name not in used:
            yield f"conditioning {name!r}: provided by {where[i]} but never used"
    for i, layer in enumerate(layers):
        for name in layer.uses:
            if name in backbone.batch_fields:
                continue
            if name not in provided:
                yield (
                    f"conditioning {name!r}: used by {where[i]}, but neither a batch field nor "
                    "provided by an earlier layer"
                )
            elif provided[name] >= i:
                yield (
                    f"conditioning {name!r}: used by {where[i]} before {where[provided[name]]} "
                    "provides it"
                )


def _embedders(backbone: Backbone) -> Iterator[str]:
    for i, layer in enumerate(backbone.layers):
        if not layer.embedder:
            continue
        where = f"embedder {i} ({layer.name})"
        if not layer.provides:
            yield f"{where}: provides nothing"
        if layer.inputs != layer.outputs or layer.pushes or layer.pops:
            yield f"{where}: must return its inputs unchanged, and have no skips"
        if foreign := [name for name in layer.uses if name not in backbone.batch_fields]:
            yield f"{where}: uses {', '.join(foreign)}; an embedder reads only batch fields"


def _said(backbone: Backbone) -> Iterator[str]:
    """Faults of the backbone's declared classes, null label and patch size."""
    classes, null, patch = backbone.num_classes, backbone.null_label, backbone.patch_size
    if "labels" in backbone.batch_fields and classes is None:
        yield (
            "batch field 'labels': the number of classes is missing. Give Backbone or from_module "
            "num_classes=N, and null_label=N if label N means no class"
        )
    if classes is not None and "labels" not in backbone.batch_fields:
        yield (
            f"num_classes: is {classes}, but no batch field is called 'labels'. Rename the field: "
            "from_module(..., fields={'its name': 'labels'})"
        )
    if null is not None and (classes is None or null < classes):
        count = f"one of the {classes} classes" if classes else "of no classes (num_classes)"
        yield f"null_label: label {null} is {count}; it must be outside the classes"
    shape = backbone.input_spec.shape if backbone.layers[0].inputs else ()
    if (
        isinstance(shape, tuple)
        and len(shape) == 3
        and any(type(side) is int and side % patch for side in shape[1:])
    ):
        yield f"patch_size: {patch} does not divide the sample's {shape[1]} x {shape[2]}"
