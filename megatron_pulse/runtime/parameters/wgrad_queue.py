"""Weight-gradient queue: deferred weight gradients of a stage and microbatch (zero-bubble's W)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron_pulse.runtime.failure_board import PulseError

Gradients = Callable[[], tuple[Tensor, ...]]

_TOGETHER_BYTES = 1 << 24
"""Bytes of gradients added to their parameters at a time; each addition costs host time."""


class WeightGradStore:
    """Weight-gradient queue of one stage and microbatch."""

    def __init__(self) -> None:
        self._work: list[tuple[tuple[nn.Parameter, ...], Gradients]] = []
        self._waits: dict[nn.Parameter, bool] = {}
        self._hooks: Any = None
        self._inside = False
        self._pass: int | None = None

    def defers(self, given: Tensor, weight: Tensor) -> bool:
        """True if the gradient of ``weight`` in a product with ``given`` is deferred.

        The input's gradient must continue the graph. Later uses of a weight follow its first use.
        Autograd sums a weight's gradients within one backward pass before it accumulates the sum.
        """
        if not (
            torch.is_grad_enabled() and isinstance(weight, nn.Parameter) and weight.requires_grad
        ):
            return False
        device = given.device.type
        can_wait = _saving_hooks() == self._hooks and not (
            torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        )
        return self._waits.setdefault(weight, can_wait and given.requires_grad) and can_wait

    def keep(self, parameters: Iterable[nn.Parameter]) -> None:
        """Exclude parameters from deferral."""
        self._waits.update(dict.fromkeys(parameters, False))

    def add(self, parameters: tuple[nn.Parameter, ...], gradients: Gradients) -> None:
        """Enqueue ``gradients``, which returns those of ``parameters``.

        Gradients of nested backward passes are not enqueued: a layer that calls
        ``torch.autograd.grad`` while it runs, or in its own backward, does not request them.
        """
        if self._inside:
            return
        number = torch._C._current_graph_task_id()
        if self._pass is None or number < self._pass:
            self._pass, self._work = number, []  # entries so far belonged to a nested pass
        if number == self._pass:
            self._work.append((parameters, gradients))

    @property
    def parameters(self) -> set[nn.Parameter]:
        """Parameters with gradients still in the queue."""
        return {p for parameters, _ in self._work for p in parameters}

    def compute(self) -> None:
        """Compute queued gradients and accumulate them, bitwise as one backward pass would.

        Gradients from several uses of a parameter are summed first, in the order of that pass.
        """
        self._pass = None
        self._work.reverse()
        sums = _Sums(Counter(id(p) for parameters, _ in self._work for p in parameters))
        while self._work:
            parameters, gradients = self._work.pop()
            sums.take(parameters, gradients())
            if sums.complete_bytes >= _TOGETHER_BYTES or not self._work:
                sums.accumulate()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Defer gradients of operations that run under the current saved-tensor hooks.

        A layer's own checkpoint sets other hooks and reruns its operations elsewhere. The stage
        recomputes no layer within this context.
        """
        before = self._hooks, self._inside
        self._hooks, self._inside = _saving_hooks(), True
        try:
            yield
        finally:
            self._hooks, self._inside = before


class _Sums:
    """Sums of gradients per parameter id, over a known number of uses each."""

    def __init__(self, uses: Counter[int]) -> None:
        self._to_come = uses
        self._sums: dict[int, Tensor] = {}
        self._complete: list[nn.Parameter] = []
        self._gradients: list[Tensor] = []
        self.complete_bytes = 0

    def take(self, parameters: tuple[nn.Parameter, ...], gradients: tuple[Tensor, ...]) -> None:
        """Add the gradients of one use."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            key = id(parameter)
            if key in self._sums:
                gradient = self._sums.pop(key) + gradient
            self._to_come[key] -= 1
            if self._to_come[key]:
                self._sums[key] = gradient
            else:
                self._complete.append(parameter)
                self._gradients.append(gradient)
                self.complete_bytes += gradient.nbytes

    def accumulate(self) -> None:
        """Accumulate complete sums into the parameters' gradients and release them.

        An autograd node delivers the sums, as in a whole backward pass. A gradient that nobody else
        holds becomes the parameter's ``grad`` without a copy; ``torch.autograd.backward`` would
        copy a gradient passed to it.
        """
        with torch.enable_grad():
            root = _Giving.apply(self._gradients, *self._complete)
        torch.autograd.backward(root, root.detach())
        self._complete.clear()
        self.complete_bytes = 0


class _Giving(torch.autograd.Function):
    """Delivers ``gradients`` to the parameters, ignoring its own gradient.

    Its result is on the parameters' device, so on a GPU the node belongs to the stream that
    computed the gradients.
    """

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, unused: Tensor) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor] = ctx.gradients
        given = (None, *gradients)
        gradients.clear()
        return given


def require_unmodified(weight: Tensor, version: int) -> None:
    """Raise PulseError if ``weight`` was modified in place, as torch does for saved tensors."""
    if weight._version != version:
        raise PulseError(
            f"a weight of shape {tuple(weight.shape)} was modified in place between forward and "
            "backward of an operation (torch refuses that in whole backward passes, too). Give "
            "the operation a copy (weight.clone())"
        )


def detached(saved: Iterable[Any]) -> tuple[Any, ...]:
    """Detach saved tensors of deferred gradients from their graphs.

    The graphs would keep the stage's inputs and their gradients in memory.
    """
    return tuple(
        one.detach() if isinstance(one, Tensor) and one.grad_fn is not None else one
        for one in saved
    )


def _saving_hooks() -> Any:
    """Saved-tensor hooks set last, by a checkpoint; None if torch does not expose them."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top(True) if top is not None else None
