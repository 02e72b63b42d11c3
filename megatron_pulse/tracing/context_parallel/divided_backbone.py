"""Backbone of a context-parallel rank, and what its division costs."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from megatron_pulse.backbone.chain import Backbone, TensorSpec
from megatron_pulse.backbone.shape_buckets import at_shape
from megatron_pulse.backbone.token_shares import uses_ring, with_token_shares
from megatron_pulse.errors import Faults
from megatron_pulse.format import with_plural
from megatron_pulse.tracing.chains import Chains
from megatron_pulse.tracing.context_parallel.divided_chain import (
    DividedChain,
    NotDivisible,
    divide_chain,
)
from megatron_pulse.tracing.from_module import source_of, spec_of


def divide_context(backbone: Backbone, rank: int, size: int) -> Backbone:
    """Backbone whose boundaries, skips and conditioning are the shares of ``rank``.

    ``size`` ranks share the tokens. Its layers are to be built with a process group of that size.
    Raises Faults if its tokens cannot be divided.
    """
    if source_of(backbone) is None:
        return with_token_shares(backbone, rank, size)
    if size == 1:
        return backbone
    divided = divisions_of(backbone, rank, size)
    source = source_of(backbone)
    assert source is not None
    chains = source.chains.of_shapes

    @functools.cache
    def spec(name: str) -> TensorSpec:
        shapes = []
        for index, (chain, each) in enumerate(zip(chains, divided, strict=True)):
            value, division = chain.values[name], each.divisions.get(name)
            if division is not None:
                shape = division.own_shape(value.shape, rank, size)
                value = torch.empty(shape, dtype=value.dtype, device="meta")
            sample = source.samples[index][name]
            shapes.append(spec_of(backbone.name, name, value, sample, source.dtype))
        first, *others = shapes
        return replace(first, others=tuple(other.shape for other in others))

    def named(specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        return {name: spec(name) for name in specs}

    layers = []
    before: tuple[str, ...] = (chains[0].sample,)
    for layer, unit in zip(backbone.layers, chains[0].units, strict=True):
        after = before if unit.embedder else unit.boundary
        layers.append(
            replace(
                layer,
                inputs=tuple(map(spec, before)),
                outputs=tuple(map(spec, after)),
                pops=named(layer.pops),
                provides=named(layer.provides),
            )
        )
        before = after
    return replace(backbone, layers=tuple(layers))


def first_division(backbone: Backbone, size: int) -> tuple[str, int]:
    """Name of the value from which on tokens are divided, and its number of tokens.

    Of a hand-written family, it is the name of the layer that returns this value.
    """
    if source_of(backbone) is not None:
        name, division = divisions_of(backbone, 0, size)[0].divided
        return name, division.length
    whole = backbone.whole or backbone
    name, _, length = whole.sequences[0]
    return name, length


def divisions_of(backbone: Backbone, rank: int, size: int) -> list[DividedChain]:
    """Division of a derived chain at each shape; raises Faults where tokens cannot be divided."""
    source = source_of(backbone)
    assert source is not None
    found = []
    for index, chain in enumerate(source.chains.of_shapes):
        try:
            found.append(source.divided(chain, rank, size))
        except NotDivisible as error:
            raise Faults(_with_lines(error, source.chains, index, size)) from error
    return found


def _with_lines(error: NotDivisible, chains: Chains, shape_index: int, size: int) -> list[str]:
    """Faults of a chain, with the source lines of its operations."""
    if error.has_lines:
        return error.faults
    try:
        divide_chain(chains.with_lines(shape_index), 0, size)
    except NotDivisible as again:
        return again.faults
    return error.faults


@dataclass(frozen=True)
class LayerTraffic:
    """Bytes that ranks exchange in a layer's forward pass of one sample.

    - ``tokens``: number of tokens of each divided tensor that it hands on.
    - ``num_attentions``: attentions of divided keys, of which ``num_rings`` are ring attention.
    - ``all_to_all``: bytes of the others' queries, keys, values and results; ``ring``: of the keys
      and values of ring attention; ``gathered``: of gathered values. All are over all ranks.
    - ``gathers``: operations for which values are gathered, with the reasons.
    - ``heads``: numbers of heads of attentions over divided keys.
    """

    layer: str
    tokens: tuple[int, ...]
    num_attentions: int
    num_rings: int
    all_to_all: int
    ring: int
    gathered: int
    gathers: tuple[str, ...]
    heads: tuple[int, ...] = ()

    def sent_per_rank(
        self, size: int, tensor_parallel: int = 1, *, backward: bool = False
    ) -> float:
        """Bytes that one of ``size`` ranks sends, in the mean over ranks.

        A rank has 1 / size of a value, and keeps as much of it in an all-to-all. In a ring it sends
        the keys and values of all ranks but one, and ``backward`` as many gradients too.
        Tensor-parallel ranks divide the heads of attention.
        """
        of_heads = self.all_to_all / size + self.ring * (1 + backward)
        return (size - 1) / size * (of_heads / tensor_parallel + self.gathered)


def traffic_of(
    backbone: Backbone,
    size: int,
    shape_index: int = 0,
    compute_bytes: int = 4,
    tensor_parallel: int = 1,
) -> list[LayerTraffic]:
    """Traffic of each layer; raises Faults as ``divide_context``.

    ``compute_bytes`` are those of an element of hand-written families; modules have a dtype.
    ``tensor_parallel`` ranks have shares of a family's heads.
    """
    source = source_of(backbone)
    if source is None:
        whole = with_token_shares(backbone, 0, size).whole or backbone
        uses = uses_ring(whole.num_heads, size, tensor_parallel)
        return list(_traffic_of_family(at_shape(whole, shape_index), compute_bytes, uses))
    divided = divisions_of(backbone, 0, size)[shape_index]
    chain = source.chains.of_shapes[shape_index]
    samples, divisions = source.chains.size, divided.divisions
    found = []
    for layer, unit, graph in zip(backbone.layers, chain.units, divided.graphs, strict=True):
        of_heads, of_ring, gathered = (
            [each for each in graph.collectives if each.kind == kind]
            for kind in ("all-to-all", "ring", "gather")
        )
        all_to_all, ring, num_gathered = (
            sum(each.num_bytes for each in of) // samples for of in (of_heads, of_ring, gathered)
        )
        found.append(
            LayerTraffic(
                layer.name,
                tuple(divisions[name].length for name in unit.boundary if name in divisions),
                len(of_heads) + len(of_ring),
                len(of_ring),
                all_to_all,
                ring,
                num_gathered,
                tuple(f"{each.operation}: {each.reason}" for each in gathered),
                tuple(sorted({heads for each in (*of_heads, *of_ring) for heads in each.heads})),
            )
        )
    return found


def _traffic_of_family(
    backbone: Backbone, compute_bytes: int, uses_ring: bool
) -> Iterator[LayerTraffic]:
    """Traffic of a hand-written family's layers; the last one gathers the features of patches."""
    last = backbone.layers[-1]
    for layer in backbone.layers:
        attended = sum(
            layer.inputs[index].bytes_per_sample(compute_bytes)
            for group in layer.attends
            for index in group
        )
        gathered = 0
        if layer is last:
            patches = backbone.output_spec.bytes_per_sample(compute_bytes)
            features = patches // backbone.image_tokens
            gathered = layer.inputs[0].shape[0] * features
        yield LayerTraffic(
            layer.name,
            tuple(spec.shape[0] for spec in layer.outputs if spec.sequence),
            len(layer.attends),
            len(layer.attends) * uses_ring,
            4 * attended * (not uses_ring),
            2 * attended * uses_ring,
            gathered,
            ("unpatchify: it is the chain's result",) * bool(gathered),
        )


def kinds_of_attention(traffic: Sequence[LayerTraffic]) -> str:
    """Text on how many attentions exchange heads by all-to-alls, and how many are rings."""
    rings = sum(each.num_rings for each in traffic)
    exchanges = sum(each.num_attentions for each in traffic) - rings
    told = [f"{with_plural(exchanges, 'attention')} by all-to-alls over heads"] * bool(exchanges)
    told += [f"{with_plural(rings, 'attention')} by a ring of keys and values"] * bool(rings)
    return ", ".join(told)
