"""Replicated embedders: copies on every pipeline device of parameters owned by one device.

The owner's stage holds the parameters for optimizer, checkpoint and gradient norm, so nothing is
counted twice. Every device, the owner included, computes with a copy. Copies are refreshed when a
step begins. At its end their gradients are summed over the pipeline and passed to the owner's
parameters as one backward pass. The data-parallel reduction then starts as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron_pulse.backbone.build_context import LayerContext
from megatron_pulse.backbone.cast_floats import cast_floats
from megatron_pulse.backbone.chain import Backbone, Layer
from megatron_pulse.backbone.rng_state import generators_kept
from megatron_pulse.planner.layout.routes import Routes
from megatron_pulse.runtime.p2p.transfers import Links


class Replicas:
    """This device's copies of the embedders that ``routes`` replicates.

    ``owned`` maps embedders owned by this device to their modules. ``before_reading`` is called
    with such a module before its parameters are read, since Megatron may still be gathering them.
    """

    def __init__(
        self,
        backbone: Backbone,
        routes: Routes,
        device: int,
        context: LayerContext | None,
        owned: Mapping[str, nn.Module],
        links: Links,
        dtype: torch.dtype,
        torch_device: torch.device,
        before_reading: Callable[[nn.Module], None] = lambda module: None,
    ) -> None:
        self._links = links
        self._owned = owned
        self._before_reading = before_reading
        self._has_buffers = False  # the owners' buffers, which may be random
        self._copies: dict[str, _Copy] = {}
        placement = routes.partition.placement
        for i, layer in enumerate(backbone.layers):
            if layer.name in routes.replicated:
                owner = placement.device_of_stage[routes.partition.stage_of_layer(i)]
                if (owner == device) != (layer.name in owned):
                    raise ValueError(f"device {owner} owns {layer.name}, not device {device}")
                module = _empty(layer, context, torch_device)
                module = cast_floats(module, dtype, torch_device)
                self._copies[layer.name] = _Copy(module, owner)

    def module(self, name: str) -> Any:
        """This device's copy of the embedder ``name``."""
        return self._copies[name].module

    def modules(self) -> list[nn.Module]:
        """All copies on this device."""
        return [copy.module for copy in self._copies.values()]

    def refresh(self) -> None:
        """Copy the owners' parameters into every copy. Collective over the pipeline."""
        for name, copy in self._copies.items():
            parameters = copy.parameters
            if not self._has_buffers and (buffers := dict(copy.module.named_buffers())):
                own = self._owned[name] if name in self._owned else copy.module
                found = {at: buffer.cpu() for at, buffer in own.named_buffers()}
                found = self._links.broadcast_object(found, copy.owner, f"the buffers of {name}")
                _fill(buffers, found)
            if name in self._owned:
                self._before_reading(self._owned[name])
                parameters = list(self._owned[name].parameters())
            if not parameters:
                continue
            values = _flat([parameter.detach() for parameter in parameters])
            self._links.broadcast(values, copy.owner, f"the parameters of {name}")
            copy.load(values)
        self._has_buffers = True

    def load_buffers(self, state: Mapping[str, Tensor]) -> None:
        """Load the copies' buffers from a whole model's state."""
        for name, copy in self._copies.items():
            own, before = dict(copy.module.named_buffers()), f"{name}."
            found = {key.removeprefix(before): value for key, value in state.items()}
            _fill({at: own[at] for at in own.keys() & found.keys()}, found)

    def return_gradients(self) -> None:
        """Sum the copies' gradients into the owners' parameters. Collective over the pipeline."""
        for name, copy in self._copies.items():
            if not copy.gradients:
                continue
            gradients = _flat(copy.gradients)
            self._links.reduce(gradients, copy.owner, f"the gradients of {name}")
            if name in self._owned:
                parameters = _trained(self._owned[name])
                _backward(parameters, _split(gradients, parameters))
            copy.clear()


class _Copy:
    """A copy's module, with gradients of its trainable parameters summed in at least fp32."""

    def __init__(self, module: nn.Module, owner: int) -> None:
        self.module = module
        self.owner = owner
        self.parameters = list(module.parameters())
        self.gradients = []
        for parameter in _trained(module):
            wide = torch.promote_types(parameter.dtype, torch.float32)
            total = torch.zeros_like(parameter, dtype=wide)
            parameter.register_post_accumulate_grad_hook(moves_gradient(total))
            self.gradients.append(total)

    def load(self, values: Tensor) -> None:
        with torch.no_grad():
            for parameter, value in zip(
                self.parameters, _split(values, self.parameters), strict=True
            ):
                parameter.copy_(value)

    def clear(self) -> None:
        for total in self.gradients:
            total.zero_()


def _fill(buffers: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in buffers.items():
            buffer.copy_(values[name])


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def moves_gradient(total: Tensor) -> Callable[[Tensor], None]:
    """Hook that adds a parameter's gradient of one microbatch to ``total`` and clears it."""

    def move(parameter: Tensor) -> None:
        assert parameter.grad is not None
        total.add_(parameter.grad)
        parameter.grad = None

    return move


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _split(values: Tensor, like: list[nn.Parameter]) -> list[Tensor]:
    parts = values.split([tensor.numel() for tensor in like])
    return [part.view_as(tensor) for part, tensor in zip(parts, like, strict=True)]


def _backward(parameters: list[nn.Parameter], gradients: list[Tensor]) -> None:
    """Backpropagate given gradients; Megatron's fp32 ``main_grad`` gets them unrounded."""
    given = []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if getattr(parameter, "main_grad", None) is not None:
            parameter.main_grad.add_(gradient)
            parameter.grad_added_to_main_grad = True
            gradient = torch.zeros_like(gradient)
        given.append(gradient.to(parameter.dtype))
    torch.autograd.backward(parameters, given)


def _empty(layer: Layer, context: LayerContext | None, device: torch.device) -> nn.Module:
    """Module with uninitialised parameters; the owner's are copied before use."""
    with generators_kept():
        if not layer.qualified:
            module: nn.Module = layer.build(context)
            return module
        with torch.device(
            "meta"
        ):  # qualified layers have no buffers, and initialisation may be expensive
            module = layer.build(context)
    return module.to_empty(device=device)
