"""Check of a layer module's results against the layer's declaration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_pulse.backbone.chain import COMPUTE, Layer, TensorSpec

type TensorMeta = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""


def tensor_meta(spec: TensorSpec, micro_batch_size: int, compute: torch.dtype) -> TensorMeta:
    """Shape and dtype of a tensor of ``spec``, with ``compute`` as dtype ``"compute"``."""
    dtype = compute if spec.dtype == COMPUTE else getattr(torch, spec.dtype)
    return spec.full_shape(micro_batch_size), dtype


def declared(
    layer: Layer, micro_batch_size: int, compute: torch.dtype, shape_index: int = 0
) -> tuple[TensorMeta, ...]:
    """Shapes and dtypes of boundary outputs and provided tensors, for one of the shapes."""
    specs = (*layer.outputs, *layer.provides.values())
    return tuple(tensor_meta(spec.at(shape_index), micro_batch_size, compute) for spec in specs)


def result_mismatch(results: Any, expected: tuple[TensorMeta, ...]) -> str | None:
    """Description of the difference between a module's results and the declaration;
    None if equal.
    """
    if not isinstance(results, tuple) or not all(isinstance(t, Tensor) for t in results):
        return f"must return a tuple of tensors, returned {type(results).__name__}"
    found = tuple((tuple(tensor.shape), tensor.dtype) for tensor in results)
    if found == expected:
        return None
    return f"returns {_kinds(found)}, its layer declares {_kinds(expected)}"


def _kinds(tensors: Sequence[TensorMeta]) -> str:
    texts = [f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in tensors]
    return ", ".join(texts) or "nothing"
