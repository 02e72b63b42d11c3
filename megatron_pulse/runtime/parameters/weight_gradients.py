"""Weight gradients that wait: a backward pass split into input gradient and weight gradient.

Within ``deferring(later)`` linear maps and convolutions, torch's and (through the integration)
Megatron's, compute only their input's gradient when the backward pass reaches them, and leave
their weight's to ``later``. Everything else, norms and embeddings, is small and gets its gradient
at once, as do weights of layers whose input wants none, weights that are computed, what runs
under autocast or in a checkpoint of the layer's own, and weights that another operation uses too,
as far as the layer says so (``undivided``).

Plain linear maps and convolutions take the functions that autograd's own nodes call. Nothing else
here is a second formula: an operation is run as it would be, and its own backward is asked for
some of its gradients at a time. So no operation is computed twice, and the numbers are those of
the whole backward pass to the last bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from megatron_pulse.runtime.failures import PulseError
from megatron_pulse.runtime.parameters.convolutions import CONVOLUTIONS, put_off_convolution
from megatron_pulse.runtime.parameters.later import Later, alone, require_unwritten
from megatron_pulse.runtime.parameters.linear_maps import TORCH, put_off_linear

_OPERATIONS = frozenset({F.linear, *CONVOLUTIONS})
_BACKWARDS = frozenset({Tensor.backward, torch.autograd.backward})
_OPERANDS = ("input", "weight", "bias")
"""Each operation's first arguments; the last may be left out."""

_later: ContextVar[Later | None] = ContextVar("later", default=None)


@contextmanager
def deferring(later: Later | None, but: Iterable[nn.Parameter] = ()) -> Iterator[None]:
    """Within, weights' gradients are left to ``later``, ``but`` for some; None changes nothing."""
    if later is None:
        yield
        return
    later.keep(but)
    token = _later.set(later)
    try:
        with later.entered(), _Interception(later):
            yield
    finally:
        _later.reset(token)


def waiting_weights() -> Later | None:
    """Where weight gradients are to be left just now; None outside ``deferring``."""
    return _later.get()


class SplitCall(ABC):
    """One call of ``operation(given, weight, bias)``, whose gradients can be asked for apart.

    It must not hold what it is given: what ``run`` says is saved comes back, perhaps recomputed.
    A bias that is computed is given like the input, and its gradient does not wait.
    """

    def __init__(self, weight: nn.Parameter, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias_is_computed = _is_computed(bias)
        self.own_bias = None if self.bias_is_computed else bias
        self.bias_waits = self.own_bias is not None and self.own_bias.requires_grad
        self.parameters = (weight, self.own_bias) if self.bias_waits else (weight,)
        """Whose gradients wait."""

    @abstractmethod
    def run(self, given: Tensor, bias: Tensor | None) -> tuple[Tensor, Sequence[Tensor]]:
        """The result, and what the gradients need."""

    @abstractmethod
    def input_gradients(
        self, saved: Sequence[Tensor], gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Of the input and of a computed bias; called first."""

    @abstractmethod
    def weight_gradients(self, saved: Sequence[Tensor], gradient: Tensor) -> tuple[Tensor, ...]:
        """Of ``parameters``; called once, last."""


def put_off(split: SplitCall, given: Tensor, bias: Tensor | None, later: Later) -> Tensor:
    """The result of ``split``; its weights' gradients are left to ``later``."""
    # An input without a gradient would end the graph.
    anchor = None if given.requires_grad else torch.empty(0, requires_grad=True)
    computed = bias if split.bias_is_computed else None
    result: Tensor = _Node.apply(split, later, given, computed, anchor)
    return result


class _Node(torch.autograd.Function):
    """Hands on the input's gradient and remembers how to get the weights'."""

    @staticmethod
    def forward(
        ctx: Any, split: SplitCall, later: Later, given: Tensor, bias: Tensor | None, anchor: Any
    ) -> Tensor:
        ctx.split, ctx.later, ctx.version = split, later, split.weight._version
        ctx.set_materialize_grads(False)
        result, saved = split.run(given, bias)
        ctx.save_for_backward(*saved)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * 5
        split, saved = ctx.split, alone(ctx.saved_tensors)
        if ctx.needs_input_grad[2]:
            require_unwritten(split.weight, ctx.version)
        ctx.later.add(split.parameters, lambda: split.weight_gradients(saved, gradient))
        return (None, None, *split.input_gradients(saved, gradient), None)


class _Interception(TorchFunctionMode):
    """Splits torch's own linear maps and convolutions."""

    def __init__(self, later: Later) -> None:
        super().__init__()
        self._later = later

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _BACKWARDS:
            raise PulseError(
                "a layer adds to gradients while it runs (backward), which a backward pass in two "
                "parts cannot count: ask for them with torch.autograd.grad"
            )
        if func not in _OPERATIONS:
            return func(*args, **kwargs)
        rest = dict(kwargs)
        named = [rest.pop(name, None) for name in _OPERANDS[len(args) :]]
        given, weight, bias = (*args[:3], *named)
        if not self._later.takes(given, weight):
            return func(*args, **kwargs)
        more = args[3:]  # all of args would keep the input alive
        if func is F.linear:
            result = put_off_linear(TORCH, given, weight, bias, self._later)
        else:
            result = put_off_convolution(func, given, weight, bias, more, rest, self._later)
        if result is not None:
            return result

        def operation(given: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            result: Tensor = func(given, weight, bias, *more, **rest)
            return result

        return put_off(_TorchSplit(operation, weight, bias), given, bias, self._later)


class _TorchSplit(SplitCall):
    """An operation of torch's: its own graph, of which autograd computes what is asked for.

    ``operation(given, weight, bias)`` is run on stand-ins that no other graph knows.
    """

    def __init__(
        self, operation: Callable[..., Tensor], weight: nn.Parameter, bias: Tensor | None
    ) -> None:
        super().__init__(weight, bias)
        self._operation = operation
        self._saved = _Saved()

    def run(self, given: Tensor, bias: Tensor | None) -> tuple[Tensor, Sequence[Tensor]]:
        """Run it and keep the graph, but nothing of the input: others hold that."""
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
        """See Split."""
        due = [edge for edge in self._due if edge is not None]
        found = iter(self._backward(saved, gradient, due) if due else ())
        of_given, of_bias = (None if edge is None else next(found) for edge in self._due)
        return of_given, of_bias

    def weight_gradients(self, saved: Sequence[Tensor], gradient: Tensor) -> tuple[Tensor, ...]:
        """See Split."""
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
    """What a graph saves, kept outside of it; parameters stay where they are.

    It knows nothing of the graph, which would be a cycle that no collector finds.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    @contextmanager
    def collecting(self, kept: Sequence[Tensor]) -> Iterator[None]:
        """Within, collect what graphs save beside views of ``kept``."""
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
        """What was collected, which is then no longer held here."""
        taken, self._tensors = self._tensors, []
        return taken

    @contextmanager
    def filled_with(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Within, these are what was collected."""
        self._tensors = list(tensors)
        try:
            yield
        finally:
            self._tensors = []


class _Root(torch.autograd.Function):
    """The same tensor where a new graph begins; unlike a leaf, the graph does not hold it."""

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


def _is_computed(bias: Tensor | None) -> bool:
    return bias is not None and bias.requires_grad and not isinstance(bias, nn.Parameter)
