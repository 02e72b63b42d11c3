"""Calls with separable gradients: linear maps, convolutions, and the node that splits any of them.

The node returns the input's gradient in backward, and queues the weights' gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_pulse.runtime.parameters.wgrad_queue import (
    WeightGradStore,
    detached,
    require_unmodified,
)


class SplitCall(ABC):
    """One call of ``operation(given, weight, bias)`` with separable gradients.

    It must not hold its inputs: tensors that ``run`` returns as saved come back, possibly
    recomputed. A computed bias is treated like the input, and its gradient is not deferred.
    """

    def __init__(self, weight: nn.Parameter, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias_is_computed = (
            bias is not None and bias.requires_grad and not isinstance(bias, nn.Parameter)
        )
        self.own_bias = None if self.bias_is_computed else bias
        self.bias_waits = self.own_bias is not None and self.own_bias.requires_grad
        self.parameters = (weight, self.own_bias) if self.bias_waits else (weight,)
        """Parameters with deferred gradients."""

    @abstractmethod
    def run(self, given: Tensor, bias: Tensor | None) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the result and the tensors that the gradients need; ``bias`` if it is computed."""

    @abstractmethod
    def input_gradients(
        self, saved: Sequence[Tensor], gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of the input and of a computed bias; called first."""

    @abstractmethod
    def weight_gradients(self, saved: Sequence[Tensor], gradient: Tensor) -> tuple[Tensor, ...]:
        """Gradients of ``parameters``; called once, last."""


def deferred_call(
    split: SplitCall, given: Tensor, bias: Tensor | None, wgrad_store: WeightGradStore
) -> Tensor:
    """Run ``split`` and defer its weight gradients to ``wgrad_store``."""
    # Without a differentiable input the graph would end here.
    anchor = None if given.requires_grad else torch.empty(0, requires_grad=True)
    computed = bias if split.bias_is_computed else None
    result: Tensor = _Node.apply(split, wgrad_store, given, computed, anchor)
    return result


class _Node(torch.autograd.Function):
    """Returns the input's gradient and enqueues the weights'.

    Parameters are inside ``split``, so that the graph has no edge to them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        split: SplitCall,
        wgrad_store: WeightGradStore,
        given: Tensor,
        bias: Tensor | None,
        anchor: Any,
    ) -> Tensor:
        ctx.split, ctx.wgrad_store, ctx.version = split, wgrad_store, split.weight._version
        ctx.set_materialize_grads(False)
        result, saved = split.run(given, bias)
        ctx.save_for_backward(*saved)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * 5
        split, saved = ctx.split, detached(ctx.saved_tensors)
        if ctx.needs_input_grad[2]:
            require_unmodified(split.weight, ctx.version)
        ctx.wgrad_store.add(split.parameters, lambda: split.weight_gradients(saved, gradient))
        return (None, None, *split.input_gradients(saved, gradient), None)


class LinearMap(NamedTuple):
    """Products of a linear map.

    ``result(given, weight, bias)`` is the output, ``back(gradient, weight)`` the input's gradient.
    The weight's gradient is computed as torch's autograd does.
    """

    result: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    back: Callable[[Tensor, Tensor], Tensor]


def _back(gradient: Tensor, weight: Tensor) -> Tensor:
    product = gradient.reshape(-1, weight.shape[0]).mm(weight)
    return product.view(*gradient.shape[:-1], weight.shape[1])


TORCH = LinearMap(F.linear, _back)


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
    result = deferred_call(_Linear(kind, weight, bias), given, bias, wgrad_store)
    # A view where torch returns a view: gradients of in-place writes accumulate the same way.
    return result.view(*given.shape[:-1], -1) if result.dim() < given.dim() else result


class _Linear(SplitCall):
    """Products bitwise equal to those of a whole backward pass, without their own graph."""

    def __init__(self, kind: LinearMap, weight: nn.Parameter, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self._kind = kind

    def run(self, given: Tensor, bias: Tensor | None) -> tuple[Tensor, Sequence[Tensor]]:
        result = self._kind.result(given, self.weight, self.own_bias)
        return result.flatten(0, -2).detach() if result._is_view() else result, (given,)

    def input_gradients(self, saved: Sequence[Tensor], gradient: Tensor) -> tuple[Tensor, None]:
        shape = *saved[0].shape[:-1], self.weight.shape[0]
        return self._kind.back(gradient.reshape(shape), self.weight), None

    def weight_gradients(self, saved: Sequence[Tensor], gradient: Tensor) -> tuple[Tensor, ...]:
        size_out, size_in = self.weight.shape
        rows = gradient.reshape(-1, size_out)
        of_weight = rows.t().mm(saved[0].view(-1, size_in))
        return (of_weight, rows.sum(0)) if self.bias_waits else (of_weight,)


_PLAIN = ("stride", "padding", "dilation", "groups")
_TRANSPOSED = ("stride", "padding", "output_padding", "groups", "dilation")

CONVOLUTIONS: dict[Callable[..., Tensor], tuple[str, ...]] = {
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _PLAIN),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), _TRANSPOSED),
}
"""Names of each function's arguments after (input, weight, bias), in order."""


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

    return deferred_call(_Convolution(result, how, weight, bias), given, bias, wgrad_store)


def _each(value: int | tuple[int, ...], size: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * size if len(values) == 1 else values


class _Convolution(SplitCall):
    """The calls that autograd makes; ``how`` are arguments of ``convolution_backward``."""

    def __init__(
        self,
        result: Callable[[Tensor, Tensor, Tensor | None], Tensor],
        how: tuple[list[int], list[int], list[int], bool, list[int], int],
        weight: nn.Parameter,
        bias: Tensor | None,
    ) -> None:
        super().__init__(weight, bias)
        self._result, self._how = result, how

    def run(self, given: Tensor, bias: Tensor | None) -> tuple[Tensor, Sequence[Tensor]]:
        return self._result(given, self.weight, self.own_bias), (given,)

    def input_gradients(self, saved: Sequence[Tensor], gradient: Tensor) -> tuple[Tensor, None]:
        return self._gradients(saved, gradient, True, False, False)[0], None

    def weight_gradients(self, saved: Sequence[Tensor], gradient: Tensor) -> tuple[Tensor, ...]:
        found = self._gradients(saved, gradient, False, True, self.bias_waits)
        return tuple(found[1 : 1 + len(self.parameters)])

    def _gradients(self, saved: Sequence[Tensor], gradient: Tensor, *wanted: bool) -> Any:
        sizes = None if self.own_bias is None else self.own_bias.shape
        return torch.ops.aten.convolution_backward(
            gradient, saved[0], self.weight, sizes, *self._how, wanted
        )
