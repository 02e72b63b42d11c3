"""What a layer's module returned, beside what its layer declares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_pulse.backbone.chain import COMPUTE, Layer, TensorSpec

type Kind = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""


def kind_of(spec: TensorSpec, micro_batch_size: int, compute: torch.dtype) -> Kind:
    """What a tensor of ``spec`` is where ``"compute"`` is ``compute``."""
    dtype = compute if spec.dtype == COMPUTE else getattr(torch, spec.dtype)
    return spec.full_shape(micro_batch_size), dtype


def declared(
    layer: Layer, micro_batch_size: int, compute: torch.dtype, which: int = 0
) -> tuple[Kind, ...]:
    """The boundary outputs and what the layer provides, in a microbatch of the shape ``which``."""
    specs = (*layer.outputs, *layer.provides.values())
    return tuple(kind_of(spec.at(which), micro_batch_size, compute) for spec in specs)


def misfit(results: Any, expected: tuple[Kind, ...]) -> str | None:
    """How what a module returned differs from what its layer declares."""
    if not isinstance(results, tuple) or not all(isinstance(t, Tensor) for t in results):
        return f"returns no tuple of tensors but {type(results).__name__}"
    found = tuple((tuple(tensor.shape), tensor.dtype) for tensor in results)
    if found == expected:
        return None
    return f"returns {_kinds(found)}, its layer declares {_kinds(expected)}"


def _kinds(tensors: Sequence[Kind]) -> str:
    texts = [f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in tensors]
    return ", ".join(texts) or "nothing"
