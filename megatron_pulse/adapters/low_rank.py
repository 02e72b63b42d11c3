"""Arithmetic of low-rank adapters, in the operations and order of peft's LoRA."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

A, B = "lora_A.weight", "lora_B.weight"
"""Names of the two factors below the name of a layer, as in peft."""
M = "lora_magnitude_vector.weight"
"""Name of DoRA's magnitudes, likewise."""
PRODUCT_PARTS = ("lokr_w1", "lokr_w2", "lokr_w2_a", "lokr_w2_b")
"""Names of LoKr's factors (``kronecker.py``), likewise."""
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


@dataclass
class AdapterDropout:
    """Dropout of the inputs of a layer's adapters, with the same masks in every layout.

    A mask depends on the name of the adapted layer and on ``key``: the run's seed, and the position
    in the run of the microbatch's first sample. None as ``key``: no dropout.
    """

    probability: float
    key: tuple[int, int] | None = (0, 0)

    def __call__(
        self, inputs: Tensor, name: str, shard: tuple[int, int, int] | None = None
    ) -> Tensor:
        """Inputs of layer ``name``, each entry zero or divided by the probability of staying.

        ``shard`` is (dimension, number of ranks, rank) if ranks share the inputs; each draws the
        whole mask.
        """
        if self.key is None:
            return inputs
        dim, ranks, rank = shard or (0, 1, 0)
        shape = list(inputs.shape)
        shape[dim] *= ranks
        noise = torch.empty(shape, dtype=inputs.dtype, device=inputs.device)
        if not noise.is_meta:
            generator = torch.Generator(noise.device)
            generator.manual_seed(seed_of(*self.key, name))
            noise.bernoulli_(1 - self.probability, generator=generator)
        noise.div_(1 - self.probability)
        return inputs * noise.chunk(ranks, dim)[rank]


def drop(inputs: Tensor, dropout: AdapterDropout | None, name: str) -> Tensor:
    """``inputs`` of layer ``name`` after ``dropout``, if there is one."""
    return inputs if dropout is None else dropout(inputs, name)


def seed_of(*parts: object) -> int:
    """Seed that depends on ``parts``."""
    digest = hashlib.sha256(" ".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def is_factor(name: str) -> bool:
    """True if a parameter of this name is a factor, or the magnitudes, of an adapter."""
    return name.endswith(tuple(f".{part}" for part in (A, B, M, *PRODUCT_PARTS)))


def factor_names(weight: str) -> tuple[str, str]:
    """Names of the factors A and B beside the parameter ``weight``."""
    layer = weight.removesuffix(".weight")
    return f"{layer}.{A}", f"{layer}.{B}"


def magnitude_name(weight: str) -> str:
    """Name of DoRA's magnitudes of the parameter ``weight``."""
    return f"{weight.removesuffix('.weight')}.{M}"


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


def add_dora_linear(
    result: Tensor,
    inputs: Tensor,
    dropped: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float,
    magnitude: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """DoRA's output of a linear map whose ``result`` of ``inputs`` includes the ``bias``.

    The added term takes the ``dropped`` inputs, also for its product with ``weight``.
    """
    if _disabled:
        return result
    ratio = (magnitude / row_norms(weight, a, b, scale)).view(1, -1)
    change = F.linear(F.linear(dropped, a), b)
    base = F.linear(dropped, weight) if dropped is not inputs else _without(result, bias)
    return result + ((ratio - 1) * base + ratio * change * scale)


def add_dora_conv2d(
    result: Tensor,
    inputs: Tensor,
    dropped: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float,
    magnitude: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    settings: Mapping[str, Any],
) -> Tensor:
    """``add_dora_linear`` of a convolution with ``settings``."""
    if _disabled:
        return result
    ratio = magnitude / row_norms(weight, a, b, scale)
    change = F.conv2d(F.conv2d(dropped, a, **settings), b)
    if dropped is not inputs:
        base = F.conv2d(dropped, weight, None, **settings)
    else:
        base = _without(result, None if bias is None else bias.view(1, -1, 1, 1))
    return result + ((ratio - 1) * base + ratio * change * scale)


def _without(result: Tensor, bias: Tensor | None) -> Tensor:
    return result if bias is None else result - bias


@torch.no_grad()
def row_norms(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Norms |W + scale B A| of rows, in the shape of magnitudes: ``[out]``, or ``[1, out, 1, 1]``.

    The order of operations is that of peft.
    """
    if weight.dim() == 2:
        change = F.linear(a.T.contiguous(), b).T
        return torch.linalg.norm(weight + scale * change, dim=1).to(weight.dtype)
    rank = len(a)
    change = torch.mm(b.view(-1, rank), a.view(rank, -1)).reshape(weight.shape)
    dims = tuple(range(1, weight.dim()))
    return (weight + scale * change).norm(p=2, dim=dims, keepdim=True).transpose(1, 0)


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
    generator = torch.Generator().manual_seed(seed_of(seed, name))
    bound = 1 / math.sqrt(math.prod(shape_a[1:]))  # Kaiming's uniform bound with a = sqrt(5)
    a = (torch.rand(shape_a, generator=generator) * 2 - 1) * bound
    return nn.Parameter(a.to(device, weight.dtype)), b


def first_magnitude(weight: Tensor, start: Tensor | None, device: torch.device) -> nn.Parameter:
    """DoRA's magnitudes beside ``weight``: those of ``start``, or uninitialised ones."""
    shape = (
        (len(weight),) if weight.dim() == 2 else (1, len(weight), *(1 for _ in weight.shape[2:]))
    )
    values = torch.empty(shape, dtype=weight.dtype, device=device)
    if start is not None and not values.is_meta:
        values.copy_(start.view(shape))
    return nn.Parameter(values)
