"""Meta initialisation: modules whose parameters have no memory and whose buffers have values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from megatron_pulse.backbone.cast_floats import cast_floats
from megatron_pulse.tracing.checks.module_state import lazy_modules
from megatron_pulse.tracing.checks.shared_memory import shared_memory
from megatron_pulse.tracing.torch_export import DerivationError


@contextmanager
def replacing_parameters(change: Callable[[nn.Parameter], nn.Parameter]) -> Iterator[None]:
    """Replace each registered parameter by ``change(parameter)``, once per parameter.

    Inactive while other code has replaced ``nn.Module.register_parameter`` since. Libraries do so
    to build a module on the meta device before they read its weights.
    """
    register = nn.Module.register_parameter
    made = WeakIdKeyDictionary()  # weak references do not keep replaced memory alive

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and nn.Module.register_parameter is register_parameter:
            if param not in made:
                made[param] = change(param)
                vars(made[param]).update(
                    vars(param)
                )  # preserves transformers' marks of loaded parameters
            param = made[param]
        register(self, name, param)

    nn.Module.register_parameter = register_parameter
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _to_meta(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.is_meta or is_lazy(parameter):
        return parameter
    return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)


def build_without_memory[T](make: Callable[[], T]) -> T:
    """Return ``make()``, with parameters of created modules on the meta device.

    Initialisation of parameters has no effect. One tensor at a time has memory.
    """
    with replacing_parameters(_to_meta):
        return make()


def release_parameter_memory(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert ``module`` in place to ``dtype``, with CPU parameters without memory.

    Such a module can be exported together with buffers that have values. Raises DerivationError if
    parameters share memory, which would be hidden afterwards, or have no shape yet.
    """
    if faults := list(lazy_modules(module)) or list(shared_memory(module)):
        raise DerivationError(type(module).__name__, faults)
    cast_floats(module, dtype)  # diffusers' ``to`` warns of from_pretrained's conversions
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) not in made:
                tensor = torch.empty_like(parameter, device="cpu")
                tensor.untyped_storage().resize_(0)
                made[id(parameter)] = nn.Parameter(tensor, parameter.requires_grad)
            if parameter is not None:
                part._parameters[name] = made[id(parameter)]
    return module


def has_no_memory(tensor: Tensor) -> bool:
    """True if a tensor has a shape and no values."""
    return bool(tensor.is_meta or tensor.untyped_storage().nbytes() < tensor.nbytes)
