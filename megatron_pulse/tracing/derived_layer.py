"""Layer module of a derived chain's unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megatron_pulse.adapters.adapter import Adapter
from megatron_pulse.adapters.kronecker import Product, first_products
from megatron_pulse.adapters.low_rank import (
    AdapterDropout,
    factor_names,
    first_factors,
    first_magnitude,
    magnitude_name,
    row_norms,
)
from megatron_pulse.adapters.quantization import quantized_names
from megatron_pulse.adapters.quantized_linear import held_as_published, quantize
from megatron_pulse.backbone.chain import TensorSpec
from megatron_pulse.tracing.adapted_graph import DROPOUT, UnitAdapter, adaptable_weights, adapted
from megatron_pulse.tracing.chains import Chains
from megatron_pulse.tracing.context_parallel.collectives import Group
from megatron_pulse.tracing.context_parallel.divided_chain import (
    GROUP,
    DividedChain,
    divide_chain,
)
from megatron_pulse.tracing.dotted_parameters import Nest, container_of, register_parameters
from megatron_pulse.tracing.executable import PRODUCTS, counting_every_position, executable
from megatron_pulse.tracing.initial_weights.meta_init import has_no_memory
from megatron_pulse.tracing.initial_weights.sources import Weights, float8_of
from megatron_pulse.tracing.quantized_graph import Quantization, quantized
from megatron_pulse.tracing.sliced_graph import Region, sliced, with_tokens
from megatron_pulse.tracing.torch_export import DerivationError
from megatron_pulse.tracing.units import Unit, UnitChain


@dataclass(frozen=True)
class Sample:
    """Position of a microbatch's samples in a value.

    Dimension ``dim`` holds ``rows`` per sample; None if the value is common to all samples.
    """

    dim: int | None
    rows: int = 1

    def merge(self, tensor: Tensor) -> Tensor:
        """Convert from the layer contract's shape, with a dimension for rows, to the module's."""
        if self.dim is None or self.rows == 1:
            return tensor
        return tensor.flatten(self.dim, self.dim + 1)

    def split(self, tensor: Tensor) -> Tensor:
        """Convert from the module's shape to the layer contract's."""
        if self.dim is None or self.rows == 1:
            return tensor
        return tensor.unflatten(self.dim, (-1, self.rows))


@dataclass(frozen=True, eq=False, repr=False)
class ChainSource:
    """Data shared by the layers of one derived chain.

    ``chains`` has the chain for every shape and microbatch size, with equal units. ``samples`` has
    the sample layout of every value, per shape. ``field_of`` maps the module's inputs to batch
    fields; ``scale_of`` gives factors for field values. ``quantization`` is that of frozen weights.
    """

    chains: Chains
    samples: tuple[Mapping[str, Sample], ...]
    specs: Mapping[str, TensorSpec]
    field_of: Mapping[str, str]
    scale_of: Mapping[str, float]
    dtype: torch.dtype
    weights: Weights
    quantization: Quantization | None = None
    known: dict[tuple[UnitChain, torch.device], dict[str, Any]] = field(default_factory=dict)
    known_divisions: dict[tuple[UnitChain, int, int], DividedChain] = field(default_factory=dict)

    def divided(self, chain: UnitChain, rank: int, size: int) -> DividedChain:
        """Division of a chain over ``size`` context-parallel ranks, as ``rank`` computes it.

        Raises NotDivisible.
        """
        at = chain, rank, size
        if at not in self.known_divisions:
            self.known_divisions[at] = divide_chain(chain, rank, size)
        return self.known_divisions[at]

    def constants(self, chain: UnitChain, device: torch.device) -> dict[str, Any]:
        """Values that depend on neither inputs nor parameters, computed once per device."""
        if (chain, device) not in self.known:
            with torch.no_grad():
                given = [self.buffer(name, chain).to(device) for name in chain.constant_state]
                values = executable(chain.constants, chain, device)(*given)
            self.known[chain, device] = dict(zip(chain.constant_names, values, strict=True))
        return self.known[chain, device]

    def buffer(self, name: str, chain: UnitChain) -> Any:
        """Buffer, or tensor among the module's constants."""
        buffers = self.weights.buffers()
        if name not in buffers:
            return chain.state[name].detach()
        return buffers[name].to(chain.state[name].dtype)


class DerivedLayer(Nest):
    """Unit ``index`` of a derived chain, called as the modules of ``Layer.build``.

    Parameters have qualified names and begin with the source's weights for the seed of torch's
    generator. Without ``initialise`` they are uninitialised. Buffers are constants of the chain.
    Every shape (``chain_shape``) and mode has its own graph on the same parameters. Weights are
    read, quantised if the source says so, and released one by one. With a context-parallel
    ``group``, divided values are this rank's shares.

    With ``token_slices`` above 1, token-wise regions run in as many slices of tokens.
    """

    def __init__(
        self,
        source: ChainSource,
        index: int,
        initialise: bool = True,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        self._source, self._index, self._group = source, index, group
        self.chain_shape, self._token_slices = 0, 1
        chain = source.chains.first
        unit = chain.units[index]
        links = [u for u in chain.units if not u.embedder]
        number = next((i for i, u in enumerate(links) if u is unit), 0)
        self._before = links[number - 1].boundary if number else (chain.sample,)
        device = torch.get_default_device()
        values: Mapping[str, Tensor] | None = None
        if initialise and device.type != "meta" and unit.weights:
            values = source.weights.parameters(torch.initial_seed())
        parameters: dict[str, nn.Parameter] = {}
        quantization = source.quantization
        self._quantized = () if quantization is None else quantization.of_unit(unit)
        for name in unit.weights:
            if quantization is None or name not in self._quantized:
                first = self._first(name, values, device)
                parameters[name] = nn.Parameter(first, name in chain.trained)
                continue
            if quantization.kind == "fp8" and (stored := float8_of(values, name)) is not None:
                held = held_as_published(*stored)
            else:
                value = self._first(name, values, device, as_read=True).to(quantization.dtype)
                held = quantize(value, quantization.kind)
            parameters.update(zip(quantized_names(name, quantization.kind), held, strict=True))
        self._adapter: UnitAdapter | None = None
        self._unit = self._changed(chain)
        self.adapter_dropout: AdapterDropout | None = None
        self._norms: dict[str, str] = {}
        self._compiled: dict[tuple[UnitChain, torch.device], Any] = {}
        self._containers: dict[str, tuple[nn.Module, str]] = {}
        self._undivided = undivided(self._sliced(chain)[0])
        register_parameters(self, parameters)
        self._containers.update((name, container_of(self, name)) for name in parameters)

    def _first(
        self,
        name: str,
        values: Mapping[str, Tensor] | None,
        device: torch.device,
        as_read: bool = False,
    ) -> Tensor:
        """Initial value of a parameter; uninitialised without ``values``.

        Its dtype is the finer of those of the chain and of the values. With ``as_read`` it is not
        copied, and is not to be changed.
        """
        weight = self._source.chains.first.state[name]
        if values is None:
            return torch.empty_like(weight, device=device)
        value = values[name].detach()
        if has_no_memory(value):
            raise ValueError(
                f"{name} is on the meta device, without values: such a chain is for planning "
                "only. To run it, give from_module a module with weights"
            )
        if as_read:
            return value
        dtype = torch.promote_types(weight.dtype, value.dtype)
        if dtype == value.dtype and self._source.weights.is_new:
            return value
        return torch.empty_like(weight, dtype=dtype, device=value.device).copy_(value)

    def adaptable(self) -> list[str]:
        """Names of the layers with a weight that takes an adapter. See ``Adaptable``."""
        unit = self._source.chains.first.units[self._index]
        return [name.removesuffix(".weight") for name in adaptable_weights(unit)]

    def add_adapter(
        self, layers: Collection[str], adapter: Adapter, start: Mapping[str, Tensor]
    ) -> None:
        """Add trained factors beside the weights of ``layers``. See ``Adaptable``."""
        weights = tuple(f"{layer}.weight" for layer in layers)
        drops, has_magnitudes = self.adapter_dropout is not None, adapter.type == "dora"
        chain = self._source.chains.first
        made: dict[str, nn.Parameter] = {}
        products: dict[str, Product] = {}
        seed = torch.initial_seed()
        for name in weights:
            weight, device = chain.state[name], next(self.parameters()).device
            if name in self._containers:
                weight = self._parameter(name)
            if adapter.type == "lokr":
                size = adapter.rank, adapter.factor
                parts = first_products(weight, *size, name, seed, device, start)
                products[name] = Product(tuple(parts), tuple(weight.shape[2:]))
                made.update(parts)
                continue
            factors = first_factors(weight, adapter.rank, name, seed, device, start)
            made.update(zip(factor_names(name), factors, strict=True))
            if has_magnitudes:
                own = magnitude_name(name)
                made[own] = first_magnitude(weight, start.get(own), weight.device)
                self._norms.update({} if own in start else {own: name})
        self._adapter = UnitAdapter(weights, adapter.scale, drops, has_magnitudes, products)
        self._unit = self._changed(chain)
        self._undivided = undivided(self._sliced(chain)[0])
        register_parameters(self, made)
        self._containers.update((name, container_of(self, name)) for name in made)
        self.begin_magnitudes()

    @torch.no_grad()
    def begin_magnitudes(self) -> None:
        """Set new magnitudes to the norms of rows. See ``Layer``."""
        assert self._adapter is not None
        for own, name in self._norms.items():
            a, b = map(self._parameter, factor_names(name))
            weight, magnitude = self._parameter(name), self._parameter(own)
            magnitude.copy_(row_norms(weight, a, b, self._adapter.scale))

    @property
    def token_slices(self) -> int:
        """Number of slices of token-wise regions; 1 for whole layers."""
        return self._token_slices

    @token_slices.setter
    def token_slices(self, count: int) -> None:
        if count != self._token_slices:
            self._token_slices = count
            self._undivided = undivided(self._sliced(self._source.chains.first)[0])
            self._compiled.clear()

    @property
    def undivided(self) -> list[nn.Parameter]:
        """Parameters whose gradients are not deferred. See Layer."""
        return [self._parameter(name) for name in self._undivided if name in self._containers]

    def extra_repr(self) -> str:
        """Name of the unit. See nn.Module."""
        return self._unit.name

    def forward(
        self, inputs: tuple[Tensor, ...], skips: dict[str, Tensor], conditioning: dict[str, Tensor]
    ) -> tuple[Tensor, ...]:
        """Run the unit. See Layer."""
        source, unit = self._source, self._unit
        given = dict(
            zip(self._before, inputs, strict=False)
        )  # embedders may be called without inputs
        field_of = source.field_of
        for name in unit.takes:
            if name not in given:
                key = field_of.get(name, name)
                given[name] = skips[name] if name in unit.pops else conditioning[key]
                if name in source.scale_of:
                    given[name] = given[name] * source.scale_of[name]
        sample_of = source.samples[self.chain_shape]
        values = {n: sample_of[n].merge(t) for n, t in given.items()}
        size, device = self._place(given)
        chain = source.chains.find(self.chain_shape, size, self.training)
        state = [self._state(name, chain, device) for name in unit.state]
        run = self._executable(chain, device)
        with counting_every_position(device):
            results = run(*(values[name] for name in unit.takes), *state)
        values.update(zip(unit.gives, results, strict=True))
        provided = tuple(sample_of[name].split(values[name]) for name in unit.provides)
        if unit.embedder:
            return (*inputs, *provided)
        return (*(sample_of[name].split(values[name]) for name in unit.boundary), *provided)

    def _place(self, given: Mapping[str, Tensor]) -> tuple[int, torch.device]:
        """Microbatch size and device of a call. ValueError if dtypes differ from the
        exported ones.
        """
        source, size = self._source, self._source.chains.size
        weights = {name: self._parameter(name) for name in self._containers}
        device = next((p.device for p in weights.values()), torch.device("cpu"))
        for name, tensor in given.items():
            spec, device = source.specs[name], tensor.device
            if spec.batch_dim is not None:
                size = tensor.shape[spec.batch_dim]
                break
        exported = source.chains.first.state
        for name, p in weights.items():
            if name in exported and p.dtype != exported[name].dtype:
                raise ValueError(
                    f"{self._unit.name}: parameters are {p.dtype}, but the module was exported in "
                    f"{exported[name].dtype}. Give from_module a module with the run's dtype"
                )
        return size, device

    def _parameter(self, name: str) -> Any:
        container, leaf = self._containers[name]
        return container._parameters[leaf]

    def _state(self, name: str, chain: UnitChain, device: torch.device) -> Any:
        if name in self._containers:
            return self._parameter(name)
        if name == GROUP:
            return self._group
        if name == DROPOUT:
            return self.adapter_dropout if self.training else None
        constants = self._source.constants(chain, device)
        if name in constants:
            return constants[name]
        key = f"state {name}"  # buffers are copied to the device once
        if key not in constants:
            constants[key] = self._source.buffer(name, chain).to(device)
        return constants[key]

    def _executable(self, chain: UnitChain, device: torch.device) -> Any:
        if (chain, device) not in self._compiled:
            unit, regions = self._sliced(chain)
            modules = {
                name: region.module(lambda graph: executable(graph, chain, device))
                for name, region in regions.items()
            }
            self._compiled[chain, device] = executable(unit.graph, chain, device, modules)
        return self._compiled[chain, device]

    def _sliced(self, chain: UnitChain) -> tuple[Unit, Mapping[str, Region]]:
        """The unit as it runs, with the regions that run in slices."""
        unit = self._changed(chain)
        return (unit, {}) if self._token_slices == 1 else sliced(unit, self._token_slices)

    def _divided(self, chain: UnitChain, group: Group) -> DividedChain:
        """Division of a chain, equal to that of its shape's example."""
        source, rank, size = self._source, group.rank(), group.size()
        divided = source.divided(chain, rank, size)
        example = source.divided(source.chains.of_shapes[self.chain_shape], rank, size)
        if divided.divisions != example.divisions:
            fault = "its tokens are divided otherwise in microbatches of another size"
            raise DerivationError(type(source.chains.module).__name__, [fault])
        return divided

    def _changed(self, chain: UnitChain) -> Unit:
        """The unit, of any shape: divided, with the adapter and with quantised weights."""
        unit, index = chain.units[self._index], self._index
        if self._group is not None:
            divided = self._divided(chain, self._group)
            unit = divided.unit(unit, index)
            if self._token_slices > 1:
                unit = with_tokens(unit, divided.graphs[index].own_nodes)
        elif self._token_slices > 1:
            unit = with_tokens(unit, self._source.divided(chain, 0, 1).graphs[index].nodes)
        if self._adapter is not None:
            unit = adapted(unit, self._adapter)
        if self._quantized and (quantization := self._source.quantization) is not None:
            shapes = {n: tuple(self._source.chains.first.state[n].shape) for n in self._quantized}
            unit = quantized(unit, quantization.kind, shapes)
        return unit


def undivided(unit: Unit) -> frozenset[str]:
    """Parameters of a unit whose gradients are not deferred.

    These are parameters also used by operations other than linear maps and convolutions (an
    autocast region, an embedding), because the terms form one sum. Parameters that share a product
    with them are included.
    """
    placeholders = (node for node in unit.graph.nodes if node.op == "placeholder")
    names = zip(placeholders, (*unit.takes, *unit.state), strict=True)
    own = {node: name for node, name in names if name in unit.weights}
    products: list[list[str]] = []
    found: set[str] = set()
    for node in unit.graph.nodes:
        given = [own[a] for a in node.all_input_nodes if a in own]
        if node.target in PRODUCTS and node.args[1] in own and node.args[0] not in own:
            products.append(given)
        else:
            found.update(given)
    biases = Counter(bias for _, *of_product in products for bias in of_product)
    weights = {weight for weight, *_ in products}
    found.update(bias for bias, count in biases.items() if count > 1 or bias in weights)
    size = -1
    while size != len(found):
        size = len(found)
        found.update(*(given for given in products if found.intersection(given)))
    return frozenset(found)
