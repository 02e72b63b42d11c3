"""Any torch module as a backbone, as it is."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any, Literal

import torch
from torch import nn

from megatron_pulse.backbone.chain import COMPUTE, DTYPE_BYTES, Backbone, Layer, TensorSpec
from megatron_pulse.backbone.check import require_valid
from megatron_pulse.backbone.derived.exported import DerivationError, export
from megatron_pulse.backbone.derived.inputs import Make, read_inputs
from megatron_pulse.backbone.derived.layer import DerivedLayer, Sample, Source
from megatron_pulse.backbone.derived.units import Chain, Unit, derive


def from_module(
    module: nn.Module,
    inputs: Mapping[str, Any] | Make,
    *,
    sample: str | None = None,
    timestep: str | None = None,
    constants: Collection[str] = (),
    output: int | None = None,
    granularity: Literal["blocks", "pieces"] = "pieces",
    micro_batch_sizes: Collection[int] = (),
) -> Backbone:
    """The chain of ``module``, with its skips, conditioning and embedders.

    ``inputs`` is an example of what it is called with by name, or a function of the microbatch size
    that makes one. ``sample`` is the name of the noisy sample (``noisy`` in a batch), ``timestep``
    that of the times (``timesteps`` in a batch); known for diffusers' and transformers' classes.
    All other inputs with a row for every sample are batch fields under their own names (of a
    nested one, its path: ``added_cond_kwargs_text_embeds``), the rest, and ``constants``, is the
    same for every batch. ``output`` says which of several results is the prediction. Links begin
    between blocks (members of the module's lists), and with "pieces" within them too, where no more
    bytes are in use than at a block's ends. Graphs are of the example's microbatch size, or of
    ``micro_batch_sizes``, and of the module's dtype.

    Layers begin with copies of the module's weights, whatever the seed, under the module's own
    names; its buffers are constants. A module on the meta device gives a chain for planning.
    Raises DerivationError with every reason, the operation and the line of the model.
    """
    name = type(module).__name__
    if granularity not in ("blocks", "pieces"):
        raise DerivationError(name, [f"granularity is {granularity!r}, not 'blocks' or 'pieces'"])
    read = read_inputs(
        name, inputs, sample, timestep, constants, min(micro_batch_sizes, default=None)
    )
    sizes = sorted({*(micro_batch_sizes or (read.size,))})
    chains = {
        size: derive(
            export(module, read.make(size), read.constants, output),
            name,
            read.sample,
            granularity == "pieces",
        )
        for size in (*sizes, sizes[-1] + 1)
    }
    first = chains[sizes[0]]
    for size, chain in chains.items():
        if [u.signature for u in chain.units] != [u.signature for u in first.units]:
            raise DerivationError(
                name, [f"microbatches of {size} take another way through it than of {sizes[0]}"]
            )
    larger, probe = chains[sizes[-1]], chains.pop(sizes[-1] + 1)
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    used = {n for u in first.units for n in (*u.takes, *u.gives)} | {first.sample}
    samples = {n: _sample_of(name, n, larger, probe, sizes[-1]) for n in used}
    specs = {n: _spec(name, n, larger.values[n], samples[n], dtype) for n in used}
    taken = {n for u in first.units for n in u.takes} - {n for u in first.units for n in u.gives}
    fields = {n: n for n in sorted(taken - {first.sample})}
    if read.timestep in fields:
        fields[read.timestep] = "timesteps"
    if len({"noisy", *fields.values()}) != len(fields) + 1:
        raise DerivationError(
            name, [f"two inputs would be one field of a batch: noisy, {', '.join(fields.values())}"]
        )
    source = Source(chains, samples, specs, fields, dtype)
    backbone = Backbone(
        name,
        tuple(_layers(source, first)),
        {field: specs[n] for n, field in fields.items()},
    )
    require_valid(backbone)
    return backbone


def _layers(source: Source, chain: Chain) -> list[Layer]:
    layers: list[Layer] = []
    before: tuple[str, ...] = (chain.sample,)
    for index, unit in enumerate(chain.units):
        after = before if unit.embedder else unit.boundary
        layers.append(_layer(source, unit, index, before, after))
        before = after
    return layers


def _layer(
    source: Source, unit: Unit, index: int, before: tuple[str, ...], after: tuple[str, ...]
) -> Layer:
    specs = source.specs
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
    )


def _build(source: Source, index: int, context: object) -> DerivedLayer:
    return DerivedLayer(source, index)


def _sample_of(module: str, name: str, chain: Chain, probe: Chain, size: int) -> Sample:
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
                f"{name} is {list(a)} for {size} samples and {list(b)} for {size + 1}: no one "
                "dimension grows with them"
            ],
        )
    return Sample(dim, a[dim] // size)


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
