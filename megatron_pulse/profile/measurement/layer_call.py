"""A single layer with random inputs by its specs, its forward and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_pulse.backbone.chain import COMPUTE, Backbone, TensorSpec
from megatron_pulse.backbone.dataflow import required_gradients
from megatron_pulse.backbone.result_check import TensorMeta, declared, result_mismatch, tensor_meta
from megatron_pulse.profile.layer_records import ProfiledConditioning, ProfiledLayer, ProfiledSkip
from megatron_pulse.profile.measurement.module_sizes import ModuleSizes
from megatron_pulse.profile.roofline import ELEMENT_BYTES

type DeferWeightGradients = Callable[[Any], AbstractContextManager[Callable[[], None]]]
"""Context in which a module's forward defers weight gradients.

Yields a function that computes them after backward and adds them to the parameters' gradients.
"""

type Selecting = Callable[[Any], AbstractContextManager[Callable[[], Sequence[Tensor]]]]
"""Context in which a module's forward uses selective recomputation.

Yields a function that returns the tensors kept, once forward has run.
"""


@dataclass(frozen=True)
class ExecutionModes:
    """The runtime's own execution modes, passed in by the runtime."""

    leaving: DeferWeightGradients
    selecting: Selecting


@dataclass(frozen=True)
class LayerCall:
    """A built layer with its inputs; ``shared`` are tensors of the batch."""

    module: Any
    boundary: tuple[Tensor, ...]
    skips: Mapping[str, Tensor]
    conditioning: Mapping[str, Tensor]
    shared: tuple[Tensor, ...]
    expected: tuple[TensorMeta, ...]
    """Shapes and dtypes of the boundary outputs and of provided tensors."""

    @property
    def inputs(self) -> list[Tensor]:
        """Inputs that need a gradient."""
        given = (*self.boundary, *self.skips.values(), *self.conditioning.values())
        return [tensor for tensor in given if tensor.requires_grad]

    @property
    def trained(self) -> list[Tensor]:
        """Parameters that need a gradient."""
        return [p for p in self.module.parameters() if p.requires_grad]

    def forward(self) -> tuple[Tensor, ...]:
        """Run the layer; returns boundary outputs, then provided tensors."""
        results: tuple[Tensor, ...] = self.module(self.boundary, self.skips, self.conditioning)
        return results

    def result_mismatch(self, results: Any) -> str | None:
        """Description of how results differ from the layer's declaration; None if they fit."""
        return result_mismatch(results, self.expected)

    def seeds(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        """Output gradients of ones; None for results without gradient."""
        return [torch.ones_like(t) if t.requires_grad else None for t in results]

    def backward(
        self, results: Sequence[Tensor], seeds: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of ``trained``; those of ``inputs`` are computed and dropped."""
        inputs, trained = self.inputs, self.trained
        return _gradients(results, seeds, [*inputs, *trained])[len(inputs) :]

    def backward_in_turn(self, results: Sequence[Tensor], seeds: Sequence[Tensor | None]) -> None:
        """Backward that drops each parameter's gradient as soon as it is complete."""
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
        """Freeze all parameters within the context, to compute input gradients alone.

        Megatron's linear layers compute both gradients if both are possible, whatever
        torch.autograd.grad requests.
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
    """Layer ``index`` with inputs on ``device``; ``requires_grad`` is set as in training.

    Integers are 1: the second class, or a token that a mask keeps.
    """
    layer, wanted = backbone.layers[index], required_gradients(backbone)
    compute = getattr(torch, dtype)

    def make(spec: TensorSpec, needs_grad: bool) -> Tensor:
        shape, kind = tensor_meta(spec, micro_batch_size, compute)
        if not kind.is_floating_point:
            return torch.ones(shape, dtype=kind, device=device)
        values = torch.randn(shape, dtype=kind, device=device)
        return values.requires_grad_(needs_grad and spec.dtype == COMPUTE)

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
    """Key that is equal for layers that do the same.

    Such layers are built by the same function with the same arguments, between equal tensors that
    need the same gradients.
    """
    layer, wanted = backbone.layers[index], required_gradients(backbone)
    edges = list(layer.pops.values()), sorted(layer.pushes.values()), list(layer.provides.values())
    needs_grad = (
        wanted.boundaries[index],
        [wanted.skips[name] for name in layer.pops],
        [wanted.conditioning.get(name, False) for name in layer.uses],
    )
    parts = (
        layer.build,
        layer.inputs,
        layer.outputs,
        edges,
        layer.uses,
        layer.embedder,
        needs_grad,
    )
    return repr(parts)


def describe_chain(
    backbone: Backbone, sizes: Sequence[ModuleSizes], dtype: str
) -> tuple[tuple[ProfiledLayer, ...], tuple[ProfiledSkip, ...], tuple[ProfiledConditioning, ...]]:
    """Parts of a profile that do not depend on the microbatch size; bytes are per sample."""

    def size(spec: TensorSpec) -> int:
        return spec.bytes_per_sample(ELEMENT_BYTES[dtype])

    wanted = required_gradients(backbone)
    return (
        tuple(
            ProfiledLayer(
                layer.name,
                held.parameters,
                sum(map(size, layer.inputs)),
                held.sharded,
                held.sums,
                frozen_parameters=held.frozen,
                needs_grad=any(needs_grad),
                begins=i > 0 and i in backbone.starts,
                quantized_parameters=held.quantized,
                quantized_bytes=held.quantized_bytes,
            )
            for i, (layer, held, needs_grad) in enumerate(
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
