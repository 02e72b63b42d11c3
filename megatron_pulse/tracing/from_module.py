"""Conversion of any torch module, unmodified, into a backbone."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from megatron_pulse.backbone.build_context import LayerContext
from megatron_pulse.backbone.chain import COMPUTE, DTYPE_BYTES, Backbone, Layer, TensorSpec
from megatron_pulse.backbone.check import require_valid
from megatron_pulse.tracing.chains import Chains
from megatron_pulse.tracing.checks.module_state import complex_parameters, lazy_modules
from megatron_pulse.tracing.derived_layer import ChainSource, DerivedLayer, Sample
from megatron_pulse.tracing.initial_weights.sources import (
    Weights,
    from_module_itself,
    other_names,
)
from megatron_pulse.tracing.input_roles import Make, read_inputs, read_others
from megatron_pulse.tracing.quantized_graph import Quantization, weights_of_blocks
from megatron_pulse.tracing.self_check import compare_with_module
from megatron_pulse.tracing.torch_export import DerivationError
from megatron_pulse.tracing.units import UnitChain, detached_values, work_of

_NO_FIELDS: Mapping[str, str] = MappingProxyType({})


def from_module(
    module: nn.Module,
    inputs: Mapping[str, Any] | Make,
    *,
    other_inputs: Sequence[Mapping[str, Any] | Make] = (),
    shares: Sequence[float] = (),
    sample: str | None = None,
    timestep: str | None = None,
    timestep_scale: float = 1.0,
    constants: Collection[str] = (),
    fields: Mapping[str, str] = _NO_FIELDS,
    output: int | None = None,
    granularity: Literal["blocks", "pieces"] = "pieces",
    num_classes: int | None = None,
    null_label: int | None = None,
    patch_size: int = 1,
    weights: Weights | None = None,
) -> Backbone:
    """Chain of ``module``, with its skips, conditioning and embedders.

    - ``inputs``: example inputs by name, or a function that creates them for a microbatch size.
    - ``sample``: input name of the noisy sample (batch field ``noisy``). Known for diffusers' and
      transformers' classes, as is ``timestep``.
    - ``timestep``: input name of the times (batch field ``timesteps``, from 0 to 1,000). Times are
      multiplied by ``timestep_scale`` for the module.
    - ``fields``: batch fields of inputs with one row per sample. The default is the input's own
      name, or the path of a nested one: ``added_cond_kwargs_text_embeds``.
    - ``constants``: inputs equal for every batch, in addition to those without a row per sample.
    - ``output``: index of the prediction among several results.
    - ``granularity``: links begin between blocks (members of the module's lists). With "pieces"
      they also begin within blocks, where no more bytes are in use than at a block's ends.
    - ``num_classes`` (if a field is called ``labels``), ``null_label``, ``patch_size``: see
      Backbone.
    - ``other_inputs``: examples of other shapes of microbatches (heights and widths, frames, text
      lengths). Each is exported with the same weights and layers.
    - ``shares``: fraction of microbatches of each shape, beginning with ``inputs`` (empty: equal).
    - ``weights``: initial weights, under the module's own names. The default is copies of the
      module's weights, whatever the seed.

    Parameters without requires_grad, or without a gradient, stay unchanged in training; buffers are
    constants. Graphs have the module's dtype. The module is exported again for microbatches of
    another size than the example's. The chain trains with the module in its mode of now, also if
    the module's mode changes later. A module on the meta device gives a chain for planning, unless
    ``weights`` is given. A small module with values is called twice and compared with its chain.

    Raises DerivationError with every reason, the operation and the source line.
    """
    name = type(module).__name__
    faults = []
    if granularity not in ("blocks", "pieces"):
        faults.append(f"granularity is {granularity!r}, not 'blocks' or 'pieces'")
    faults += [*lazy_modules(module), *complex_parameters(module)]
    dtypes = dict.fromkeys(str(p.dtype)[6:] for p in module.parameters() if p.is_floating_point())
    if len(dtypes) > 1:
        faults.append(
            f"its parameters are {' and '.join(dtypes)}, but a run has one dtype. Call .to(...) "
            "on it"
        )
    if faults:
        raise DerivationError(name, faults)
    read = read_inputs(name, inputs, sample, timestep, constants)
    every = [read, *read_others(name, read, other_inputs, sample, timestep, constants)]
    chains = Chains(module, name, every, output, granularity == "pieces")
    first, probe = chains.first, chains[0, read.size + 1]
    others = [(chains[which, each.size], each.size) for which, each in enumerate(every) if which]
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    used = {n for u in first.units for n in (*u.takes, *u.gives)} | {first.sample}
    samples = {n: _sample_of(name, n, first, probe, read.size) for n in used}
    of_others = [
        {n: _sample_there(name, n, samples[n], chain, size) for n in used} for chain, size in others
    ]
    told = {n: first.inputs.get(n, n) for n in used}
    specs = {n: spec_of(name, told[n], first.values[n], samples[n], dtype) for n in used}
    for (chain, _), there in zip(others, of_others, strict=True):
        for n, spec in specs.items():
            other = spec_of(name, told[n], chain.values[n], there[n], dtype)
            specs[n] = replace(spec, others=(*spec.others, other.shape))
    for n in detached_values(first):
        specs[n] = replace(specs[n], detached=specs[n].differentiable)
    taken = {n for u in first.units for n in u.takes} - {n for u in first.units for n in u.gives}
    called = {n: first.inputs[n] for n in sorted(taken - {first.sample})}
    field_of = {
        n: "timesteps" if name == read.timestep else fields.get(name, name)
        for n, name in called.items()
    }
    if len({"noisy", *field_of.values()}) != len(field_of) + 1:
        found = ", ".join(field_of.values())
        raise DerivationError(name, [f"two inputs would be the same batch field: noisy, {found}"])
    times = [n for n, name in called.items() if name == read.timestep and timestep_scale != 1]
    scale_of = dict.fromkeys(times, timestep_scale)
    values = weights or from_module_itself(module)
    source = ChainSource(chains, (samples, *of_others), specs, field_of, scale_of, dtype, values)
    backbone = Backbone(
        name,
        tuple(_layers(source, first)),
        {field: specs[n] for n, field in field_of.items()},
        num_classes=num_classes,
        null_label=null_label,
        patch_size=patch_size,
        shares=tuple(shares),
    )
    require_valid(backbone)
    require_equal_results(backbone, module)
    return backbone


def require_equal_results(backbone: Backbone, module: nn.Module) -> None:
    """Compare a derived chain with a small ``module``, on its example inputs.

    ``module`` is the chain's own module or an equal one. Raises DerivationError if results differ
    between chain and module, or between two calls of the module. Modules without values are
    skipped.
    """
    if faults := compare_with_module(module, _source(backbone).chains):
        raise DerivationError(type(module).__name__, faults)


def source_of(backbone: Backbone) -> ChainSource | None:
    """Data shared by the layers of a derived chain; None for other backbones and for cascades."""
    if backbone.parts:
        return None
    build = backbone.layers[0].build
    while isinstance(build, functools.partial) and build.func is not _build and build.args:
        build = build.args[0]  # a layer with some trained parameters wraps the build function
    if isinstance(build, functools.partial) and build.func is _build:
        source: ChainSource = build.args[0]
        return source
    return None


def module_of(backbone: Backbone) -> nn.Module:
    """Module from which a chain was derived."""
    return _source(backbone).chains.module


def check_weights(backbone: Backbone) -> None:
    """Raise PublishedError if the weight files of derived chains do not fit."""
    for chain in backbone.parts.values() or (backbone,):
        if (source := source_of(chain)) is not None:
            source.weights.check()


def _source(backbone: Backbone) -> ChainSource:
    source = source_of(backbone)
    if source is None:
        raise ValueError(f"{backbone.name} is not derived from a module")
    return source


def with_weights(backbone: Backbone, weights: Weights) -> Backbone:
    """Derived chain with other initial ``weights``."""
    return _rebuilt(backbone, replace(_source(backbone), weights=weights))


def _rebuilt(backbone: Backbone, source: ChainSource) -> Backbone:
    """Derived chain whose layers are built from ``source``."""
    source = replace(source, known={})
    return replace(
        backbone,
        layers=tuple(
            replace(layer, build=functools.partial(_build, source, _UnitNumber(source, i)))
            for i, layer in enumerate(backbone.layers)
        ),
    )


def with_quantization(backbone: Backbone, kind: str, dtype: torch.dtype | None = None) -> Backbone:
    """Derived chain with the linear maps of its blocks quantised (one of ``QUANTIZATIONS``).

    Norms, biases, embeddings, convolutions and the layers around the blocks stay as they are.
    Values are rounded to ``dtype`` first, by default that of the chain, as diffusers does with
    ``BitsAndBytesConfig``. Raises ValueError if the backbone is not derived, or has no such weight.
    """
    source = source_of(backbone)
    if source is None:
        raise ValueError(
            f"{backbone.name} is a hand-written family, whose weights cannot be quantised. Take "
            "its diffusers class (diffusers:FOLDER), or leave the quantisation out"
        )
    weights = weights_of_blocks(source.chains.module)
    quantization = Quantization(kind, weights, dtype or source.dtype)
    if not any(map(quantization.of_unit, source.chains.first.units)):
        raise ValueError(
            f"{backbone.name} has no linear layer in a list of blocks that can be quantised: leave "
            "the quantisation out"
        )
    record = {**backbone.record, "quantization": kind} if backbone.record else {}
    return replace(_rebuilt(backbone, replace(source, quantization=quantization)), record=record)


def buffers_of(backbone: Backbone) -> dict[str, torch.Tensor]:
    """Tensors saved with the weights of a derived chain's module but not trained."""
    if backbone.parts:
        parts = backbone.parts.items()
        return {f"{c}.{name}": value for c, p in parts for name, value in buffers_of(p).items()}
    if source_of(backbone) is None:
        return {}
    module = module_of(backbone)
    weights = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    state = module.state_dict()
    return {name: tensor for name, tensor in state.items() if name not in weights}


def tied_names(backbone: Backbone) -> dict[str, str]:
    """The other names that the module of a derived chain has for its tied weights, with those that
    layers have."""
    if backbone.parts:
        parts = backbone.parts.items()
        return {
            f"{c}.{name}": f"{c}.{own}" for c, p in parts for name, own in tied_names(p).items()
        }
    if source_of(backbone) is None:
        return {}
    module = module_of(backbone)
    weights = {name for name, _ in module.named_parameters()}
    return {other: own for other, own in other_names(module).items() if own in weights}


def _layers(source: ChainSource, chain: UnitChain) -> list[Layer]:
    layers: list[Layer] = []
    before: tuple[str, ...] = (chain.sample,)
    for index, unit in enumerate(chain.units):
        after = before if unit.embedder else unit.boundary
        layers.append(_layer(source, chain, index, before, after))
        before = after
    return layers


def _layer(
    source: ChainSource,
    chain: UnitChain,
    index: int,
    before: tuple[str, ...],
    after: tuple[str, ...],
) -> Layer:
    specs, unit = source.specs, chain.units[index]
    return Layer(
        unit.name,
        functools.partial(_build, source, _UnitNumber(source, index)),
        tuple(specs[n] for n in before),
        tuple(specs[n] for n in after),
        pushes={n: after.index(n) for n in unit.pushes},
        pops={n: specs[n] for n in unit.pops},
        provides={n: specs[n] for n in unit.provides},
        uses=tuple(
            source.field_of.get(n, n) for n in unit.takes if n not in unit.pops and n not in before
        ),
        embedder=unit.embedder,
        qualified=True,
        trained=any(n in chain.trained for n in unit.weights),
    )


class _UnitNumber(int):
    """Index of a unit of ``source``; its text is equal for units that do the same work.

    Costs of layers whose build functions have equal texts are counted once (see ``layer_kind``).
    """

    source: ChainSource

    def __new__(cls, source: ChainSource, index: int) -> _UnitNumber:
        made = super().__new__(cls, index)
        made.source = source
        return made

    def __repr__(self) -> str:
        if len(self.source.samples) > 1:  # graphs of other shapes are not looked at
            return f"unit {int(self)}"
        chain, quantization = self.source.chains.first, self.source.quantization
        unit = chain.units[self]
        held = frozenset[str]() if quantization is None else quantization.of_unit(unit)
        return work_of(unit, chain, held)


def _build(source: ChainSource, index: int, context: LayerContext | None) -> DerivedLayer:
    initialise = context is None or context.config.perform_initialization
    groups = None if context is None else context.pg_collection
    group = getattr(groups, "cp", None)
    return DerivedLayer(source, index, initialise, group if group and group.size() > 1 else None)


def _sample_of(module: str, name: str, chain: UnitChain, probe: UnitChain, size: int) -> Sample:
    """Sample layout of value ``name``; ``probe`` is the chain for one more sample."""
    a, b = chain.values[name].shape, probe.values[name].shape
    dims = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
    if not dims:
        return Sample(None)
    dim = dims[0]
    if len(dims) > 1 or a[dim] % size or b[dim] * size != a[dim] * (size + 1):
        raise DerivationError(
            module,
            [
                f"{chain.inputs.get(name, name)} is {list(a)} for {size} samples and {list(b)} "
                f"for {size + 1}: no single dimension grows with the samples"
            ],
        )
    return Sample(dim, a[dim] // size)


def _sample_there(module: str, name: str, sample: Sample, chain: UnitChain, size: int) -> Sample:
    """Sample layout of value ``name`` in a chain of another shape and microbatch ``size``."""
    shape = tuple(chain.values[name].shape)
    if sample.dim is None:
        return sample
    if sample.dim >= len(shape) or shape[sample.dim] % size:
        raise DerivationError(
            module,
            [
                f"{chain.inputs.get(name, name)} is {list(shape)} for {size} samples: dimension "
                f"{sample.dim} is not the batch dimension"
            ],
        )
    return Sample(sample.dim, shape[sample.dim] // size)


def spec_of(module: str, name: str, value: Any, sample: Sample, dtype: torch.dtype) -> TensorSpec:
    shape, kind = tuple(value.shape), str(value.dtype).removeprefix("torch.")
    if kind not in DTYPE_BYTES:
        raise DerivationError(
            module, [f"{name} is {kind}, but a chain takes {', '.join(DTYPE_BYTES)}"]
        )
    if sample.dim is not None:
        rows = (sample.rows,) if sample.rows > 1 else ()
        shape = (*shape[: sample.dim], *rows, *shape[sample.dim + 1 :])
    return TensorSpec(shape, sample.dim, COMPUTE if value.dtype == dtype else kind)
