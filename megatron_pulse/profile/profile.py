"""Costs of every layer of a backbone on a device, at several microbatch sizes. Imports no torch.

Bytes kept from forward to backward (``LayerTimes.saved_bytes``) are storages, each counted once:

- tensors of the layer's own work that autograd saves, without parameters and buffers;
- a boundary tensor counts for the layer that takes it, if this layer or the previous one saves it.
  A boundary tensor that is also a skip always counts, because it is held until it is popped. A skip
  thus counts behind its source, and not again where it is popped;
- conditioning computed by a layer counts for every layer that saves it, because the runtime casts
  it for each user. Conditioning from the batch is shared by all and not counted.

With recomputation a layer keeps exactly its inputs. An input that passed by the previous layer, and
is kept there, counts once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from megatron_pulse.backbone.activations import ActivationPolicies, ActivationPolicy
from megatron_pulse.backbone.build_context import LOCAL, TRANSFORMER_IMPLS
from megatron_pulse.backbone.costs import ChainCosts, SkipCost
from megatron_pulse.errors import UserError, format_faults
from megatron_pulse.profile.context_costs import ContextCosts
from megatron_pulse.profile.layer_records import (
    SPREAD,
    KindTimes,
    LayerTimes,
    ProfiledConditioning,
    ProfiledLayer,
    ProfiledShape,
    ProfiledSkip,
    between,
)
from megatron_pulse.profile.roofline import ELEMENT_BYTES

_MOST = 1e15  # seconds, bytes and parameters; sums and products of such values do not overflow
_MOST_SAMPLES = 1_000_000


class ProfileError(UserError):
    """A profile that cannot be made, read or used; the message lists the reasons."""


class Source(StrEnum):
    """Origin of a profile's numbers."""

    MEASURED = "measured"
    ANALYTIC = "analytic"
    TABLE = "table"


@dataclass(frozen=True)
class Profile:
    """Costs of a backbone's layers on one device, without tensor parallelism.

    - ``backbone``: the backbone's record.
    - ``method``: description of how times were obtained.
    - ``threads``: threads of a process on a CPU (0: a GPU, or unknown).
    - ``transformer_impl``: implementation of linear layers and attention, as Megatron's flag.
    - ``times``: layers' times in chain order, per microbatch size. Times and bytes are without
      recomputation; ``recompute`` is only the default of ``at``.
    - ``shapes``: costs at each sample shape, if there are several. All other fields are then their
      mean (see ``over_shapes``).
    - ``token_slices``: number of slices in which token-wise parts of layers run (1: whole).
    - ``sliced``: ``times`` with other numbers of slices (see ``in_slices``).
    - ``kinds``: costs on each kind of device by name, if a cluster's devices differ. All other
      times are then the largest of any kind (see ``unlike_devices.combine``).
    - ``context``: costs of context parallelism, if they are known.
    - ``sliced_context``: the same with other numbers of slices.

    Raises ProfileError with every fault.
    """

    backbone: Mapping[str, Any]
    source: Source
    device: str
    memory_bytes: int
    dtype: str
    recompute: bool
    method: str
    layers: tuple[ProfiledLayer, ...]
    times: Mapping[int, tuple[LayerTimes, ...]]
    skips: tuple[ProfiledSkip, ...] = ()
    conditioning: tuple[ProfiledConditioning, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    threads: int = 0
    transformer_impl: str = LOCAL
    token_slices: int = 1
    sliced: Mapping[int, Mapping[int, tuple[LayerTimes, ...]]] = field(
        default_factory=dict, repr=False
    )
    shapes: tuple[ProfiledShape, ...] = field(default=(), repr=False)
    kinds: Mapping[str, KindTimes] = field(default_factory=dict, repr=False)
    context: ContextCosts | None = field(default=None, repr=False)
    sliced_context: Mapping[int, ContextCosts] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if faults := list(self._faults()):
            raise ProfileError(format_faults("the profile is not sound", faults))

    @property
    def offloads_weights(self) -> bool:
        """True if frozen weights of any layer are in host memory."""
        return any(layer.offloaded for layer in self.layers)

    @property
    def quantized(self) -> str:
        """Number and bytes of the quantised parameters as text; empty if there are none."""
        count = sum(layer.quantized_parameters for layer in self.layers)
        num_bytes = sum(layer.quantized_bytes for layer in self.layers)
        kind = self.backbone.get("quantization", "integers")
        said = f"{count:,} frozen parameters in {kind}: {num_bytes / 1e6:,.1f} MB"
        return said if count else ""

    @property
    def stored_parameters(self) -> tuple[int, ...]:
        """Parameters of each layer, where quantised ones count as as many as take their bytes."""
        element_bytes = ELEMENT_BYTES[self.dtype]
        return tuple(layer.stored_parameters(element_bytes) for layer in self.layers)

    @property
    def embedders(self) -> frozenset[int]:
        """Indices of the layers that can run on every device."""
        return frozenset(edge.source for edge in self.conditioning if edge.embedder)

    @cached_property
    def selects(self) -> bool:
        """True if costs of selective recomputation are known."""
        return any(layer.selective_bytes for layers in self.times.values() for layer in layers)

    @property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """Profiled microbatch sizes, ascending."""
        return tuple(sorted(self.times))

    def unsteady(self, micro_batch_size: int | None = None) -> tuple[tuple[int, str, float], ...]:
        """Measurements whose interquartile range exceeds ``SPREAD`` of the layer's time.

        Each is (microbatch size, layer, interquartile range over whole time), widest first. Covers
        one size, or all.
        """
        found = [
            (size, layer.name, layer_times.spread)
            for size, column in self.times.items()
            if micro_batch_size in (None, size)
            for layer, layer_times in zip(self.layers, column, strict=True)
            if layer_times.spread > SPREAD
        ]
        return tuple(sorted(found, key=lambda row: -row[2]))

    def extrapolates(self, micro_batch_size: int) -> bool:
        """True if ``micro_batch_size`` lies outside the profiled range."""
        sizes = self.micro_batch_sizes
        return not sizes[0] <= micro_batch_size <= sizes[-1]

    def times_at(self, micro_batch_size: int) -> tuple[LayerTimes, ...]:
        """Times and bytes of every layer at any size: piecewise linear between profiled sizes.

        Outside the range, the line through the two nearest sizes continues, with limits. Fewer
        samples take at least their proportion; more samples take at least as long as the largest
        profiled size. A disturbed measurement thus makes no layer free. A single profiled size is
        scaled in proportion.
        """
        if micro_batch_size < 1:
            raise ValueError(f"the microbatch size is {micro_batch_size}; it must be 1 or more")
        if micro_batch_size not in self._known:
            self._known[micro_batch_size] = self._between(micro_batch_size)
        return self._known[micro_batch_size]

    @cached_property
    def _known(self) -> dict[int, tuple[LayerTimes, ...]]:
        return dict(self.times)

    def _between(self, micro_batch_size: int) -> tuple[LayerTimes, ...]:
        low, high = self._neighbours(micro_batch_size)
        if low is None:
            return tuple(
                between(layer, layer, micro_batch_size / high - 1, proportional=True)
                for layer in self.times[high]
            )
        share = (micro_batch_size - low) / (high - low)
        pairs = zip(self.times[low], self.times[high], strict=True)
        return tuple(between(a, b, share, least=micro_batch_size / low) for a, b in pairs)

    def in_slices(self, token_slices: int) -> Profile:
        """Profile with token-wise parts in slices.

        Raises ProfileError if costs are unknown.
        """
        if token_slices == self.token_slices:
            return self
        if token_slices not in self.sliced:
            raise ProfileError(
                f"the profile has no costs in {token_slices} token slices: make it with 'pulse "
                f"profile --token-slices {token_slices}'"
            )
        others = {**self.sliced, self.token_slices: self.times}
        times = others.pop(token_slices)
        contexts = dict(self.sliced_context)
        if self.context is not None:
            contexts[self.token_slices] = self.context
        return replace(
            self,
            times=times,
            token_slices=token_slices,
            sliced=others,
            context=contexts.pop(token_slices, None),
            sliced_context=contexts,
        )

    def only(self, *micro_batch_sizes: int) -> Profile:
        """Profile at these microbatch sizes alone, interpolated if necessary.

        It is without ``shapes``. Of ``sliced`` it has those of whole layers.
        """

        def of_sizes(profile: Profile) -> dict[int, tuple[LayerTimes, ...]]:
            return {size: profile.times_at(size) for size in micro_batch_sizes}

        kinds = {
            name: replace(kind, times=of_sizes(self.of_kind(name)))
            for name, kind in self.kinds.items()
        }
        times, whole = of_sizes(self), {}
        if 1 in self.sliced:
            whole[1] = of_sizes(self.in_slices(1))
        contexts = {count: own for count, own in self.sliced_context.items() if count in whole}
        return replace(
            self, times=times, sliced=whole, shapes=(), kinds=kinds, sliced_context=contexts
        )

    def of_kind(self, name: str) -> Profile:
        """Profile on one of ``kinds`` alone."""
        kind = self.kinds[name]
        layers = zip(self.layers, kind.optimizer_s, strict=True)
        return replace(
            self,
            device=kind.device,
            times=kind.times,
            layers=tuple(replace(layer, optimizer_s=seconds) for layer, seconds in layers),
            kinds={},
        )

    def at_shape(self, shape_index: int) -> Profile:
        """Profile at one of ``shapes`` alone."""
        shape = self.shapes[shape_index]
        return replace(
            self,
            layers=shape.layers,
            times=shape.times,
            skips=shape.skips,
            conditioning=shape.conditioning,
            context=shape.context,
            shapes=(),
        )

    def with_shapes(self, profiles: Sequence[Profile]) -> Profile:
        """Profile whose ``shapes`` have the costs of ``profiles``, in order."""
        shapes = tuple(
            replace(
                shape,
                layers=own.layers,
                times=own.times,
                skips=own.skips,
                conditioning=own.conditioning,
                context=own.context,
            )
            for shape, own in zip(self.shapes, profiles, strict=True)
        )
        return replace(self, shapes=shapes)

    def all_layers(self, policy: ActivationPolicy) -> ActivationPolicies:
        """``policy`` for every layer of the chain."""
        return ActivationPolicies.all(policy, len(self.layers))

    def at(
        self,
        micro_batch_size: int,
        activations: ActivationPolicies | None = None,
    ) -> ChainCosts:
        """Costs for planning at any microbatch size (see ``times_at``).

        A backward consists of input gradient, weight gradient, and another forward of recomputed
        layers (``recomputed``). Split backwards use their own measurements, but weight gradients of
        recomputed layers are not deferred. Layers in ``selective`` use selective recomputation.
        Layers without backward keep nothing.
        """
        if activations is None:
            default = ActivationPolicy.RECOMPUTE if self.recompute else ActivationPolicy.KEEP
            activations = self.all_layers(default)
        chosen, selective = activations.recompute, activations.selective
        times = self.times_at(micro_batch_size)
        split_s = [layer.parts_s(True) for layer in times]
        boundary = tuple(micro_batch_size * layer.boundary_bytes for layer in self.layers)
        again = [i in chosen and runs for i, runs in enumerate(self.has_backward)]
        part = [i in selective for i in range(len(times))]
        more_s = [
            layer.repeated_s(False) if runs else is_part * layer.selective_s
            for layer, runs, is_part in zip(times, again, part, strict=True)
        ]
        more_split_s = [
            layer.repeated_s(True) if runs else more
            for layer, runs, more in zip(times, again, more_s, strict=True)
        ]
        read = [micro_batch_size * num_bytes for num_bytes in self._read_bytes]
        shared = tuple(
            layer.passed_bytes if i and again[i] and again[i - 1] else 0
            for i, layer in enumerate(times)
        )
        saved = tuple(
            again[i] * (boundary[i] + read[i] - shared[i])
            if i in chosen
            else layer.kept_bytes(part[i])
            for i, layer in enumerate(times)
        )
        made = [layer.recompute_bytes for layer in times]
        if not any(made):
            made = [max(0, x.saved_bytes - n) for x, n in zip(times, saved, strict=True)]
        waiting = [layer.wgrad_bytes for layer in times]
        if not any(waiting):
            waiting = [layer.saved_bytes for layer in times]
        return ChainCosts(
            names=tuple(layer.name for layer in self.layers),
            forward_s=tuple(layer.forward_s for layer in times),
            backward_s=tuple(
                layer.input_grad_s + layer.weight_grad_s + more
                for layer, more in zip(times, more_s, strict=True)
            ),
            parameters=tuple(layer.parameters for layer in self.layers),
            saved_bytes=saved,
            boundary_bytes=tuple(
                0 if layer.begins else taken
                for layer, taken in zip(self.layers, boundary, strict=True)
            ),
            skips=tuple(
                SkipCost(s.source, s.destination, micro_batch_size * s.num_bytes, s.needs_grad)
                for s in self.skips
            ),
            weight_grad_s=tuple(
                0.0 if runs else weight for (_, _, weight), runs in zip(split_s, again, strict=True)
            ),
            split_forward_s=tuple(forward for forward, _, _ in split_s),
            split_backward_s=tuple(
                inputs + weight + more
                for (_, inputs, weight), more in zip(split_s, more_split_s, strict=True)
            ),
            trained=tuple(layer.trained_parameters for layer in self.layers),
            stored=self.stored_parameters if self.quantized else (),
            needs_grad=tuple(layer.needs_grad for layer in self.layers),
            recompute_s=tuple(
                runs * layer.repeated_s(False) for layer, runs in zip(times, again, strict=True)
            ),
            recompute_bytes=tuple(runs * n for runs, n in zip(again, made, strict=True)),
            shared_bytes=shared,
            wgrad_bytes=tuple(0 if runs else n for runs, n in zip(again, waiting, strict=True)),
            starts=tuple(i for i, layer in enumerate(self.layers) if layer.begins or not i),
        )

    @property
    def _read_bytes(self) -> list[int]:
        """Bytes of conditioning that each layer reads per sample."""
        read = [0] * len(self.layers)
        for edge in self.conditioning:
            for i in edge.consumers:
                read[i] += edge.num_bytes
        return read

    @property
    def has_backward(self) -> tuple[bool, ...]:
        """True for each layer that computes a gradient, of parameters or of inputs."""
        given = {skip.destination for skip in self.skips if skip.needs_grad}
        given.update(*(edge.consumers for edge in self.conditioning if edge.needs_grad))
        return tuple(
            layer.needs_grad or layer.trained_parameters > 0 or i in given
            for i, layer in enumerate(self.layers)
        )

    def _neighbours(self, size: int) -> tuple[int | None, int]:
        """Two profiled sizes whose line gives costs at ``size``; (None, the only one)."""
        sizes = self.micro_batch_sizes
        if len(sizes) == 1:
            return None, sizes[0]
        right = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
        return sizes[right - 1], sizes[right]

    def _faults(self) -> Iterator[str]:
        if self.dtype not in ELEMENT_BYTES:
            yield f"dtype is {self.dtype!r}; it must be one of {', '.join(ELEMENT_BYTES)}"
        if self.transformer_impl not in TRANSFORMER_IMPLS:
            known = ", ".join(TRANSFORMER_IMPLS)
            yield f"transformer_impl is {self.transformer_impl!r}; it must be one of {known}"
        yield from _beyond("the profile", self, ("memory_bytes", "threads"))
        if not self.layers:
            yield "there are no layers"
        if not self.times:
            yield "no microbatch size was profiled"
        first: dict[str, int] = {}
        for i, layer in enumerate(self.layers):
            if first.setdefault(layer.name, i) != i:
                yield f"layers {first[layer.name]} and {i} are both named {layer.name!r}"
            counts = "parameters", "boundary_bytes", "sharded_parameters", "optimizer_s"
            yield from _beyond(f"layers[{i}]", layer, (*counts, "quantized_bytes"))
            if not 0 <= layer.sharded_time <= 1:
                yield f"layers[{i}].sharded_time is {layer.sharded_time}; it must be from 0 to 1"
            if not 0 <= layer.frozen_parameters <= max(0, layer.parameters):
                frozen = layer.frozen_parameters
                yield f"layers[{i}].frozen_parameters is {frozen}; it must be 0 to its parameters"
            if not 0 <= layer.quantized_parameters <= max(0, layer.frozen_parameters):
                quantized = layer.quantized_parameters
                yield (
                    f"layers[{i}].quantized_parameters is {quantized}; it must be 0 to its frozen "
                    "parameters"
                )
            sums = layer.shard_sums
            if not all(0 <= n <= _MOST for n in (*sums.rows, *sums.columns, *sums.contexts)):
                yield f"layers[{i}].shard_sums: bytes must be from 0 to {_MOST:g}"
            if not 0 <= (repeated := sums.repeated_rows or 0) <= len(sums.rows):
                most = len(sums.rows)
                yield f"layers[{i}].shard_sums.repeated_rows is {repeated}; must be 0 to {most}"
        computing = {i for i, runs in enumerate(self.has_backward) if runs}
        for size, times in self.times.items():
            if not 1 <= size <= _MOST_SAMPLES:
                yield f"times: the microbatch size {size} must be from 1 to {_MOST_SAMPLES:,}"
            if len(times) != len(self.layers):
                yield f"times[{size}] has {len(times)} layers, expected {len(self.layers)}"
            for i, layer_times in enumerate(times):
                back_s = layer_times.input_grad_s + layer_times.weight_grad_s
                if back_s > 0 and i not in computing:
                    yield f"times[{size}][{i}] has a backward, but nothing there needs a gradient"
                part, saved = layer_times.selective_bytes, layer_times.saved_bytes
                if part > max(0, saved):
                    yield f"times[{size}][{i}].selective_bytes is {part:,}, of {saved:,} saved"
                fields = tuple(LayerTimes.__dataclass_fields__)
                yield from _beyond(f"times[{size}][{i}]", layer_times, fields)
        of_split = {
            layer_times.split_forward_s > 0
            for column in self.times.values()
            for layer_times in column
            if layer_times.forward_s > 0
        }
        if len(of_split) > 1:
            yield "times: split_forward_s is 0 for some layers and not for others"
        for i, skip in enumerate(self.skips):
            yield from self._bad_edge(f"skips[{i}]", skip.source, (skip.destination,))
            yield from _beyond(f"skips[{i}]", skip, ("num_bytes",))
        for i, edge in enumerate(self.conditioning):
            yield from self._bad_edge(f"conditioning[{i}]", edge.source, edge.consumers)
            yield from _beyond(f"conditioning[{i}]", edge, ("num_bytes",))
        sizes = len(self.layers), len(self.skips), len(self.conditioning)
        if self.context is not None:
            yield from self.context.faults(*sizes)
        for count, own in self.sliced_context.items():
            if count not in self.sliced:
                yield f"sliced_context.{count}: sliced has no times in so many slices"
            yield from (f"sliced_context.{count}: {fault}" for fault in own.faults(*sizes))
        yield from self._shape_faults()
        yield from self._sliced_faults()
        yield from self._kind_faults()

    def _sliced_faults(self) -> Iterator[str]:
        if self.token_slices < 1:
            yield f"token_slices is {self.token_slices}; it must be 1 or more"
        if self.sliced and (self.kinds or self.shapes):
            yield "sliced: a profile of several shapes or kinds has none"
        for count, times in self.sliced.items():
            if count < 1 or count == self.token_slices:
                yield f"sliced: {count} slices; allowed are numbers from 1 but token_slices"
            elif tuple(sorted(times)) != self.micro_batch_sizes:
                yield f"sliced.{count} is at other microbatch sizes than those of the profile"
            else:
                try:
                    replace(self, times=times, token_slices=count, sliced={}, sliced_context={})
                except ProfileError as error:
                    yield f"sliced.{count}: {error}"

    def _kind_faults(self) -> Iterator[str]:
        if self.kinds and self.shapes:
            yield "kinds: a profile of several shapes has none"
        for name, kind in self.kinds.items():
            if len(kind.optimizer_s) != len(self.layers):
                yield f"kinds.{name}.optimizer_s is of {len(kind.optimizer_s)} layers"
            elif tuple(sorted(kind.times)) != self.micro_batch_sizes:
                yield f"kinds.{name}.times are at other microbatch sizes than those of the profile"
            else:
                try:
                    self.of_kind(name)
                except ProfileError as error:
                    yield f"kinds.{name}: {error}"

    def _shape_faults(self) -> Iterator[str]:
        names, sizes = [layer.name for layer in self.layers], self.micro_batch_sizes
        for i, shape in enumerate(self.shapes):
            if not 0 < shape.share <= 1:
                yield f"shapes[{i}].share is {shape.share}; it must be above 0 and at most 1"
            if [layer.name for layer in shape.layers] != names:
                yield f"shapes[{i}].layers are others than those of the profile"
            elif tuple(sorted(shape.times)) != sizes:
                yield f"shapes[{i}].times are at other microbatch sizes than those of the profile"
            else:
                try:
                    self.at_shape(i)
                except ProfileError as error:
                    yield f"shapes[{i}]: {error}"

    def _bad_edge(self, where: str, source: int, ends: Sequence[int]) -> Iterator[str]:
        if source < 0:
            yield f"{where}: there is no layer {source}"
        for end in ends:
            if not source < end < len(self.layers):
                yield (
                    f"{where}: from layer {source} to layer {end}, but edges go forward through "
                    f"{len(self.layers)} layers"
                )


def _beyond(where: str, record: object, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        value = getattr(record, name)
        if not 0 <= value <= _MOST:  # NaN fails too
            yield f"{where}.{name} is {value}; it must be from 0 to {_MOST:g}"
