"""Split backward: input gradients (B) in the backward pass, weight gradients (W) in a queue.

Within ``deferring(wgrad_store)``, linear maps and convolutions of torch and Megatron compute only
their input gradients in backward. Their weight gradients go to ``wgrad_store``. These gradients are
not deferred:

- small ones, of norms and embeddings;
- weights of layers whose input needs no gradient, and computed weights;
- operations under autocast or in a checkpoint of the layer's own;
- weights also used by another operation, as far as the layer declares them (``undivided``).

Plain linear maps and convolutions call the same functions as autograd's own nodes. Any other
operation runs as usual, and its own backward is asked for some gradients at a time. No operation is
computed twice, and results are bitwise those of the whole backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from megatron_pulse.runtime.failure_board import PulseError
from megatron_pulse.runtime.parameters.split_calls import (
    CONVOLUTIONS,
    TORCH,
    SplitCall,
    deferred_call,
    deferred_convolution,
    deferred_linear,
)
from megatron_pulse.runtime.parameters.wgrad_queue import WeightGradStore

_OPERATIONS = frozenset({F.linear, *CONVOLUTIONS})
_BACKWARDS = frozenset({Tensor.backward, torch.autograd.backward})
_OPERANDS = ("input", "weight", "bias")
"""First arguments of each operation; the last is optional."""

_wgrad_store: ContextVar[WeightGradStore | None] = ContextVar("wgrad_store", default=None)


@contextmanager
def deferring(
    wgrad_store: WeightGradStore | None, but: Iterable[nn.Parameter] = ()
) -> Iterator[None]:
    """Defer weight gradients to ``wgrad_store``, except those of ``but``; None changes nothing."""
    if wgrad_store is None:
        yield
        return
    wgrad_store.keep(but)
    token = _wgrad_store.set(wgrad_store)
    try:
        with wgrad_store.entered(), _Interception(wgrad_store):
            yield
    finally:
        _wgrad_store.reset(token)


def current_wgrad_store() -> WeightGradStore | None:
    """Weight-gradient queue of the enclosing ``deferring``; None outside."""
    return _wgrad_store.get()


class _Interception(TorchFunctionMode):
    """Splits torch's linear maps and convolutions."""

    def __init__(self, wgrad_store: WeightGradStore) -> None:
        super().__init__()
        self._wgrad_store = wgrad_store

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _BACKWARDS:
            raise PulseError(
                "a layer calls backward() in forward; a split backward cannot separate those "
                "gradients. Use torch.autograd.grad"
            )
        if func not in _OPERATIONS:
            return func(*args, **kwargs)
        rest = dict(kwargs)
        named = [rest.pop(name, None) for name in _OPERANDS[len(args) :]]
        given, weight, bias = (*args[:3], *named)
        if not self._wgrad_store.defers(given, weight):
            return func(*args, **kwargs)
        more = args[3:]  # keeping all of args would keep the input alive
        if func is F.linear:
            result = deferred_linear(TORCH, given, weight, bias, self._wgrad_store)
        else:
            result = deferred_convolution(func, given, weight, bias, more, rest, self._wgrad_store)
        if result is not None:
            return result

        def operation(given: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            result: Tensor = func(given, weight, bias, *more, **rest)
            return result

        return deferred_call(_TorchSplit(operation, weight, bias), given, bias, self._wgrad_store)


class _TorchSplit(SplitCall):
    """Operation of torch with its own graph; autograd computes some gradients at a time.

    ``operation(given, weight, bias)`` runs on stand-ins that belong to no other graph.
    """

    def __init__(
        self, operation: Callable[..., Tensor], weight: nn.Parameter, bias: Tensor | None
    ) -> None:
        super().__init__(weight, bias)
        self._operation = operation
        self._saved = _Saved()

    def run(self, given: Tensor, bias: Tensor | None) -> tuple[Tensor, Sequence[Tensor]]:
        """Run the operation; keep its graph without the input, which others hold."""
        weight = self.weight.detach().requires_grad_()
        own_bias = self.own_bias
        if own_bias is not None:
            own_bias = own_bias.detach().requires_grad_(own_bias.requires_grad)
        self._waiting = [p for p in (weight, own_bias) if p is not None and p.requires_grad]
        kept = [p for p in (weight, own_bias) if p is not None]
        with torch.enable_grad(), self._saved.collecting(kept):
            given, bias = _stand_in(given), _stand_in(bias)
            result = self._operation(given, weight, own_bias if bias is None else bias)
        self._result = get_gradient_edge(result)
        self._due = [
            None if t is None or not t.requires_grad else get_gradient_edge(t)
            for t in (given, bias)
        ]
        return result.detach(), self._saved.take()

    def input_gradients(
        self, saved: Sequence[Tensor], gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        due = [edge for edge in self._due if edge is not None]
        found = iter(self._backward(saved, gradient, due) if due else ())
        of_given, of_bias = (None if edge is None else next(found) for edge in self._due)
        return of_given, of_bias

    def weight_gradients(self, saved: Sequence[Tensor], gradient: Tensor) -> tuple[Tensor, ...]:
        return self._backward(saved, gradient, self._waiting)

    def _backward(
        self, saved: Sequence[Tensor], gradient: Tensor, of: Sequence[Any]
    ) -> tuple[Tensor, ...]:
        with self._saved.filled_with(saved):
            found: tuple[Tensor, ...] = torch.autograd.grad(
                self._result, of, gradient, retain_graph=of is not self._waiting
            )
            return found


class _Saved:
    """Saved tensors of a graph, kept outside the graph; parameters stay in place.

    It has no reference to the graph, to avoid a cycle that no garbage collector finds.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    @contextmanager
    def collecting(self, kept: Sequence[Tensor]) -> Iterator[None]:
        """Collect saved tensors other than views of ``kept``."""
        storages = {t.untyped_storage().data_ptr() for t in kept}

        def pack(tensor: Tensor) -> Tensor | int:
            if tensor.untyped_storage().data_ptr() in storages:
                return tensor.detach()
            self._tensors.append(tensor.detach())
            return len(self._tensors) - 1

        def unpack(packed: Tensor | int) -> Tensor:
            return self._tensors[packed] if isinstance(packed, int) else packed

        with saved_tensors_hooks(pack, unpack):
            yield

    def take(self) -> list[Tensor]:
        """Return the collected tensors and release them."""
        taken, self._tensors = self._tensors, []
        return taken

    @contextmanager
    def filled_with(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Provide ``tensors`` as the collected ones within the context."""
        self._tensors = list(tensors)
        try:
            yield
        finally:
            self._tensors = []


class _Root(torch.autograd.Function):
    """Identity at the root of a new graph; unlike a leaf, the graph does not keep the tensor."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


def _stand_in(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or not tensor.requires_grad:
        return tensor
    stood: Tensor = _Root.apply(torch.empty(0, requires_grad=True), tensor.detach())
    return stood
