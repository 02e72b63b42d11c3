"""Parameters under dotted names."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


def container_of(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds the dotted ``name`` in ``root``, made where there is none, and the
    last part of the name."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        inner = root._modules[part]
        assert inner is not None
        root = inner
    return root, leaf


def register_parameters(root: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Register each under its dotted name."""
    for name, parameter in parameters.items():
        container, leaf = container_of(root, name)
        container.register_parameter(leaf, parameter)
