"""Linear maps of quantised frozen weights.

- ``nf4``: bitsandbytes' 4-bit NormalFloat, with one scale for 64 weights and scales in fp32
  (``Linear4bit`` with ``compress_statistics=False``).
- ``int8``: integers from -127 to 127, with one scale for each output.
- ``fp8``: float8 (e4m3) viewed as int8, with one scale; of a file in float8 its own bytes.

A weight is held by two frozen parameters of integers. The fp32 scales are viewed as int32, because
Megatron's wrappers round every floating-point parameter to the dtype of the run.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_pulse.adapters.quantization import BLOCK

_INT8_MAX = 127
_FLOAT8 = torch.float8_e4m3fn
_FLOAT8_MAX = torch.finfo(_FLOAT8).max
PART = 1 << 20
"""Weights quantised at a time, a multiple of the block: on a CPU they are copied in fp32."""


def quantize(weight: Tensor, kind: str) -> tuple[nn.Parameter, nn.Parameter]:
    """Integers and scales of ``weight`` (``[out, in]``); without values on the meta device.

    They are computed on a GPU if there is one, and are where ``weight`` is.
    """
    place = weight.device
    if torch.cuda.is_available() and not weight.is_meta:
        weight = weight.cuda()
    if weight.is_meta:
        integers, scales = _empty(weight, kind)
    elif kind == "nf4":
        from bitsandbytes.functional import quantize_4bit

        how = {"blocksize": BLOCK, "compress_statistics": False, "quant_type": kind}
        parts = [quantize_4bit(part, **how) for part in weight.reshape(-1).split(PART)]
        integers = torch.cat([packed for packed, _ in parts])
        scales = torch.cat([state.absmax for _, state in parts])
    elif kind == "fp8":
        values = weight.float()
        scales = (values.abs().amax() / _FLOAT8_MAX).reshape(1)
        scales = scales.masked_fill(scales == 0, 1.0)
        integers = (values / scales).to(_FLOAT8).view(torch.int8)
    else:
        values = weight.float()
        scales = values.abs().amax(1)
        factors = (_INT8_MAX / scales).masked_fill(scales == 0, 0.0)
        integers = (values * factors[:, None]).round().to(torch.int8)
    return _held(integers.to(place), scales.to(place), weight.numel())


def held_as_published(values: Tensor, scale: Tensor) -> tuple[nn.Parameter, nn.Parameter]:
    """Integers and scales of a weight that is published in float8."""
    return _held(values.view(torch.int8), scale, values.numel())


def _held(integers: Tensor, scales: Tensor, num_weights: int) -> tuple[nn.Parameter, nn.Parameter]:
    tensors = integers, scales.view(torch.int32)
    held = nn.Parameter(tensors[0], False), nn.Parameter(tensors[1], False)
    for parameter, count in zip(held, (num_weights, 0), strict=True):
        parameter.num_values = count
    return held


def num_values(parameter: Tensor) -> int:
    """Number of weights that a parameter holds."""
    return int(getattr(parameter, "num_values", parameter.numel()))


def is_quantized(parameter: Tensor) -> bool:
    """True for the integers and the scales of a quantised weight."""
    return hasattr(parameter, "num_values")


def dequantize(
    integers: Tensor, scales: Tensor, kind: str, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Weight ``[out, in]`` from its integers and scales."""
    scales = scales.view(torch.float32)
    if kind == "nf4":
        import bitsandbytes  # noqa: F401 - registers its operators

        operands = integers, scales, BLOCK, kind, shape, dtype
        return torch.ops.bitsandbytes.dequantize_4bit(*operands)
    if kind == "fp8":
        return integers.view(_FLOAT8).to(dtype).mul_(scales[0])
    result = torch.empty(shape, dtype=dtype, device=integers.device)
    return torch.mul(integers, (scales / _INT8_MAX)[:, None], out=result)  # without an fp32 copy


def quantized_linear(
    inputs: Tensor,
    integers: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    kind: str,
    shape: tuple[int, ...],
) -> Tensor:
    """``F.linear`` of a quantised weight, which the backward pass dequantises again."""
    result: Tensor = _QuantizedLinear.apply(inputs, integers, scales, bias, kind, shape)
    return result


class _QuantizedLinear(torch.autograd.Function):
    """Keeps the quantised weight alone: autograd would keep the dequantised one of every layer."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        integers: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        kind: str,
        shape: tuple[int, ...],
    ) -> Tensor:
        ctx.save_for_backward(integers, scales)
        ctx.kind, ctx.shape = kind, shape
        return F.linear(inputs, dequantize(integers, scales, kind, shape, inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_inputs = of_bias = None
        if ctx.needs_input_grad[0]:
            integers, scales = ctx.saved_tensors
            weight = dequantize(integers, scales, ctx.kind, ctx.shape, gradient.dtype)
            of_inputs = gradient.matmul(weight)
        if ctx.needs_input_grad[3]:
            of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0)
        return of_inputs, None, None, of_bias, None, None


def _empty(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    if kind == "nf4":
        count = weight.numel()
        integers = weight.new_empty((math.ceil(count / 2), 1), dtype=torch.uint8)
        return integers, weight.new_empty(math.ceil(count / BLOCK), dtype=torch.float32)
    integers = torch.empty_like(weight, dtype=torch.int8)
    if kind == "fp8":
        return integers, weight.new_empty(1, dtype=torch.float32)
    return integers, weight.new_empty(weight.shape[0], dtype=torch.float32)
