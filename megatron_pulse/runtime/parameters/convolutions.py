"""Convolutions whose weight gradients wait: one node, and what autograd's own calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_pulse.runtime.parameters.later import Later, alone, require_unwritten

_PLAIN = ("stride", "padding", "dilation", "groups")
_TRANSPOSED = ("stride", "padding", "output_padding", "groups", "dilation")

CONVOLUTIONS: dict[Callable[..., Tensor], tuple[str, ...]] = {
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _PLAIN),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), _TRANSPOSED),
}
"""What each takes behind (input, weight, bias), in order."""


class _Call(NamedTuple):
    """A convolution but for its tensors: what computes the result, and what its backward takes
    behind gradient, input, weight and the bias's size."""

    result: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    how: tuple[list[int], list[int], list[int], bool, list[int], int]


def put_off_convolution(
    function: Callable[..., Tensor],
    given: Tensor,
    weight: nn.Parameter,
    bias: Tensor | None,
    more: tuple[Any, ...],
    named: Mapping[str, Any],
    later: Later,
) -> Tensor | None:
    """The result of ``function``, one of ``CONVOLUTIONS``, called with ``more`` and ``named``
    behind its operands; its weights' gradients are left to ``later``. None for a bias that is
    computed, a single sample without a dimension of samples, and padding that is named."""
    names = CONVOLUTIONS[function]
    settings = {**dict(zip(names, more, strict=False)), **named}
    padding = settings.get("padding", 0)
    if not (
        given.requires_grad
        and given.dim() == weight.dim()
        and not isinstance(padding, str)
        and (bias is None or isinstance(bias, nn.Parameter))
    ):
        return None
    size = weight.dim() - 2
    how = (
        _each(settings.get("stride", 1), size),
        _each(padding, size),
        _each(settings.get("dilation", 1), size),
        names is _TRANSPOSED,
        _each(settings.get("output_padding", 0), size),
        settings.get("groups", 1),
    )

    def result(given: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return function(given, weight, bias, *more, **named)

    convolved: Tensor = _Convolution.apply(given, (_Call(result, how), weight, bias), later)
    return convolved


def _each(value: int | tuple[int, ...], size: int) -> list[int]:
    """A setting for each of ``size`` dimensions."""
    values = [value] if isinstance(value, int) else list(value)
    return values * size if len(values) == 1 else values


class _Convolution(torch.autograd.Function):
    """Asks the backward of a convolution for its input's gradient, and later for the others."""

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, held: tuple[_Call, nn.Parameter, Any], later: Later
    ) -> Tensor:
        call, weight, bias = ctx.held = held
        ctx.later, ctx.version = later, weight._version
        ctx.save_for_backward(given)
        return call.result(given, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (given,) = alone(ctx.saved_tensors)
        call, weight, bias = ctx.held
        require_unwritten(weight, ctx.version)
        waits = bias is not None and bias.requires_grad
        sizes = None if bias is None else bias.shape

        def gradients(*wanted: bool) -> Any:
            return torch.ops.aten.convolution_backward(
                gradient, given, weight, sizes, *call.how, wanted
            )

        def weight_gradients() -> tuple[Tensor, ...]:
            _, of_weight, of_bias = gradients(False, True, waits)
            return (of_weight, of_bias) if waits else (of_weight,)

        ctx.later.add((weight, bias) if waits else (weight,), weight_gradients)
        return gradients(True, False, False)[0], None, None
