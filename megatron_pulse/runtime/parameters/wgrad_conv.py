"""Convolutions with deferred weight gradients: one autograd node that makes autograd's
own calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_pulse.runtime.parameters.wgrad_queue import (
    WeightGradStore,
    detached,
    require_unmodified,
)

_PLAIN = ("stride", "padding", "dilation", "groups")
_TRANSPOSED = ("stride", "padding", "output_padding", "groups", "dilation")

CONVOLUTIONS: dict[Callable[..., Tensor], tuple[str, ...]] = {
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _PLAIN),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), _TRANSPOSED),
}
"""Names of each function's arguments after (input, weight, bias), in order."""


class _Call(NamedTuple):
    """Convolution without its tensors.

    ``result`` computes the output. ``how`` holds the arguments of ``convolution_backward`` after
    gradient, input, weight and the bias's size.
    """

    result: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    how: tuple[list[int], list[int], list[int], bool, list[int], int]


def deferred_convolution(
    function: Callable[..., Tensor],
    given: Tensor,
    weight: nn.Parameter,
    bias: Tensor | None,
    more: tuple[Any, ...],
    named: Mapping[str, Any],
    wgrad_store: WeightGradStore,
) -> Tensor | None:
    """Run a convolution and defer its weight and bias gradients to ``wgrad_store``.

    ``function`` is one of ``CONVOLUTIONS``, called with ``more`` and ``named`` after its operands.
    Returns None where deferral is not supported: an input without gradient, a computed bias, an
    unbatched input, or padding given by name.
    """
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

    convolved: Tensor = _Convolution.apply(given, (_Call(result, how), weight, bias), wgrad_store)
    return convolved


def _each(value: int | tuple[int, ...], size: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * size if len(values) == 1 else values


class _Convolution(torch.autograd.Function):
    """Computes the input's gradient in backward, and defers the others."""

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, held: tuple[_Call, nn.Parameter, Any], wgrad_store: WeightGradStore
    ) -> Tensor:
        call, weight, bias = ctx.held = held
        ctx.wgrad_store, ctx.version = wgrad_store, weight._version
        ctx.save_for_backward(given)
        return call.result(given, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (given,) = detached(ctx.saved_tensors)
        call, weight, bias = ctx.held
        require_unmodified(weight, ctx.version)
        waits = bias is not None and bias.requires_grad
        sizes = None if bias is None else bias.shape

        def gradients(*wanted: bool) -> Any:
            return torch.ops.aten.convolution_backward(
                gradient, given, weight, sizes, *call.how, wanted
            )

        def weight_gradients() -> tuple[Tensor, ...]:
            _, of_weight, of_bias = gradients(False, True, waits)
            return (of_weight, of_bias) if waits else (of_weight,)

        ctx.wgrad_store.add((weight, bias) if waits else (weight,), weight_gradients)
        return gradients(True, False, False)[0], None, None
