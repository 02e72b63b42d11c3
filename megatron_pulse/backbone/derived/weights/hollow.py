"""Modules whose parameters have shapes and no memory, and whose buffers have their values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from megatron_pulse.backbone.derived.exported import DerivationError
from megatron_pulse.backbone.derived.refused.lazy import lazy_modules
from megatron_pulse.backbone.derived.refused.shared import shared_memory


@contextmanager
def registering(change: Callable[[nn.Parameter], nn.Parameter]) -> Iterator[None]:
    """Within, modules get what ``change`` makes of a parameter in its place, once for each.

    Where another has replaced ``nn.Module.register_parameter`` since, as those do that make a
    module on the meta device before they read its weights, that one decides.
    """
    register = nn.Module.register_parameter
    made = WeakIdKeyDictionary()  # the memory of what was replaced is not kept

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and nn.Module.register_parameter is register_parameter:
            if param not in made:
                made[param] = change(param)
                vars(made[param]).update(vars(param))  # as transformers' marks of what was read
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


def made_hollow[T](make: Callable[[], T]) -> T:
    """What ``make`` returns; the modules that it makes have parameters on the meta device.

    What initialises parameters does nothing. One tensor at a time has memory.
    """
    with registering(_to_meta):
        return make()


def hollow(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """``module`` in ``dtype``, its parameters on the CPU, but without memory; in place.

    So it can be exported beside buffers that have values. Raises DerivationError if parameters
    share memory, which is not to be seen behind this, or have no shape yet.
    """
    if faults := list(lazy_modules(module)) or list(shared_memory(module)):
        raise DerivationError(type(module).__name__, faults)
    nn.Module.to(module, dtype)  # diffusers' own warns of what from_pretrained would do
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


def is_hollow(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and no values."""
    return bool(tensor.is_meta or tensor.untyped_storage().nbytes() < tensor.nbytes)
