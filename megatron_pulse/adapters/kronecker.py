"""Arithmetic of LoKr adapters: changes of weights that are Kronecker products (2309.14859).

The change of a weight is ``scale W1 (x) W2``. W2 is whole, or the product of two factors where
the rank is small. Names and initial values are those of peft. The product is applied factor by
factor and never formed, so that no activation has the size of a weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_pulse.adapters.adapter import NEAREST
from megatron_pulse.adapters.low_rank import PRODUCT_PARTS, are_disabled, seed_of

W1, W2, W2_A, W2_B = PRODUCT_PARTS
_KERNELS = (1, 9, 25, 49)
"""Positions of the kernels that a file's shapes may hide."""


@dataclass(frozen=True)
class Product:
    """Names of the factors beside a weight, W1 first, and the kernel of its convolution."""

    names: tuple[str, ...]
    kernel: tuple[int, ...]


def divide(size: int, factor: int) -> tuple[int, int]:
    """Two integers whose product is ``size``, as LyCORIS divides a dimension.

    The first is ``factor`` if it divides ``size``. Otherwise it is the largest divisor up to
    ``factor`` and the square root; ``NEAREST`` is no limit.
    """
    if factor > 0 and size % factor == 0:
        return factor, size // factor
    most = math.isqrt(size) if factor == NEAREST else min(factor, math.isqrt(size))
    first = next(d for d in range(most, 0, -1) if size % d == 0)
    return first, size // first


def product_shapes(shape: tuple[int, ...], rank: int, factor: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the factors beside a weight ``[out, in, *kernel]``, by their names."""
    (out_1, out_2), (in_1, in_2) = divide(shape[0], factor), divide(shape[1], factor)
    kernel = shape[2:]
    if 2 * rank >= max(out_2, in_2):
        return {W1: (out_1, in_1), W2: (out_2, in_2, *kernel)}
    return {W1: (out_1, in_1), W2_A: (out_2, rank), W2_B: (rank, in_2 * math.prod(kernel))}


def first_products(
    weight: Tensor,
    rank: int,
    factor: int,
    name: str,
    seed: int,
    device: torch.device,
    start: Mapping[str, Tensor],
) -> dict[str, nn.Parameter]:
    """Factors beside ``weight``, whose name is ``name``, by their names: those of ``start``.

    Otherwise W1 is zero, and the others are uniform as peft draws them. They depend on ``seed``
    and ``name`` alone.
    """
    layer = name.removesuffix(".weight")
    made = {}
    for part, shape in product_shapes(tuple(weight.shape), rank, factor).items():
        own = f"{layer}.{part}"
        value = torch.zeros(shape, dtype=weight.dtype, device=device)
        if own in start and not value.is_meta:
            value.copy_(start[own])
        elif part != W1 and not value.is_meta:
            generator = torch.Generator().manual_seed(seed_of(seed, own))
            bound = 1 / math.sqrt(math.prod(shape[1:]))  # Kaiming's with a = sqrt(5)
            value.copy_((torch.rand(shape, generator=generator) * 2 - 1) * bound)
        made[own] = nn.Parameter(value)
    return made


def add_product(
    result: Tensor,
    inputs: Tensor,
    scale: float,
    kernel: tuple[int, ...],
    settings: Mapping[str, Any],
    w1: Tensor,
    *w2: Tensor,
) -> Tensor:
    """``result`` of a linear map or convolution, and the change's part of it.

    ``w2`` is whole, or its two factors. ``settings`` are those of the convolution.
    """
    if are_disabled():
        return result
    if not kernel:
        values = inputs.unflatten(-1, (w1.shape[1], -1))
        for part in reversed(w2):
            values = F.linear(values, part)
        values = F.linear(values.transpose(-1, -2), w1).transpose(-1, -2)
        return result + values.flatten(-2) * scale
    count = w1.shape[1]
    values = inputs.unflatten(1, (count, -1)).flatten(0, 1)
    first, *second = reversed(w2)
    values = F.conv2d(values, first.view(len(first), -1, *kernel), **settings)
    for part in second:
        values = F.conv2d(values, part[:, :, None, None])
    values = values.unflatten(0, (-1, count))
    values = F.linear(values.movedim(1, -1), w1).movedim(-1, 1)
    return result + values.flatten(1, 2) * scale


def change_of(weight: Tensor, factors: Mapping[str, Tensor], layer: str) -> Tensor | None:
    """``W1 (x) W2`` beside the weight of ``layer`` in fp64; None if ``factors`` has none."""
    w1, w2, a, b = (factors.get(f"{layer}.{part}") for part in PRODUCT_PARTS)
    if w1 is None:
        return None
    if w2 is None:
        assert a is not None and b is not None
        w2 = a.double() @ b.double()
    return torch.kron(w1.double(), w2.double().flatten(1)).view(weight.shape)


def is_whole(factors: Mapping[str, Tensor], layer: str) -> bool:
    """True if W2 of ``layer`` is no product."""
    return f"{layer}.{W2}" in factors


def scaled(factors: Mapping[str, Tensor], of_layer: Callable[[str], float]) -> dict[str, Tensor]:
    """``factors`` with each W1 times a number of its layer."""
    return {
        name: tensor * of_layer(name.removesuffix(f".{W1}")) if name.endswith(f".{W1}") else tensor
        for name, tensor in factors.items()
    }


def factor_of(factors: Mapping[str, Tensor], layers: Iterable[str], rank: int) -> int | None:
    """Factor by which all ``layers`` are divided; None if there is none."""
    shapes = [
        {part: tuple(factors[f"{layer}.{part}"].shape) for part in PRODUCT_PARTS
         if f"{layer}.{part}" in factors}
        for layer in layers
    ]  # fmt: skip
    numbers: set[int] = {size for each in shapes for size in each[W1]}
    for factor in (NEAREST, *sorted(numbers)):
        if all(_fits(each, rank, factor) for each in shapes):
            return factor
    return None


def _fits(shapes: Mapping[str, tuple[int, ...]], rank: int, factor: int) -> bool:
    """True if a weight with these factors is divided by ``factor`` at this rank."""
    out_1, in_1 = shapes[W1]
    if W2 in shapes:
        out_2, columns = shapes[W2][:2]
        kernels = [1]
    else:  # columns include the kernel of a convolution
        out_2, columns = shapes[W2_A][0], shapes[W2_B][1]
        kernels = [k for k in _KERNELS if columns % k == 0]
    return any(
        product_shapes((out_1 * out_2, in_1 * columns // k), rank, factor)
        == _without_kernel(shapes, k)
        for k in kernels
    )


def _without_kernel(
    shapes: Mapping[str, tuple[int, ...]], kernel: int
) -> dict[str, tuple[int, ...]]:
    plain = {part: shape[:2] for part, shape in shapes.items()}
    if W2_B in plain:
        plain[W2_B] = plain[W2_B][0], plain[W2_B][1] // kernel
    return plain
