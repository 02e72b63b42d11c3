"""Linear layers with deferred weight gradients: one autograd node and autograd's two products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_pulse.runtime.parameters.wgrad_queue import (
    WeightGradStore,
    detached,
    require_unmodified,
)


class LinearMap(NamedTuple):
    """Products of a linear map.

    ``result(given, weight, bias)`` is the output, ``back(gradient, weight)`` the input's gradient.
    The weight's gradient is computed as torch's autograd does.
    """

    result: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    back: Callable[[Tensor, Tensor], Tensor]


def deferred_linear(
    kind: LinearMap,
    given: Tensor,
    weight: nn.Parameter,
    bias: Tensor | None,
    wgrad_store: WeightGradStore,
) -> Tensor | None:
    """Run a linear map and defer its weight and bias gradients to ``wgrad_store``.

    Returns None where a whole backward pass would use other operands or strides than input rows
    times weight.
    """
    if not (
        given.requires_grad
        and given.dim() in ((2, 3) if bias is not None else (2, 3, 4))
        and given.is_contiguous()
        and weight.is_contiguous()
        and min(weight.shape) > 1
        and given.numel() > given.shape[-1]
        and given.dtype == weight.dtype
        and (bias is None or (isinstance(bias, nn.Parameter) and bias.dtype == weight.dtype))
    ):
        return None
    result: Tensor = _Linear.apply(given, (kind, weight, bias), wgrad_store)
    # A view where torch returns a view: gradients of in-place writes accumulate the same way.
    return result.view(*given.shape[:-1], -1) if result.dim() < given.dim() else result


class _Linear(torch.autograd.Function):
    """Products bitwise equal to those of a whole backward pass, without their own graph.

    Parameters are passed in a tuple, so that the graph has no edge to them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        given: Tensor,
        held: tuple[LinearMap, nn.Parameter, Any],
        wgrad_store: WeightGradStore,
    ) -> Tensor:
        kind, weight, bias = ctx.held = held
        ctx.wgrad_store, ctx.version = wgrad_store, weight._version
        ctx.save_for_backward(given)
        result = kind.result(given, weight, bias)
        return result.flatten(0, -2).detach() if result._is_view() else result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (given,) = detached(ctx.saved_tensors)
        kind, weight, bias = ctx.held
        require_unmodified(weight, ctx.version)
        gradient = gradient.reshape(*given.shape[:-1], weight.shape[0])
        waits = bias is not None and bias.requires_grad

        def weight_gradients() -> tuple[Tensor, ...]:
            rows = gradient.reshape(-1, weight.shape[0])
            of_weight = rows.t().mm(given.view(-1, weight.shape[1]))
            return (of_weight, rows.sum(0)) if waits else (of_weight,)

        ctx.wgrad_store.add((weight, bias) if waits else (weight,), weight_gradients)
        return kind.back(gradient, weight), None, None


def _back(gradient: Tensor, weight: Tensor) -> Tensor:
    product = gradient.reshape(-1, weight.shape[0]).mm(weight)
    return product.view(*gradient.shape[:-1], weight.shape[1])


TORCH = LinearMap(F.linear, _back)
