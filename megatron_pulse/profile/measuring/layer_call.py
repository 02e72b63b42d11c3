"""One layer on its own: random inputs by its specs, its forward and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_pulse.backbone.chain import COMPUTE, Backbone, TensorSpec
from megatron_pulse.backbone.gradients import wanted_gradients
from megatron_pulse.backbone.returned import Kind, declared, kind_of, misfit
from megatron_pulse.profile.devices import ELEMENT_BYTES
from megatron_pulse.profile.measuring.sizes import ModuleSizes
from megatron_pulse.profile.record.layers import ProfiledConditioning, ProfiledLayer, ProfiledSkip

type LeavingWeights = Callable[[Any], AbstractContextManager[Callable[[], None]]]
"""Within, a forward of the module that it is given leaves weight gradients that can wait; what it
yields adds them to the parameters' gradients, after the backward."""

type Selecting = Callable[[Any], AbstractContextManager[Callable[[], Sequence[Tensor]]]]
"""Within, a forward of the module that it is given saves nothing that is cheap to have again; what
it yields says after it what is kept."""


@dataclass(frozen=True)
class Running:
    """How the runtime runs layers otherwise than plainly, which the runtime says."""

    leaving: LeavingWeights
    selecting: Selecting


@dataclass(frozen=True)
class LayerCall:
    """A built layer and what it is called with; ``shared`` are tensors of the batch."""

    module: Any
    boundary: tuple[Tensor, ...]
    skips: Mapping[str, Tensor]
    conditioning: Mapping[str, Tensor]
    shared: tuple[Tensor, ...]
    expected: tuple[Kind, ...]
    """Shapes and dtypes of the boundary outputs and of what the layer provides."""

    @property
    def inputs(self) -> list[Tensor]:
        """The inputs whose gradients training needs."""
        given = (*self.boundary, *self.skips.values(), *self.conditioning.values())
        return [tensor for tensor in given if tensor.requires_grad]

    @property
    def trained(self) -> list[Tensor]:
        """The parameters that ask for gradients."""
        return [p for p in self.module.parameters() if p.requires_grad]

    def forward(self) -> tuple[Tensor, ...]:
        """The boundary outputs, then what the layer provides."""
        results: tuple[Tensor, ...] = self.module(self.boundary, self.skips, self.conditioning)
        return results

    def misfit(self, results: Any) -> str | None:
        """How what the module returned differs from what its layer declares."""
        return misfit(results, self.expected)

    def seeds(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        """Output gradients; None where training has none."""
        return [torch.ones_like(t) if t.requires_grad else None for t in results]

    def backward(
        self, results: Sequence[Tensor], seeds: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """The gradients of ``trained``; those of ``inputs`` are computed and dropped."""
        inputs, trained = self.inputs, self.trained
        return _gradients(results, seeds, [*inputs, *trained])[len(inputs) :]

    def backward_in_turn(self, results: Sequence[Tensor], seeds: Sequence[Tensor | None]) -> None:
        """The same, where each parameter's gradient is dropped as soon as it is complete."""
        pairs = [(r, s) for r, s in zip(results, seeds, strict=True) if s is not None]
        if not pairs or not (wanted := [*self.inputs, *self.trained]):
            return
        hooks = [tensor.register_post_accumulate_grad_hook(_drop) for tensor in self.trained]
        torch.autograd.backward(*zip(*pairs, strict=True), inputs=wanted)
        for tensor in self.inputs:
            _drop(tensor)
        for hook in hooks:
            hook.remove()

    def input_gradients(self, results: Sequence[Tensor], seeds: Sequence[Tensor | None]) -> None:
        """Compute the gradients of the inputs and drop them."""
        _gradients(results, seeds, self.inputs)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Within, no parameter asks for a gradient.

        This is how an input gradient is computed alone: Megatron's linear layers compute both
        gradients, whatever torch.autograd.grad asks for, if both could be asked for.
        """
        trained = self.trained
        for parameter in trained:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)


def _drop(tensor: Tensor) -> None:
    tensor.grad = None


def _gradients(
    results: Sequence[Tensor], seeds: Sequence[Tensor | None], wanted: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    given = zip(results, seeds, strict=True)
    pairs = [(r, s) for r, s in given if s is not None and r.requires_grad]
    if not pairs or not wanted:
        return (None,) * len(wanted)
    outputs, output_gradients = zip(*pairs, strict=True)
    return tuple(torch.autograd.grad(outputs, wanted, output_gradients, allow_unused=True))


def make_call(
    backbone: Backbone, index: int, module: Any, micro_batch_size: int, dtype: str, device: Any
) -> LayerCall:
    """Layer ``index`` with inputs on ``device``, of which those ask for a gradient that want one.

    Whole numbers are 1: the second class, a token that a mask keeps.
    """
    layer, wanted = backbone.layers[index], wanted_gradients(backbone)
    compute = getattr(torch, dtype)

    def make(spec: TensorSpec, wants: bool) -> Tensor:
        shape, kind = kind_of(spec, micro_batch_size, compute)
        if not kind.is_floating_point:
            return torch.ones(shape, dtype=kind, device=device)
        values = torch.randn(shape, dtype=kind, device=device)
        return values.requires_grad_(wants and spec.dtype == COMPUTE)

    computed = {edge.name: edge.spec for edge in backbone.conditioning}
    fields = {
        name: make(backbone.batch_fields[name], False)
        for name in layer.uses
        if name not in computed
    }
    given = {
        name: make(computed[name], wanted.conditioning[name])
        for name in layer.uses
        if name in computed
    }
    return LayerCall(
        module,
        tuple(map(make, layer.inputs, wanted.boundaries[index])),
        {layer.own(name): make(spec, wanted.skips[name]) for name, spec in layer.pops.items()},
        {layer.own(name): tensor for name, tensor in {**fields, **given}.items()},
        tuple(fields.values()),
        declared(layer, micro_batch_size, compute),
    )


def layer_kind(backbone: Backbone, index: int) -> str:
    """The same for layers that do the same: built by the same function of the same arguments,
    between the same tensors, of which the same want a gradient."""
    layer, wanted = backbone.layers[index], wanted_gradients(backbone)
    edges = list(layer.pops.values()), sorted(layer.pushes.values()), list(layer.provides.values())
    wants = (
        wanted.boundaries[index],
        [wanted.skips[name] for name in layer.pops],
        [wanted.conditioning.get(name, False) for name in layer.uses],
    )
    parts = (layer.build, layer.inputs, layer.outputs, edges, layer.uses, layer.embedder, wants)
    return repr(parts)


def describe_chain(
    backbone: Backbone, sizes: Sequence[ModuleSizes], dtype: str
) -> tuple[tuple[ProfiledLayer, ...], tuple[ProfiledSkip, ...], tuple[ProfiledConditioning, ...]]:
    """What a profile says of a chain whatever the microbatch size; bytes per sample."""

    def size(spec: TensorSpec) -> int:
        return spec.bytes_per_sample(ELEMENT_BYTES[dtype])

    wanted = wanted_gradients(backbone)
    return (
        tuple(
            ProfiledLayer(
                layer.name,
                held.parameters,
                sum(map(size, layer.inputs)),
                held.sharded,
                held.sums,
                frozen_parameters=held.frozen,
                wants=any(wants),
                begins=i > 0 and i in backbone.starts,
            )
            for i, (layer, held, wants) in enumerate(
                zip(backbone.layers, sizes, wanted.boundaries, strict=True)
            )
        ),
        tuple(
            ProfiledSkip(
                skip.name, skip.source, skip.destination, size(skip.spec), wanted.skips[skip.name]
            )
            for skip in backbone.skips
        ),
        tuple(
            ProfiledConditioning(
                edge.name,
                edge.source,
                edge.consumers,
                size(edge.spec),
                backbone.layers[edge.source].embedder,
                wanted.conditioning[edge.name],
            )
            for edge in backbone.conditioning
        ),
    )
