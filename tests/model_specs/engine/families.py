"""Every family built of Transformer Engine's classes: shapes, dtypes, and the names of what
Megatron notes of each parameter."""

from __future__ import annotations

from typing import Any

import torch

from tests.model_specs.chains import make_context
from tests.runtime.tiny import FAMILIES, backbone


def parameters(family: str, transformer_impl: str) -> dict[str, Any]:
    """Parameters of a small backbone's layers, by name."""
    context = make_context(torch.bfloat16, transformer_impl=transformer_impl)
    return {
        f"{layer.name}.{name}": (
            list(parameter.shape),
            str(parameter.dtype),
            sorted(key for key in vars(parameter) if not key.startswith("_")),
        )
        for layer in backbone(family).layers
        for name, parameter in layer.build(context).named_parameters()
    }


def linears(family: str) -> list[str]:
    """The classes of Transformer Engine in it."""
    context = make_context(torch.bfloat16, transformer_impl="transformer_engine")
    modules = [m for layer in backbone(family).layers for m in layer.build(context).modules()]
    return sorted({type(m).__name__ for m in modules if type(m).__name__.startswith("TE")})


def compared() -> dict[str, dict[str, Any]]:
    """Parameters of each family with local layers and with Transformer Engine's."""
    return {
        family: {
            "local": parameters(family, "local"),
            "transformer_engine": parameters(family, "transformer_engine"),
            "classes": linears(family),
        }
        for family in FAMILIES
    }
