"""Arithmetic of low-rank adapters, in the operations and order of peft's LoRA."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

A, B = "lora_A.weight", "lora_B.weight"
"""Names of the two factors below the name of a layer, as in peft."""
PART = "adapter"
"""Part of a hand-written layer's module that holds its factors under their published names."""
_disabled = False


@contextmanager
def adapters_disabled() -> Iterator[None]:
    """Within, all layers of this process compute as the frozen model does, without adapters.

    For forward passes without gradients: a backward pass outside may recompute layers.
    """
    global _disabled
    before, _disabled = _disabled, True
    try:
        yield
    finally:
        _disabled = before


def are_disabled() -> bool:
    """True within ``adapters_disabled``."""
    return _disabled


def is_factor(name: str) -> bool:
    """True if a parameter of this name is a factor of an adapter."""
    return name.endswith((f".{A}", f".{B}"))


def factor_names(weight: str) -> tuple[str, str]:
    """Names of the factors A and B beside the parameter ``weight``."""
    layer = weight.removesuffix(".weight")
    return f"{layer}.{A}", f"{layer}.{B}"


def add_linear(result: Tensor, inputs: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """``result + scale B A x``; A is ``[r, in]``, B ``[out, r]``, ``inputs`` are ``[..., in]``."""
    if _disabled:
        return result
    return result + F.linear(F.linear(inputs, a), b) * scale


def add_conv2d(
    result: Tensor, inputs: Tensor, a: Tensor, b: Tensor, scale: float, settings: Mapping[str, Any]
) -> Tensor:
    """``add_linear`` of a convolution: A ``[r, in, k, k]`` has its ``settings``, B is pointwise."""
    if _disabled:
        return result
    return result + F.conv2d(F.conv2d(inputs, a, **settings), b) * scale


def factor_shapes(weight: Tensor, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of A and B for a weight ``[out, in, *kernel]``."""
    out, *rest = weight.shape
    return (rank, *rest), (out, rank, *(1 for _ in rest[1:]))


def first_factors(
    weight: Tensor,
    rank: int,
    name: str,
    seed: int,
    device: torch.device,
    start: Mapping[str, Tensor],
) -> tuple[nn.Parameter, nn.Parameter]:
    """Factors at ``weight``, whose name is ``name``: those of ``start`` if they are there.

    Otherwise A is uniform as peft draws it, and B zero. A depends on ``seed`` and ``name`` alone,
    and so not on the layout.
    """
    name_a, name_b = factor_names(name)
    if name_a in start and device.type != "meta":
        given = (start[factor].to(device, weight.dtype, copy=True) for factor in (name_a, name_b))
        return nn.Parameter(next(given)), nn.Parameter(next(given))
    shape_a, shape_b = factor_shapes(weight, rank)
    b = nn.Parameter(torch.zeros(shape_b, dtype=weight.dtype, device=device))
    if device.type == "meta":
        return nn.Parameter(torch.empty(shape_a, dtype=weight.dtype, device=device)), b
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = 1 / math.sqrt(math.prod(shape_a[1:]))  # Kaiming's uniform bound with a = sqrt(5)
    a = (torch.rand(shape_a, generator=generator) * 2 - 1) * bound
    return nn.Parameter(a.to(device, weight.dtype)), b


def merged(
    weights: Mapping[str, Tensor], factors: Mapping[str, Tensor], scale: float
) -> dict[str, Tensor]:
    """Those of ``weights`` that have ``factors``, with the effect: ``W + scale B A``, in fp64."""
    found = {}
    for name, weight in weights.items():
        a, b = (factors.get(factor) for factor in factor_names(name))
        if a is not None and b is not None:
            change = b.double().flatten(1) @ a.double().flatten(1)
            found[name] = (weight.double() + scale * change.view(weight.shape)).to(weight.dtype)
    return found
