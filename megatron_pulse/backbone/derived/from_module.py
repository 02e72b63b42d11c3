"""Any torch module as a backbone, as it is."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from megatron_pulse.backbone.chain import COMPUTE, DTYPE_BYTES, Backbone, Layer, TensorSpec
from megatron_pulse.backbone.check import require_valid
from megatron_pulse.backbone.context import LayerContext
from megatron_pulse.backbone.derived.chains import Chains
from megatron_pulse.backbone.derived.exported import DerivationError
from megatron_pulse.backbone.derived.inputs import Make, read_inputs, read_others
from megatron_pulse.backbone.derived.layer import ChainSource, DerivedLayer, Sample
from megatron_pulse.backbone.derived.refused.lazy import lazy_modules
from megatron_pulse.backbone.derived.trial import trial
from megatron_pulse.backbone.derived.units import UnitChain
from megatron_pulse.backbone.derived.weights.first import (
    Weights,
    from_module_itself,
    other_names,
)

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
    """The chain of ``module``, with its skips, conditioning and embedders.

    ``inputs`` is an example of what it is called with by name, or a function of the microbatch size
    that makes one. ``sample`` is the name of the noisy sample (``noisy`` in a batch), ``timestep``
    that of the times (``timesteps`` in a batch, from 0 to 1,000, which times ``timestep_scale`` is
    what the module wants); known for diffusers' and transformers' classes.
    All other inputs with a row for every sample are batch fields under their own names (of a
    nested one, its path: ``added_cond_kwargs_text_embeds``) or those that ``fields`` gives them,
    the rest, and ``constants``, is the same for every batch. ``output`` says which of several
    results is the prediction. Links begin between blocks (members of the module's lists), and with
    "pieces" within them too, where no more bytes are in use than at a block's ends. The module is
    exported again when a microbatch of another size than the example's first comes. Graphs are of
    the module's dtype. ``num_classes`` (where a field is called ``labels``), ``null_label`` and
    ``patch_size``: see Backbone.

    ``other_inputs`` are examples of other sizes that a microbatch may have (heights and widths,
    frames, lengths of texts), of which each is exported too: on the same weights, with the same
    layers. ``shares`` says which part of the microbatches is of which, the first of them of
    ``inputs`` (empty: as many of each).

    Layers begin with copies of the module's weights, whatever the seed, or with ``weights``, of
    which each layer asks for its own, under the module's own names; those without requires_grad,
    or to which no gradient comes, stay as they are in training, and buffers are constants. A module
    on the meta device gives a chain for planning, unless there are ``weights``. A small module with
    values is called twice and compared with its chain.
    Raises DerivationError with every reason, the operation and the line of the model.
    """
    name = type(module).__name__
    faults = []
    if granularity not in ("blocks", "pieces"):
        faults.append(f"granularity is {granularity!r}, not 'blocks' or 'pieces'")
    faults += lazy_modules(module)
    dtypes = dict.fromkeys(str(p.dtype)[6:] for p in module.parameters() if p.is_floating_point())
    if len(dtypes) > 1:
        faults.append(
            f"its parameters are {' and '.join(dtypes)}, and a run has one dtype: call its .to(...)"
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
    specs = {n: _spec(name, told[n], first.values[n], samples[n], dtype) for n in used}
    for (chain, _), there in zip(others, of_others, strict=True):
        for n, spec in specs.items():
            other = _spec(name, told[n], chain.values[n], there[n], dtype)
            specs[n] = replace(spec, others=(*spec.others, other.shape))
    taken = {n for u in first.units for n in u.takes} - {n for u in first.units for n in u.gives}
    called = {n: first.inputs[n] for n in sorted(taken - {first.sample})}
    field_of = {
        n: "timesteps" if name == read.timestep else fields.get(name, name)
        for n, name in called.items()
    }
    if len({"noisy", *field_of.values()}) != len(field_of) + 1:
        found = ", ".join(field_of.values())
        raise DerivationError(name, [f"two inputs would be one field of a batch: noisy, {found}"])
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
    try_out(backbone, module)
    return backbone


def try_out(backbone: Backbone, module: nn.Module) -> None:
    """Raises DerivationError where a small ``module`` with values, which is or is like that of a
    derived chain, gives another result than the chain does, or than itself in another call."""
    if faults := trial(module, _source(backbone).chains):
        raise DerivationError(type(module).__name__, faults)


def source_of(backbone: Backbone) -> ChainSource | None:
    """What the layers of a derived chain share; None of another."""
    build = backbone.layers[0].build
    while isinstance(build, functools.partial) and build.func is not _build and build.args:
        build = build.args[0]  # of a layer of which a part is trained
    if isinstance(build, functools.partial) and build.func is _build:
        source: ChainSource = build.args[0]
        return source
    return None


def module_of(backbone: Backbone) -> nn.Module:
    """The module that a derived chain is made of."""
    return _source(backbone).chains.module


def check_weights(backbone: Backbone) -> None:
    """Raises PublishedError if the files that a derived chain begins with do not fit it."""
    if (source := source_of(backbone)) is not None:
        source.weights.check()


def _source(backbone: Backbone) -> ChainSource:
    source = source_of(backbone)
    if source is None:
        raise ValueError(f"{backbone.name} is not derived of a module")
    return source


def with_weights(backbone: Backbone, weights: Weights) -> Backbone:
    """A derived chain whose layers begin with other ``weights``."""
    source = _source(backbone)
    other = replace(source, weights=weights, known={})
    return replace(
        backbone,
        layers=tuple(
            replace(layer, build=functools.partial(_build, other, i))
            for i, layer in enumerate(backbone.layers)
        ),
    )


def buffers_of(backbone: Backbone) -> dict[str, torch.Tensor]:
    """What is saved with the weights of the module of a derived chain and not trained."""
    if source_of(backbone) is None:
        return {}
    module = module_of(backbone)
    weights = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    state = module.state_dict()
    return {name: tensor for name, tensor in state.items() if name not in weights}


def tied_names(backbone: Backbone) -> dict[str, str]:
    """The other names that the module of a derived chain has for its tied weights, with those that
    layers have."""
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
        functools.partial(_build, source, index),
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


def _build(source: ChainSource, index: int, context: LayerContext | None) -> DerivedLayer:
    return DerivedLayer(source, index, context is None or context.config.perform_initialization)


def _sample_of(module: str, name: str, chain: UnitChain, probe: UnitChain, size: int) -> Sample:
    """How ``name`` holds samples: ``probe`` is the same chain with one sample more."""
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
                f"for {size + 1}: no one dimension grows with them"
            ],
        )
    return Sample(dim, a[dim] // size)


def _sample_there(module: str, name: str, sample: Sample, chain: UnitChain, size: int) -> Sample:
    """How ``name`` holds samples in a chain of another shape, of a microbatch of ``size``."""
    shape = tuple(chain.values[name].shape)
    if sample.dim is None:
        return sample
    if sample.dim >= len(shape) or shape[sample.dim] % size:
        raise DerivationError(
            module,
            [
                f"{chain.inputs.get(name, name)} is {list(shape)} for {size} samples: dimension "
                f"{sample.dim} holds them not"
            ],
        )
    return Sample(sample.dim, shape[sample.dim] // size)


def _spec(module: str, name: str, value: Any, sample: Sample, dtype: torch.dtype) -> TensorSpec:
    shape, kind = tuple(value.shape), str(value.dtype).removeprefix("torch.")
    if kind not in DTYPE_BYTES:
        raise DerivationError(
            module, [f"{name} is {kind}, and a chain takes {', '.join(DTYPE_BYTES)}"]
        )
    if sample.dim is not None:
        rows = (sample.rows,) if sample.rows > 1 else ()
        shape = (*shape[: sample.dim], *rows, *shape[sample.dim + 1 :])
    return TensorSpec(shape, sample.dim, COMPUTE if value.dtype == dtype else kind)
