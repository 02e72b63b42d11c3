"""Stage of a partitioned backbone as a torch module."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from megatron_pulse.backbone.activations import ActivationPolicies, ActivationPolicy
from megatron_pulse.backbone.build_context import LayerContext
from megatron_pulse.backbone.chain import COMPUTE, Backbone, Layer
from megatron_pulse.backbone.check import BackboneError
from megatron_pulse.backbone.dataflow import shared_inputs
from megatron_pulse.backbone.dropout_key import set_dropout_key
from megatron_pulse.backbone.result_check import TensorMeta, declared, result_mismatch
from megatron_pulse.backbone.rng_state import generators_kept
from megatron_pulse.backbone.shape_buckets import set_shape_index
from megatron_pulse.backbone.token_slices import set_token_slices
from megatron_pulse.planner.layout.crossing import SkipCarrier
from megatron_pulse.planner.layout.routes import Routes, embedders_of
from megatron_pulse.runtime.activations.gradient_hooks import SummedInputCheck
from megatron_pulse.runtime.activations.inplace_check import SharedInputCheck, version_of
from megatron_pulse.runtime.activations.offload import ActivationOffload
from megatron_pulse.runtime.activations.recompute import RecomputedLayer
from megatron_pulse.runtime.activations.selective_recompute import SelectiveRecompute
from megatron_pulse.runtime.failure_board import PulseError
from megatron_pulse.runtime.module_checks import shared_buffers, unsound
from megatron_pulse.runtime.parameters.replicated_embedders import Replicas
from megatron_pulse.runtime.parameters.split_backward import deferring
from megatron_pulse.runtime.parameters.weight_offload import WeightOffload
from megatron_pulse.runtime.parameters.wgrad_queue import WeightGradStore
from megatron_pulse.runtime.random_draws import RngWatch, reserves_numbers
from megatron_pulse.tracing.checks.module_state import kept
from megatron_pulse.tracing.dotted_parameters import (
    Holder,
    Nest,
    container_of,
    register_parameters,
)

Tensors = dict[str, Tensor]


def layer_seed(seed: int, layer_name: str) -> int:
    """Seed of a layer's initial weights; depends on the layer's name, not on its rank."""
    digest = hashlib.sha256(f"{seed}/{layer_name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class UnitSharding(Protocol):
    """Shards the layers of a stage in units (``parameters.fsdp.ShardedUnits``)."""

    faults: list[str]

    def add(self, name: str, layer: nn.Module) -> bool:
        """Add the next layer; True if the parameters of its unit have been replaced."""


class Stage(Nest):
    """Layers ``routes.partition.layers_of_stage(stage)`` of ``backbone``.

    Parameters are named by their layer's global name, so checkpoints do not depend on the
    partition. ``context`` is passed to layer factories.

    Activations of layers, by index in the chain:

    - ``recompute``: only inputs are kept, and activations are recomputed for backward. Backward
      then includes their weight gradients, so that nothing is held any longer.
    - ``offload``: saved tensors are offloaded to the host (``ActivationOffload``).
    - ``selective``: saved tensors that cheap operators can rebuild are dropped
    (``SelectiveRecompute``).

    Token-wise parts of layers run in ``token_slices`` slices.

    Frozen weights of the layers ``offloaded_weights`` are in host memory (``WeightOffload``). All
    frozen weights are cast to ``frozen_dtype`` layer by layer. ``units`` shard the layers as they
    are built.

    A replicated embedder belongs to one stage as any layer, but runs only through ``replicas``.
    ``replicas`` must be set if ``routes`` replicates embedders. ``base`` is passed to the next base
    class, for subclasses that also derive from a Megatron class.
    """

    def __init__(
        self,
        backbone: Backbone,
        routes: Routes,
        stage: int,
        seed: int,
        context: LayerContext | None = None,
        activations: ActivationPolicies | None = None,
        offloaded_weights: Collection[int] = (),
        token_slices: int = 1,
        frozen_dtype: torch.dtype | None = None,
        units: UnitSharding | None = None,
        **base: Any,
    ) -> None:
        super().__init__(**base)
        self.stage = stage
        self._seed = seed
        layers = routes.partition.layers_of_stage(stage)
        activations = activations or ActivationPolicies()
        self.policies = tuple(activations.of(i) for i in layers)
        self.replicas: Replicas | None = None
        self.is_sharded = units is not None
        self._embedders = [backbone.layers[i] for i in embedders_of(backbone, routes, stage)]
        self._replicated = routes.replicated
        shared = shared_inputs(backbone)
        self._shared = [shared[i] for i in layers]
        self._several = {edge.name for edge in backbone.conditioning if len(edge.consumers) > 1}
        self._specs = [backbone.layers[i] for i in routes.partition.layers_of_stage(stage)]
        self._boundary_skips = {
            r.name: r.output_index
            for r in routes.skips_into(stage)
            if r.carrier is SkipCarrier.BOUNDARY
        }
        self._computed = {
            edge.name: None if edge.spec.dtype == COMPUTE else getattr(torch, edge.spec.dtype)
            for edge in backbone.conditioning
        }
        self._taken = {
            name: (i, k)
            for i, layer in enumerate(backbone.layers)
            for k, name in enumerate(layer.pops)
        }
        self._skips_out = tuple(r.name for r in routes.skips_out_of(stage))
        self._provides = tuple(c.name for c in routes.conditioning_out_of(stage))
        self.backbone_name = backbone.name
        self._declared: dict[tuple[int, torch.dtype, int], list[tuple[TensorMeta, ...]]] = {}
        self._known: set[tuple[object, ...]] = set()
        self._reserving: set[str] = set()
        self._settling: set[tuple[object, ...]] = set()
        pairs = zip(self._specs, self.policies, strict=True)
        self._recomputes = {la.name for la, p in pairs if p is ActivationPolicy.RECOMPUTE}
        self.shared_buffers: Mapping[str, Mapping[str, str]] = {}
        self._chain: tuple[nn.Module, ...] = ()  # no list: a ModuleList would rename parameters
        self._holders: dict[str, tuple[Holder, ...]] = {}
        self.weight_offload = WeightOffload()
        unit: list[tuple[Layer, nn.Module]] = []
        for index, spec in zip(layers, self._specs, strict=True):
            own = spec.own(spec.name)
            with generators_kept(seed if spec.qualified else layer_seed(seed, own)):
                module = spec.build(context)
            set_token_slices(module.modules(), token_slices)
            self._register(spec, module)
            self._chain += (module,)
            if frozen_dtype is not None:
                _cast_frozen(module, frozen_dtype)
            if units is not None:
                unit.append((spec, module))
                if units.add(spec.name, module):
                    for each in unit:
                        self._register(*each)
                    unit.clear()
            if index in offloaded_weights and spec.name not in self._replicated:
                self.weight_offload.add(spec.name, module)
        frozen = {spec.name for spec in self._specs if not spec.trained}
        faults = unsound(list(self.named_layers()), frozen)
        if units is not None:
            faults = list(dict.fromkeys([*faults, *units.faults]))
        if faults:
            raise BackboneError(backbone.name, faults)
        self.shared_buffers = shared_buffers(self.named_layers())

    def _register(self, spec: Layer, module: nn.Module) -> None:
        """Register a layer, or its parameters by name, in place of those before."""
        if spec.qualified:
            own = {spec.prefix + name: value for name, value in module.named_parameters()}
            self._holders[spec.name] = register_parameters(self, own)
        else:
            container, leaf = container_of(self, spec.name)
            container._modules[leaf] = module

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the layers, and of the copies of replicated embedders."""
        super().train(mode)
        copies = [] if self.replicas is None else self.replicas.modules()
        for module in (*self._chain, *copies):  # qualified layers are no submodules
            module.train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Cast or move the stage; offloaded weights stay on the host."""
        with self.weight_offload.hidden():
            super()._apply(fn, recurse)
        return self

    def forward(
        self,
        inputs: tuple[Tensor, ...],
        skips: Tensors,
        conditioning: Tensors,
        wgrad_store: WeightGradStore | None = None,
        shape_index: int = 0,
        recomputed: list[RecomputedLayer] | None = None,
        offload: ActivationOffload | None = None,
        position: int | None = None,
    ) -> tuple[tuple[Tensor, ...], Tensors, Tensors]:
        """Run the stage's layers on one microbatch.

        - ``inputs``: boundary tensors.
        - ``skips``: skips popped here and pushed in another stage.
        - ``conditioning``: conditioning used here and computed elsewhere, in fp64 if a layer
          computed it.
        - ``wgrad_store``: queue for weight gradients that can be deferred.
        - ``shape_index``: index of the microbatch's shape among the chain's shapes.
        - ``recomputed``: list to which recomputed layers are appended.
        - ``offload``: recorder of tensors that offloaded layers save.
        - ``position``: position in the run of the first sample; None disables adapter dropout.

        Returns the boundary tensors, the outgoing skips, and the outgoing conditioning (fp64).
        """
        inputs, carried = self._fan_out(inputs, self._boundary_skips)
        skips = {**skips, **carried}
        dropout_key = None if position is None else (self._seed, position)
        if dropout_key is None and torch.is_grad_enabled():
            self._require_positions()
        conditioning = {**conditioning, **self._embed(conditioning, shape_index, dropout_key)}
        dtype = self._dtype(inputs)
        expected = self._kinds(inputs, skips, dtype, shape_index)
        policies = (
            self.policies
            if torch.is_grad_enabled()
            else (ActivationPolicy.KEEP,) * len(self.policies)
        )
        layers = zip(self._specs, self._chain, expected, self._shared, policies, strict=True)
        faults: list[str] = []
        for spec, module, kinds, shared, policy in layers:
            if spec.name in self._replicated:
                continue
            popped = {spec.own(name): _alias(skips.pop(name)) for name in spec.pops}
            used = {
                spec.own(name): self._use(name, conditioning[name], dtype) for name in spec.uses
            }
            inputs = tuple(_alias(tensor) for tensor in inputs)
            for holder in self._holders.get(spec.name, ()):
                holder()
            untouched = SharedInputCheck(spec, shared, inputs, popped, used)
            unhooked = SummedInputCheck(self._summed(spec, shared, inputs, popped, used))
            if policy is ActivationPolicy.RECOMPUTE:
                given = inputs, popped, used
                keys = shape_index, dropout_key
                call = functools.partial(self._run, spec, module, None, *keys, inputs, popped, used)
                state = functools.partial(_state, module, self.is_sharded, *given)
                layer = RecomputedLayer(spec.name, call, state)
                with self._watching(spec, module, shape_index, faults):
                    results = layer.forward()
                if recomputed is not None:
                    recomputed.append(layer)
            else:
                saving: AbstractContextManager[Any] = nullcontext()
                if offload is not None and policy is ActivationPolicy.OFFLOAD:
                    saving = offload.saving(spec.name)
                elif policy is ActivationPolicy.SELECTIVE:
                    if self.is_sharded and hasattr(module, "unshard"):
                        module.unshard()  # to know the parameters that the layer will read
                    saving = SelectiveRecompute(
                        spec.name, module.parameters(), module.buffers()
                    ).saving()
                elif self.weight_offload.offloads(spec.name) and torch.is_grad_enabled():
                    saving = self.weight_offload.saving(spec.name, inputs[0].device)
                with saving, self._watching(spec, module, shape_index, faults):
                    keys = shape_index, dropout_key
                    results = self._run(spec, module, wgrad_store, *keys, inputs, popped, used)
            if fault := untouched.fault() or unhooked.fault():
                raise BackboneError(self.backbone_name, [f"{spec.name} {fault}"])
            results = self._returned(spec, module, inputs, results, kinds)
            inputs = results[: len(spec.outputs)]
            for name, tensor in zip(spec.provides, results[len(spec.outputs) :], strict=True):
                conditioning[name] = summed(tensor)
            inputs, pushed = self._fan_out(inputs, spec.pushes)
            skips.update(pushed)
        self.weight_offload.release()
        if faults:
            raise BackboneError(self.backbone_name, faults)
        return (
            inputs,
            {name: skips[name] for name in self._skips_out},
            {name: conditioning[name] for name in self._provides},
        )

    def _run(
        self,
        spec: Layer,
        module: nn.Module,
        wgrad_store: WeightGradStore | None,
        shape_index: int,
        dropout_key: tuple[int, int] | None,
        inputs: tuple[Tensor, ...],
        *given: Tensors,
    ) -> Any:
        """Run a layer; a recomputation uses the same shape and dropout."""
        set_shape_index(module, shape_index)
        set_dropout_key(module, dropout_key)
        try:
            with (
                self.weight_offload.on_device(spec.name, inputs[0].device),
                deferring(wgrad_store, getattr(module, "undivided", ())),
            ):
                return module(inputs, *given)
        except Exception as error:
            error.add_note(f"layer {spec.name}")
            raise

    def _summed(
        self,
        spec: Layer,
        shared: Mapping[int | str, str],
        inputs: tuple[Tensor, ...],
        popped: Tensors,
        used: Tensors,
    ) -> dict[tuple[str, int | str], Tensor]:
        """Inputs, by kind and name, whose gradient has terms of other layers too."""
        return {
            **{("its input", i): inputs[i] for i in shared if isinstance(i, int)},
            **{("the skip", name): tensor for name, tensor in popped.items()},
            **{
                ("the conditioning", spec.own(name)): used[spec.own(name)]
                for name in spec.uses
                if name in self._several
            },
        }

    def named_layers(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules of the layers by name, in chain order."""
        return zip((spec.name for spec in self._specs), self._chain, strict=True)

    @contextmanager
    def _watching(
        self, spec: Layer, module: nn.Module, shape_index: int, faults: list[str]
    ) -> Iterator[None]:
        """Add to ``faults`` a layer's random draws, and state that it must not change.

        These are parameters that it freezes or unfreezes, buffers of other layers, and, where it is
        recomputed, its Python state. The full check is repeated until the layer has run in its mode
        without a fault, and until what it caches is there.
        """
        key = spec.name, module.training, torch.is_grad_enabled(), shape_index
        first = key not in self._known
        if first and reserves_numbers(module):
            self._reserving.add(spec.name)
        drawing = RngWatch(module, whole=first, gpu=spec.name not in self._reserving)
        before = _trained(module) if first else set()
        shared = self.shared_buffers.get(spec.name, {})
        buffers = _buffers(module) if shared else {}
        set_shape_index(module, shape_index)
        is_repeated = first and spec.name in self._recomputes
        state = kept(module, libraries=False) if is_repeated else {}
        yield
        found = [] if (fault := drawing.fault()) is None else [fault]
        settles = False
        if is_repeated:
            now = kept(module, libraries=False)
            changed = {where for where in state.keys() & now.keys() if state[where] != now[where]}
            caches = state.keys() ^ now.keys()
            settles = bool(caches) and key not in self._settling
            self._settling.add(key)
            names = changed or (set() if settles else caches)
            if names and not found:  # draws change the state of generators
                found.append(
                    f"changes {min(names)} in forward, and would again in the recomputation: its "
                    "activations cannot be recomputed. Exclude it from --pulse-recompute, or make "
                    "the plan with --no-recompute"
                )
        if shared:
            after = _buffers(module)
            found += [
                f"modifies its buffer {name}, which {other} shares. Layers may run in different "
                "processes, so results would depend on the layout. Make a new one in each"
                for name, other in shared.items()
                if buffers.get(name) != after.get(name)
            ]
        if first and (names := before ^ _trained(module)):
            found.append(
                f"sets requires_grad of its parameter {min(names)} in forward, so trained "
                "parameters would depend on the layout. Set it before a step"
            )
        faults += [f"{spec.name} {what}" for what in found]
        if not found and not settles:
            self._known.add(key)

    def _dtype(self, inputs: tuple[Tensor, ...]) -> torch.dtype:
        """dtype in which layers compute: that of boundary tensors, or of parameters."""
        specs = self._specs[0].inputs
        computed = (t.dtype for t, s in zip(inputs, specs, strict=True) if s.dtype == COMPUTE)
        of_parameters = (p.dtype for p in self.parameters() if p.is_floating_point())
        return next(chain(computed, of_parameters), torch.get_default_dtype())

    def _kinds(
        self, inputs: tuple[Tensor, ...], skips: Tensors, dtype: torch.dtype, shape_index: int
    ) -> list[tuple[TensorMeta, ...]]:
        """Expected shapes and dtypes of each layer's results, for these boundary
        tensors and skips.
        """
        specs = self._specs[0].inputs
        popped = [(skips[n], s) for la in self._specs for n, s in la.pops.items() if n in skips]
        sizes = (
            tensor.shape[spec.batch_dim]
            for tensor, spec in (*zip(inputs, specs, strict=True), *popped)
            if spec.batch_dim is not None
        )
        key = next(sizes, 1), dtype, shape_index
        if key not in self._declared:
            self._declared[key] = [declared(spec, *key) for spec in self._specs]
        return self._declared[key]

    def _returned(
        self,
        spec: Layer,
        module: nn.Module,
        inputs: tuple[Tensor, ...],
        results: Any,
        expected: tuple[TensorMeta, ...],
    ) -> tuple[Tensor, ...]:
        """Check a layer's results and bring them into the memory layout of received messages."""
        fault = result_mismatch(results, expected)
        if fault is None and _ends_backward(module, inputs, results):
            fault = "has no output with a gradient: is its output detached?"
        if fault is not None:
            raise BackboneError(self.backbone_name, [f"{spec.name} {fault}"])
        count = len(spec.outputs)
        provided = (_alias(tensor) for tensor in results[count:])
        return tuple(map(in_order, (*results[:count], *provided)))

    def _fan_out(
        self, tensors: tuple[Tensor, ...], skips: Mapping[str, int]
    ) -> tuple[tuple[Tensor, ...], Tensors]:
        """Boundary tensors for the next layer, and the named ``skips`` among them."""
        onward, found = list(tensors), {name: tensors[i] for name, i in skips.items()}
        for i, tensor in enumerate(tensors):
            names = [name for name, index in skips.items() if index == i]
            if len(names) > 1 and tensor.requires_grad:  # with two terms the order does not matter
                names.sort(key=self._taken.__getitem__)
                onward[i], *others = _FanOut.apply(tensor, 1 + len(names))
                found.update(zip(names, others, strict=True))
        return tuple(onward), found

    def _require_positions(self) -> None:
        """Raise BackboneError if a layer has adapter dropout in training."""
        for name, module in self.named_layers():
            if module.training and getattr(module, "adapter_dropout", None) is not None:
                fault = (
                    f"{name} has adapter dropout, whose masks depend on the positions of samples: "
                    "give each microbatch the field 'positions'"
                )
                raise BackboneError(self.backbone_name, [fault])

    def _embed(
        self, conditioning: Tensors, shape_index: int, dropout_key: tuple[int, int] | None
    ) -> Tensors:
        """Conditioning computed by the replicated embedders for this stage, in fp64."""
        provided: Tensors = {}
        for spec in self._embedders:
            if self.replicas is None:
                raise PulseError(f"stage {self.stage} has no copy of {spec.name}")
            fields = {spec.own(name): conditioning[name] for name in spec.uses}
            module = self.replicas.module(spec.name)
            set_shape_index(module, shape_index)
            set_dropout_key(module, dropout_key)
            before, faults = _buffers(module), list[str]()
            with self._watching(spec, module, shape_index, faults):
                results = module((), {}, fields)
            if (after := _buffers(module)) != before:
                written = [name for name in after if after[name] != before.get(name)]
                faults.append(
                    f"{spec.name} modifies its buffer {', '.join(written)}, and every device has "
                    "a copy of it. Send its results (--pulse-conditioning send), or leave buffers "
                    "unchanged"
                )
            if faults:
                raise BackboneError(self.backbone_name, faults)
            provided.update(
                (name, summed(tensor)) for name, tensor in zip(spec.provides, results, strict=True)
            )
        return provided

    def _use(self, name: str, tensor: Tensor, compute: torch.dtype) -> Tensor:
        """Conditioning in the dtype that layers use; layers compute in ``compute``.

        Conditioning computed by a layer has many users. Its gradients are summed in fp64 and
        rounded once, so the sum does not depend on the distribution of users over stages.
        """
        if name not in self._computed:
            return tensor
        dtype = self._computed[name]
        return _alias(tensor).to(compute if dtype is None else dtype)

    def replicated_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of this stage's embedders that run as copies on every device."""
        for name, module in self.named_layers():
            if name in self._replicated:
                yield from module.parameters()


def summed(tensor: Tensor) -> Tensor:
    """Conditioning as stages pass it on: fp64; integers and masks unchanged."""
    return tensor.double() if tensor.is_floating_point() else tensor


def _state(
    module: nn.Module,
    is_sharded: bool,
    inputs: tuple[Tensor, ...],
    popped: Tensors,
    used: Tensors,
) -> Tensors:
    """Tensors, by description, that a recomputed layer must leave unchanged.

    Sharded parameters are other tensors whenever they are gathered.
    """
    own = () if is_sharded else module.named_parameters()
    return {
        **{f"its parameter {name}": parameter for name, parameter in own},
        **{f"its buffer {name}": buffer for name, buffer in module.named_buffers()},
        **{f"its input {i}": tensor for i, tensor in enumerate(inputs)},
        **{f"the skip {name}": tensor for name, tensor in popped.items()},
        **{f"the conditioning {name}": tensor for name, tensor in used.items()},
    }


def _cast_frozen(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the frozen real parameters of a module in place."""
    for parameter in module.parameters():
        if parameter.is_floating_point() and not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def _trained(module: nn.Module) -> set[str]:
    """Names of the parameters that need a gradient."""
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


def _buffers(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Identities and versions of buffers, to detect replacement and in-place writes."""
    return {name: (id(buffer), version_of(buffer)) for name, buffer in module.named_buffers()}


def _alias(tensor: Tensor) -> Tensor:
    """Alias of a tensor with its own autograd node, whose gradient is made contiguous.

    All contributions of a layer to its input's gradient are summed at this node first. A tensor
    that is boundary and skip then always adds two terms, wherever the chain is cut. Sums are
    associated equally under every placement, so gradients are bitwise equal. Contiguous strides
    matter for kernels that round by stride: received messages are contiguous as well.
    """
    if not tensor.requires_grad:
        return tensor
    alias = _Own.apply(tensor) if tensor.is_leaf else tensor.view_as(tensor)
    alias.register_hook(in_order)
    return alias


class _Own(torch.autograd.Function):
    """Identity with the result treated as a layer's output.

    A stage's first layer may then modify its input in place, as elsewhere.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _FanOut(torch.autograd.Function):
    """Several aliases of a tensor, whose gradients are added from first to last.

    The next layer's gradient comes first, followed by those of skips in the order of their
    consumers. A cut may have summed the first terms elsewhere, for a boundary that is also a skip.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, times: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for _ in range(times))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        terms = [gradient for gradient in gradients if gradient is not None]
        return (functools.reduce(torch.add, terms) if terms else None), None


def _ends_backward(
    module: nn.Module, inputs: tuple[Tensor, ...], results: tuple[Tensor, ...]
) -> bool:
    """True if a layer in training returns only results without gradient."""
    if not torch.is_grad_enabled() or any(tensor.requires_grad for tensor in results):
        return False
    return any(tensor.requires_grad for tensor in (*inputs, *module.parameters()))


def in_order(tensor: Tensor) -> Tensor:
    """Contiguous copy with default strides; the tensor itself if it has them already."""
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != step:
            return tensor.clone(memory_format=torch.contiguous_format)
        step *= size or 1
    return tensor
