"""Parameters under dotted names, which may coincide with attributes of the holding module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


class Nest(nn.Module):
    """Module with submodules and parameters of any name, including names of its own attributes.

    Set attributes once before registering submodules.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)


class Holder(nn.Module):
    """Module that holds other modules, or parameters.

    A Holder is called without arguments before its parameters are used. Megatron's forward hooks
    then wait until parameters are gathered.
    """

    def forward(self) -> None:
        """Do nothing; only hooks run."""


def container_of(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Module that holds the dotted ``name`` in ``root``, created if missing, and the last name
    part.
    """
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
    """Register parameters under dotted names; returns the modules in ``root`` that hold them."""
    holders: dict[Holder, None] = {}
    for name, parameter in parameters.items():
        container, leaf = container_of(root, name)
        container._parameters[leaf] = parameter
        if isinstance(container, Holder):
            holders[container] = None
    return tuple(holders)
