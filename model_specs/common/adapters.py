"""Low-rank adapters beside the linear maps of hand-written layers, under tensor parallelism too.

Factors are those of the published weights: a fused projection has factors for each weight that it
fuses. They are divided over tensor-parallel ranks like the weight, and rank-r tensors are
exchanged:

- column-parallel: y_i + B_i gather(A x). A is whole, and B is divided by rows.
- row-parallel: y + B reduce(A_i x_i). A is divided by columns, and B is whole.

Under sequence parallelism, ``gather`` also gathers tokens and ``reduce`` also scatters them.

DoRA's magnitudes are divided like B. Norms of rows are local, or summed over row-parallel ranks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.extensions.transformer_engine import (
    HAVE_TE,
    TEColumnParallelLinear,
    TERowParallelLinear,
)
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.utils import (
    get_pg_rank,
    get_pg_size,
    get_tensor_model_parallel_group_if_none,
)
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from megatron_pulse.adapters.adapter import Adapter
from megatron_pulse.adapters.low_rank import (
    PART,
    AdapterDropout,
    are_disabled,
    factor_names,
    first_factors,
    first_magnitude,
    magnitude_name,
)
from megatron_pulse.backbone.chain import Layer
from megatron_pulse.backbone.published_weights import (
    Concatenated,
    FusedPerHead,
    PerHead,
    Rule,
    SwappedHalves,
    Unchanged,
    WeightLayout,
    group_of,
)
from megatron_pulse.tracing.dotted_parameters import Nest, container_of, register_parameters
from model_specs.common.attach_adapter import Adaptable

_COLUMN: tuple[Any, ...] = (ColumnParallelLinear,)
_ROW: tuple[Any, ...] = (RowParallelLinear,)
if HAVE_TE:
    _COLUMN, _ROW = (*_COLUMN, TEColumnParallelLinear), (*_ROW, TERowParallelLinear)

_DIVISIBLE = (Unchanged, PerHead, FusedPerHead, SwappedHalves)
"""Layouts whose rows ranks can divide."""

Rules = Mapping[str, Sequence[Rule]]
"""Rules of the published weights, by name of the chain ("" if there is one)."""


def adapt(rules: Rules, layer: Layer, module: Any) -> Adaptable:
    """Object that takes the adapters of a layer: its module, or the module's linear maps."""
    if hasattr(module, "adaptable"):
        return module  # type: ignore[no-any-return]
    return LinearMaps(module, layer, rules[layer.chain])


@dataclasses.dataclass(frozen=True)
class _Group:
    """Linear maps whose weights are published together, as the weights of the layers ``theirs``.

    ``divided`` is the dimension of the weights that tensor-parallel ranks share, if any. Inputs
    ``of_sequence`` are this rank's tokens ``[s, b, h]`` under sequence parallelism.
    """

    maps: tuple[nn.Module, ...]
    theirs: tuple[str, ...]
    layout: WeightLayout
    divided: int | None
    tp_group: Any
    of_sequence: bool

    @property
    def ranks(self) -> int:
        """Number of ranks that share the weights."""
        return 1 if self.divided is None else int(get_pg_size(self.tp_group))

    @property
    def rows(self) -> int:
        """Rows of each published weight."""
        ranks = self.ranks if self.divided == 0 else 1
        return int(_weight(self.maps[0]).shape[0]) * ranks // len(self.theirs)

    @property
    def columns(self) -> list[int]:
        """Columns of a published weight that each linear map has."""
        ranks = self.ranks if self.divided == 1 else 1
        return [_weight(linear).shape[1] * ranks for linear in self.maps]

    def segments(self, dim: int) -> list[int]:
        """Sizes along ``dim`` of a published weight's segments, each of which ranks divide."""
        if dim:
            return self.columns
        count = getattr(_weight(self.maps[0]), "partition_stride", 1)
        count = 3 if isinstance(self.layout, FusedPerHead) else count
        return [self.rows // count] * count

    def own_columns(self, a: Tensor, index: int) -> Tensor:
        """Columns of A that belong to map ``index``."""
        if len(self.maps) == 1:
            return a
        return a.split([_weight(linear).shape[1] for linear in self.maps], 1)[index]

    @property
    def _of_rank(self) -> WeightLayout | None:
        """Layout of this rank's rows; None if they have the published order."""
        layout = self.layout
        if isinstance(layout, Unchanged | Concatenated):
            return None
        if isinstance(layout, PerHead | FusedPerHead):
            ranks = self.ranks if self.divided == 0 else 1
            return dataclasses.replace(layout, num_heads=layout.num_heads // ranks)
        return layout

    def their_rows(self, values: Tensor) -> dict[str, Tensor]:
        """Values of our rows by published layer; this rank's part of these."""
        layout, count = self._of_rank, len(self.theirs)
        parts = [values] if layout is None else layout.publish([values], count)
        return dict(zip(self.theirs, parts, strict=True))

    def our_rows(self, changes: Mapping[str, Tensor], channels: int) -> Tensor:
        """``changes`` of published outputs in the order of our rows; 0 where there is none."""
        first, *_ = changes.values()
        if (layout := self._of_rank) is None:
            return first
        every = [changes[n] if n in changes else torch.zeros_like(first) for n in self.theirs]
        (moved,) = layout.adopt([change.movedim(channels, 0) for change in every], 1)
        return moved.movedim(0, channels)

    def shard(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part of a factor that is divided along ``dim``."""
        rank = get_pg_rank(self.tp_group)
        parts = tensor.split(self.segments(dim), dim)
        return torch.cat([part.chunk(self.ranks, dim)[rank] for part in parts], dim)


class LinearMaps:
    """Linear layers and ungrouped 2D convolutions in a layer's module, by published names.

    They must be called as modules. Those that the layer freezes take no adapter.
    """

    def __init__(self, module: nn.Module, layer: Layer, rules: Sequence[Rule]) -> None:
        if hasattr(module, PART) or isinstance(module, nn.Sequential):
            raise ValueError(
                f"{layer.name}: {type(module).__name__} cannot hold an adapter, because it is a "
                f"torch.nn.Sequential or has an attribute {PART!r}. Wrap it in a module"
            )
        self._module = module
        found = dict(module.named_modules())
        prefix = layer.own(layer.prefix)
        self._groups: dict[str, _Group] = {}
        for path, linear in found.items():
            if not path or not _takes_adapter(linear):
                continue
            ours, theirs, layout = group_of(rules, f"{prefix}{path}.weight")
            maps = [found.get(n.removeprefix(prefix).removesuffix(".weight")) for n in ours]
            group = _group(maps, theirs, layout, layer)
            if group is not None:
                self._groups.setdefault(group.theirs[0], group)

    def adaptable(self) -> list[str]:
        """Names of the published layers with a trained weight. See ``Adaptable``."""
        groups = self._groups.values()
        return [n for g in groups if _weight(g.maps[0]).requires_grad for n in g.theirs]

    def add_adapter(
        self, layers: Collection[str], adapter: Adapter, start: Mapping[str, Tensor]
    ) -> None:
        """Add trained factors beside the weights of ``layers``. See ``Adaptable``."""
        factors = Factors(getattr(self._module, "tp_group", None))
        dropout = getattr(self._module, "adapter_dropout", None)
        for group in self._groups.values():
            if names := [name for name in group.theirs if name in layers]:
                factors.add(group, names, adapter, start)
                for i, linear in enumerate(group.maps):
                    change = _Change(factors, group, names, i, adapter, dropout)
                    linear.register_forward_hook(change)
        self._module.add_module(PART, factors)
        factors.begin_magnitudes()


class Factors(Nest):
    """Factors of a layer's adapter under their published names, sharded like the weights."""

    def __init__(self, tp_group: Any) -> None:
        super().__init__()
        self.tp_group = tp_group
        self._divided: dict[str, tuple[int, list[int]]] = {}
        self._new: list[tuple[_Group, list[str], float]] = []

    def add(
        self, group: _Group, names: Sequence[str], adapter: Adapter, start: Mapping[str, Tensor]
    ) -> None:
        """Add new factors for ``names`` of ``group``, and magnitudes if the adapter has them."""
        weight = _weight(group.maps[0])
        shape = (group.rows, sum(group.columns), *weight.shape[2:])
        whole = torch.empty(shape, dtype=weight.dtype, device="meta")
        of_shards = getattr(weight, "sequence_parallel", False)
        if group.divided is not None:
            self.tp_group, of_shards = group.tp_group, group.maps[0].sequence_parallel
        for name in names:
            seed = torch.initial_seed()
            made = first_factors(whole, adapter.rank, f"{name}.weight", seed, weight.device, start)
            parts = list(zip((1, 0), factor_names(name), made, strict=True))
            if adapter.type == "dora":
                magnitude = first_magnitude(whole, start.get(magnitude_name(name)), weight.device)
                parts.append((0, magnitude_name(name), magnitude))
            for dim, own, factor in parts:
                if group.divided == dim:
                    segments = group.segments(dim)
                    self._divided[own] = dim, segments
                    factor = nn.Parameter(group.shard(factor.detach(), dim))
                    set_tensor_model_parallel_attributes(factor, True, dim, len(segments))
                else:
                    mark: Any = factor
                    mark.sequence_parallel = of_shards
                register_parameters(self, {own: factor})

        if adapter.type == "dora":
            new = [name for name in names if magnitude_name(name) not in start]
            self._new.append((group, new, adapter.scale))

    @torch.no_grad()
    def begin_magnitudes(self) -> None:
        """Set new magnitudes to the norms of rows. See ``Layer``."""
        for group, names, scale in self._new:
            norms = group.their_rows(self.norms(group, names, scale))
            for name in names:
                magnitude = self.magnitude(name)
                magnitude.copy_(norms[name].view(magnitude.shape))

    @torch.no_grad()
    def norms(self, group: _Group, names: Sequence[str], scale: float) -> Tensor:
        """Norms of this rank's rows of W + scale B A, ``[rows]``; of all columns of all ranks."""
        squares: Any = 0
        for i, linear in enumerate(group.maps):
            weight = _weight(linear).flatten(1)
            pairs = {name: self.pair(name) for name in names}
            changes = {
                name: b.flatten(1) @ group.own_columns(a, i).flatten(1)
                for name, (a, b) in pairs.items()
            }
            if changes:
                weight = weight + scale * group.our_rows(changes, 0)
            wide = torch.promote_types(weight.dtype, torch.float32)
            squares = squares + weight.to(wide).square().sum(1)
        if group.divided == 1 and group.ranks > 1:
            torch.distributed.all_reduce(squares, group=group.tp_group)
        result: Tensor = squares.sqrt().to(_weight(group.maps[0]).dtype)
        return result

    def magnitude(self, name: str) -> nn.Parameter:
        """Magnitudes beside the published layer ``name``."""
        holder, leaf = container_of(self, magnitude_name(name))
        holder()  # see Holder
        return holder._parameters[leaf]

    def pair(self, name: str) -> tuple[nn.Parameter, nn.Parameter]:
        """Factors A and B beside the published layer ``name``."""
        a, b = (container_of(self, factor) for factor in factor_names(name))
        a[0](), b[0]()  # see Holder
        return a[0]._parameters[a[1]], b[0]._parameters[b[1]]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Sharded state for Megatron's checkpoints."""
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {name: dim for name, (dim, _) in self._divided.items()},
            sharded_offsets,
            tp_group=get_tensor_model_parallel_group_if_none(self.tp_group),
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )
        for name, (dim, segments) in self._divided.items():
            if len(segments) > 1:
                ranks, rank = get_pg_size(self.tp_group), get_pg_rank(self.tp_group)
                entry = state[prefix + name]
                state[prefix + name] = _by_segment(entry, dim, segments, ranks, rank)
        return state


def _by_segment(
    entry: ShardedTensor, dim: int, segments: Sequence[int], ranks: int, rank: int
) -> ShardedTensorFactory:
    """Entry of a tensor whose ``segments`` along ``dim`` are each divided over ``ranks``."""
    unit = math.gcd(*segments) // ranks
    positions = [
        (start + rank * size // ranks) // unit + i
        for start, size in zip(accumulate(segments, initial=0), segments, strict=False)
        for i in range(size // ranks // unit)
    ]
    total = sum(segments) // unit

    @torch.no_grad()
    def build(key: str, tensor: Tensor, replica_id: Any, flattened_range: Any) -> Any:
        return [
            ShardedTensor.from_rank_offsets(
                key, piece.contiguous(), (dim, position, total), replica_id=replica_id
            )
            for position, piece in zip(positions, tensor.split(unit, dim), strict=True)
        ]

    @torch.no_grad()
    def merge(pieces: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(pieces), dim)

    return ShardedTensorFactory(entry.key, entry.data, build, merge, replica_id=entry.replica_id)


def factors_beside(linear: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Modules that hold the factors of adapters beside a linear map, and the names there."""
    for hook in linear._forward_hooks.values():
        if isinstance(hook, _Change):
            yield from hook.factors()


class _Change:
    """Forward hook that adds the change of ``names`` to the output of map ``index`` of a group."""

    def __init__(
        self,
        factors: Factors,
        group: _Group,
        names: Sequence[str],
        index: int,
        adapter: Adapter,
        dropout: AdapterDropout | None,
    ) -> None:
        self._factors, self._group, self._names = factors, group, names
        self._index, self._adapter, self._dropout = index, adapter, dropout

    def __call__(self, linear: Any, given: tuple[Any, ...], output: Any) -> Any:
        """See ``torch.nn.Module.register_forward_hook``."""
        if are_disabled():
            return output
        channels, group = 1 if isinstance(linear, nn.Conv2d) else -1, self._group
        pairs = [self._factors.pair(name) for name in self._names]
        inputs = [self._dropped(linear, given[0], name) for name in self._names]
        inner = [
            _product(linear, each, group.own_columns(a, self._index), True)
            for each, (a, _) in zip(inputs, pairs, strict=True)
        ]
        if group.divided is not None:
            inner = list(self._exchange(linear, torch.cat(inner, -1)).chunk(len(inner), -1))
        changes = [_product(linear, t, b, False) for t, (_, b) in zip(inner, pairs, strict=True)]
        change = group.our_rows(dict(zip(self._names, changes, strict=True)), channels)
        change = change * self._adapter.scale
        if self._adapter.type == "dora":
            ratio = self._ratio(channels)
            change = (ratio - 1) * self._base(linear, given[0], inputs, output) + ratio * change
        if isinstance(output, tuple):  # Megatron's linears return their bias apart
            return (output[0] + change, *output[1:])
        return output + change

    def factors(self) -> Iterator[tuple[nn.Module, str]]:
        """Modules that hold the factors and magnitudes, with the parameters' names there."""
        for name in self._names:
            own = [*factor_names(name)]
            own += [magnitude_name(name)] * (self._adapter.type == "dora")
            for holder, leaf in (container_of(self._factors, each) for each in own):
                holder()  # see Holder
                yield holder, leaf

    def _ratio(self, channels: int) -> Tensor:
        """Magnitudes divided by norms, of our rows; 1 beside weights without an adapter."""
        group = self._group
        magnitudes = {n: self._factors.magnitude(n).flatten() for n in self._names}
        norms = self._factors.norms(group, self._names, self._adapter.scale)
        ratio = group.our_rows(magnitudes, 0) / norms
        if len(self._names) < len(group.theirs):
            there = {name: torch.ones_like(m) for name, m in magnitudes.items()}
            ratio = torch.where(group.our_rows(there, 0) > 0, ratio, 1)
        return ratio.view(1, -1, 1, 1) if channels == 1 else ratio

    def _base(self, linear: Any, given: Tensor, inputs: Sequence[Tensor], output: Any) -> Tensor:
        """Output of the frozen map without bias; each published layer's, of its own inputs."""
        if all(each is given for each in inputs):
            return _without_bias(linear, output)
        channels, group = 1 if isinstance(linear, nn.Conv2d) else -1, self._group
        every = [_without_bias(linear, linear.forward(each)) for each in inputs]
        if len(group.theirs) == 1:
            return every[0]
        rows = len(_weight(linear)) // len(group.theirs)
        result: Any = 0
        for name, each in zip(self._names, every, strict=True):
            own = group.our_rows({name: torch.ones_like(each[..., :rows])}, channels)
            result = result + own * each
        return result

    def _dropped(self, linear: Any, inputs: Tensor, name: str) -> Tensor:
        """Inputs of the published layer ``name`` after dropout."""
        if self._dropout is None or not linear.training:
            return inputs
        group = self._group
        of_sequence = group.of_sequence and inputs.dim() == 3  # vectors [b, h] are whole
        shard = None
        if of_sequence or group.divided == 1:
            ranks = get_tensor_model_parallel_group_if_none(
                group.tp_group or self._factors.tp_group
            )
            shard = 0 if of_sequence else -1, get_pg_size(ranks), get_pg_rank(ranks)
        return self._dropout(inputs, f"{name} {self._index}", shard)

    def _exchange(self, linear: Any, inner: Tensor) -> Tensor:
        """Products with A, as this rank multiplies them with B."""
        if self._group.divided == 0:
            shared = (
                gather_from_sequence_parallel_region
                if linear.sequence_parallel
                else copy_to_tensor_model_parallel_region
            )
        else:
            shared = (
                reduce_scatter_to_sequence_parallel_region
                if linear.sequence_parallel
                else reduce_from_tensor_model_parallel_region
            )
        return shared(inner, group=self._group.tp_group)


def _product(linear: Any, given: Tensor, factor: Tensor, first: bool) -> Tensor:
    """Product with a factor; the first of a convolution is like the convolution."""
    if not isinstance(linear, nn.Conv2d):
        return F.linear(given, factor)
    if not first:
        return F.conv2d(given, factor)
    return F.conv2d(given, factor, None, linear.stride, linear.padding, linear.dilation)


def _without_bias(linear: Any, output: Any) -> Tensor:
    """Output of a map without its bias."""
    bias = getattr(linear, "bias", None)
    if isinstance(output, tuple):
        output, apart = output[:2]
        bias = bias if apart is None else None
    if bias is None or not bias.numel():
        return output
    return output - (bias.view(1, -1, 1, 1) if isinstance(linear, nn.Conv2d) else bias)


def _takes_adapter(module: nn.Module | None) -> bool:
    if isinstance(module, nn.Conv2d):
        return bool(module.groups == 1 and module.padding_mode == "zeros")
    if isinstance(module, NonDynamicallyQuantizableLinear):  # torch's attention does not call it
        return False
    return isinstance(module, (nn.Linear, *_COLUMN, *_ROW))


def _group(
    maps: Sequence[nn.Module | None], theirs: Sequence[str], layout: WeightLayout, layer: Layer
) -> _Group | None:
    """Group of linear maps; None if it takes no adapter."""
    found = tuple(linear for linear in maps if linear is not None and _takes_adapter(linear))
    first: Any = found[0]
    divided = 0 if isinstance(first, _COLUMN) else 1 if isinstance(first, _ROW) else None
    beside = isinstance(layout, Concatenated) and layout.dim == 1
    if len(found) < len(maps) or (len(maps) > 1 and not beside):
        return None
    if divided == 0 and not isinstance(layout, _DIVISIBLE):
        return None
    tp_group = first._tp_group if hasattr(first, "_tp_group") else getattr(first, "tp_group", None)
    layers = tuple(name.removesuffix(".weight") for name in theirs)
    if divided is None:  # embedders see whole inputs
        of_sequence = getattr(_weight(first), "sequence_parallel", False) and not layer.embedder
    else:
        of_sequence = divided == 0 and first.sequence_parallel
    return _Group(found, layers, layout, divided, tp_group, of_sequence)


def _weight(linear: Any) -> Tensor:
    return linear.weight
