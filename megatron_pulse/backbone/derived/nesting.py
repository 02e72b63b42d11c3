"""Parameters under dotted names, which may be those of attributes of the module that holds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


class Nest(nn.Module):
    """Holds parts and parameters of any name, also such as its own attributes have.

    Attributes are to be set once before parts are registered.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)


class Holder(nn.Module):
    """A part that holds others, or parameters.

    It is called, with nothing, before what uses its parameters: Megatron's hooks of a forward pass
    then wait until they are gathered.
    """

    def forward(self) -> None:
        """Nothing."""


def container_of(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds the dotted ``name`` in ``root``, made where there is none, and the
    last part of the name."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in root._modules:
            root._modules[part] = Holder()  # add_module refuses names of attributes
        inner = root._modules[part]
        assert inner is not None
        root = inner
    return root, leaf


def register_parameters(
    root: nn.Module, parameters: Mapping[str, nn.Parameter]
) -> tuple[Holder, ...]:
    """Register each under its dotted name; what holds them within ``root``."""
    holders: dict[Holder, None] = {}
    for name, parameter in parameters.items():
        container, leaf = container_of(root, name)
        container._parameters[leaf] = parameter
        if isinstance(container, Holder):
            holders[container] = None
    return tuple(holders)
