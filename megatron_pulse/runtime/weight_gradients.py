"""Weight gradients that wait: a backward pass split into input gradient and weight gradient.

Within ``deferring(later)`` linear maps and convolutions, torch's and (through the integration)
Megatron's, compute only their input's gradient when the backward pass reaches them, and leave
their weight's to ``later``. Everything else, norms and embeddings, is small and gets its gradient
at once, as do weights of layers whose input wants none. So no operation is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Gradients = Callable[[], tuple[Tensor, ...]]

_later: ContextVar[Later | None] = ContextVar("later", default=None)


class Later:
    """The weight gradients of one stage and microbatch that are still to be computed."""

    def __init__(self) -> None:
        self._work: list[tuple[tuple[nn.Parameter, ...], Gradients]] = []

    def add(self, parameters: tuple[nn.Parameter, ...], gradients: Gradients) -> None:
        """``gradients()`` will give those of ``parameters``."""
        self._work.append((parameters, gradients))

    @property
    def parameters(self) -> set[nn.Parameter]:
        """Whose gradients are still to come."""
        return {p for parameters, _ in self._work for p in parameters}

    def compute(self) -> None:
        """Compute them and add them to the parameters, as a backward pass would."""
        while self._work:
            parameters, gradients = self._work.pop(0)
            torch.autograd.backward(parameters, gradients())


@contextmanager
def deferring(later: Later | None) -> Iterator[None]:
    """Within, weights' gradients are left to ``later``; None changes nothing."""
    if later is None:
        yield
        return
    token = _later.set(later)
    try:
        with _Interception(later):
            yield
    finally:
        _later.reset(token)


def waiting_weights() -> Later | None:
    """Where weight gradients are to be left just now; None outside ``deferring``."""
    return _later.get()


class _Interception(TorchFunctionMode):  # type: ignore[misc]
    """Replaces torch's linear maps and convolutions whose weight gradient can wait."""

    def __init__(self, later: Later) -> None:
        super().__init__()
        self._later = later

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and len(args) >= 2 and can_wait(args[0], args[1]):
            return linear(*args, **kwargs, later=self._later)
        if func is F.conv2d and len(args) == 7 and not kwargs and can_wait(args[0], args[1]):
            image, weight, bias, stride, padding, dilation, groups = args
            if not isinstance(padding, str):
                geometry = _pair(stride), _pair(padding), _pair(dilation), groups
                return _convolution(image, weight, bias, geometry, self._later)
        return func(*args, **kwargs)


def can_wait(given: Tensor, weight: Tensor) -> bool:
    """Whether a product's weight gradient may be put off: its input's carries the graph on."""
    return (
        torch.is_grad_enabled()
        and given.requires_grad
        and isinstance(weight, nn.Parameter)
        and weight.requires_grad
    )


def linear(given: Tensor, weight: Tensor, bias: Tensor | None = None, *, later: Later) -> Tensor:
    """``F.linear`` with its weight's (and bias's) gradient left to ``later``."""

    def input_gradient(gradient: Tensor) -> Tensor:
        return gradient.matmul(weight)

    def weight_gradients(gradient: Tensor, given: Tensor) -> tuple[Tensor, ...]:
        gradient, given = gradient.flatten(0, -2), given.flatten(0, -2)
        product = gradient.t().matmul(given)
        return (product,) if bias is None else (product, gradient.sum(0))

    return _put_off(given, F.linear, (weight, bias), input_gradient, weight_gradients, later)


def _convolution(
    image: Tensor, weight: Tensor, bias: Tensor | None, geometry: Any, later: Later
) -> Tensor:
    stride, padding, dilation, groups = geometry
    shape = image.shape
    sizes = None if bias is None else list(bias.shape)

    def backward(gradient: Tensor, image: Tensor, mask: list[bool]) -> tuple[Tensor, ...]:
        gradients: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            gradient, image, weight, sizes, stride, padding, dilation, False, [0, 0], groups, mask
        )
        return gradients

    def forward(image: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(image, weight, bias, stride, padding, dilation, groups)

    def input_gradient(gradient: Tensor) -> Tensor:
        return backward(gradient, gradient.new_empty(()).expand(shape), [True, False, False])[0]

    def weight_gradients(gradient: Tensor, image: Tensor) -> tuple[Tensor, ...]:
        found = backward(gradient, image, [False, True, bias is not None])
        return found[1:] if bias is not None else found[1:2]

    return _put_off(image, forward, (weight, bias), input_gradient, weight_gradients, later)


def _put_off(
    given: Tensor,
    forward: Callable[..., Tensor],
    parameters: tuple[Tensor, Tensor | None],
    input_gradient: Callable[[Tensor], Tensor],
    weight_gradients: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    later: Later,
) -> Tensor:
    """A node that hands on the input's gradient and remembers how to get the weights'."""
    weight, bias = parameters
    trained = tuple(p for p in parameters if isinstance(p, nn.Parameter))

    class Node(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, given: Tensor) -> Tensor:
            ctx.save_for_backward(given)
            return forward(given, weight, bias)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (given,) = ctx.saved_tensors
            later.add(trained, lambda: weight_gradients(gradient, given))
            return input_gradient(gradient)

    result: Tensor = Node.apply(given)
    return result


def _pair(value: Any) -> list[int]:
    return list(value) if isinstance(value, tuple | list) else [value, value]
