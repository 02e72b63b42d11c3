"""Weight gradients of a stage and microbatch that are left for later, and their addition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron_pulse.runtime.failures import PulseError

Gradients = Callable[[], tuple[Tensor, ...]]

_TOGETHER_BYTES = 1 << 24
"""So many bytes of gradients are added to their parameters at a time: each time takes the host as
long as a small product."""


class Later:
    """The weight gradients of one stage and microbatch that are still to be computed."""

    def __init__(self) -> None:
        self._work: list[tuple[tuple[nn.Parameter, ...], Gradients]] = []
        self._waits: dict[nn.Parameter, bool] = {}
        self._hooks: Any = None
        self._inside = False
        self._pass: int | None = None

    def takes(self, given: Tensor, weight: Tensor) -> bool:
        """Whether the gradient of ``weight`` in a product with ``given`` waits.

        The input's gradient must carry the graph on. A weight that is used again goes the way of
        its first use: autograd adds what a weight gets within one backward pass before it adds
        that to its gradient.
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
        """The gradients of these do not wait."""
        self._waits.update(dict.fromkeys(parameters, False))

    def add(self, parameters: tuple[nn.Parameter, ...], gradients: Gradients) -> None:
        """``gradients()`` will give those of ``parameters``. A layer that asks for gradients while
        it runs (``torch.autograd.grad``), or in a backward of its own, asks for none of these."""
        if self._inside:
            return
        number = torch._C._current_graph_task_id()
        if self._pass is None or number < self._pass:
            self._pass, self._work = number, []  # what came before was of a pass within this one
        if number == self._pass:
            self._work.append((parameters, gradients))

    @property
    def parameters(self) -> set[nn.Parameter]:
        """Whose gradients are still to come."""
        return {p for parameters, _ in self._work for p in parameters}

    def compute(self) -> None:
        """Compute them and add them to the parameters, as one backward pass would.

        What a parameter gets from several uses is summed first, in the order of that pass.
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
        """Within, operations under the hooks that are set now leave theirs; a layer's own
        checkpoint sets others, and runs them again elsewhere. A stage recomputes no layer here."""
        before = self._hooks, self._inside
        self._hooks, self._inside = _saving_hooks(), True
        try:
            yield
        finally:
            self._hooks, self._inside = before


class _Sums:
    """What parameters get from so many uses each, by their ids."""

    def __init__(self, uses: Counter[int]) -> None:
        self._to_come = uses
        self._sums: dict[int, Tensor] = {}
        self._complete: list[nn.Parameter] = []
        self._gradients: list[Tensor] = []
        self.complete_bytes = 0

    def take(self, parameters: tuple[nn.Parameter, ...], gradients: tuple[Tensor, ...]) -> None:
        """Those of one use."""
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
        """Add what is complete to the parameters' gradients, and hold it no longer.

        A node gives it, as in a whole backward pass: a gradient that nobody else holds becomes the
        parameter's, where one that is handed to ``torch.autograd.backward`` would be copied.
        """
        with torch.enable_grad():
            root = _Giving.apply(self._gradients, *self._complete)
        torch.autograd.backward(root, root.detach())
        self._complete.clear()
        self.complete_bytes = 0


class _Giving(torch.autograd.Function):
    """Gives ``gradients`` to the parameters, whatever its own is; on their device, so that on a GPU
    it belongs to the stream on which they were computed."""

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


def require_unwritten(weight: Tensor, version: int) -> None:
    """Raises PulseError where ``weight`` is not what it was, as torch does where it saves one."""
    if weight._version != version:
        raise PulseError(
            f"a weight of shape {tuple(weight.shape)} was written into after an operation used it "
            "and before its backward pass (torch refuses that in whole backward passes, too): give "
            "the operation a copy (weight.clone())"
        )


def alone(saved: Iterable[Any]) -> tuple[Any, ...]:
    """The tensors that weight gradients wait with, without the graphs behind them: these lead to
    what the stage was given, and to its gradients, which would be in memory as long."""
    return tuple(
        one.detach() if isinstance(one, Tensor) and one.grad_fn is not None else one
        for one in saved
    )


def _saving_hooks() -> Any:
    """The hooks that a checkpoint has set just now; None where torch does not tell."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top(True) if top is not None else None
