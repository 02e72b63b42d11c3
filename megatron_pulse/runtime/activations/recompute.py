"""Full activation recomputation of a layer, on demand in backward or ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_pulse.backbone.token_slices import autocasts
from megatron_pulse.runtime.activations.gradient_hooks import hooks_kept
from megatron_pulse.runtime.activations.inplace_check import (
    InplaceWatch,
    modified_inplace,
    version_of,
)
from megatron_pulse.runtime.failure_board import PulseError


class RecomputedLayer:
    """Full recomputation of one layer on one microbatch; only the layer's inputs are kept.

    The layer must be deterministic: every call of ``layer`` returns the same result. PulseError is
    raised if the layer, or a later one, writes into a tensor of ``state``. PulseError is also
    raised if a saved tensor was modified in place before backward reads the tensor. Tensors that
    the operations save are dropped and numbered::

        forward()    layer ----> 0, 1, 2, ...                       numbers in autograd's graph
        compute()    layer ----> saved tensors 0, 1, 2, ...         runs up to the last saved one
        backward                 ... 2, 1, 0 are taken and freed    calls compute() if needed

    torch's ``checkpoint`` does the same, but cannot start early. Here ``compute`` can run while the
    stage awaits a gradient.
    """

    def __init__(
        self,
        name: str,
        layer: Callable[[], Any],
        state: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        self._name, self._layer, self._state = name, layer, state
        self._before: dict[str, tuple[Tensor, int]] = {}
        self._saved: list[tuple[torch.Size, torch.dtype]] = []
        self._watched: list[InplaceWatch] = []
        self._found: dict[int, Tensor] | None = None
        self._running = False
        self._within: tuple[Callable[[], AbstractContextManager[Any]], ...] = ()

    def forward(self) -> Any:
        """Run the layer and return its result."""
        self._within = tuple(autocasts())
        self._before = {what: (one, version_of(one)) for what, one in self._state().items()}
        self._running = True
        try:
            with saved_tensors_hooks(self._number, self._take):
                results = self._layer()
        finally:
            self._running = False
        for each in self._watched:
            each.settle()
        unlike = [f"modifies {what} in place" for what in self._written()]
        if unlike:
            raise self._refused(
                f"{' and '.join(unlike)} in forward, and would again in the recomputation"
            )
        return results

    def compute(self) -> None:
        """Recompute all saved tensors, unless already recomputed."""
        if self._found is not None:
            return
        if since := list(self._written()):
            raise self._refused(
                f"ran forward, and then an in-place write changed {' and '.join(since)}"
            )
        found: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> int:
            number = len(found)
            if number >= len(self._saved):
                return number  # a layer that continues after its last saved tensor
            if self._saved[number] != (tensor.shape, tensor.dtype):
                shape, dtype = self._saved[number]
                raise self._refused(
                    f"saved {tuple(tensor.shape)} {tensor.dtype} in the recomputation, "
                    f"{tuple(shape)} {dtype} in forward"
                )
            found[number] = tensor.detach()
            if len(found) == len(self._saved):
                raise _Enough
            return number

        with ExitStack() as stack:
            for make_context in self._within:
                stack.enter_context(make_context())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(hooks_kept(one for one, _ in self._before.values()))
            stack.enter_context(saved_tensors_hooks(keep, self._never))
            try:
                if self._saved:
                    self._layer()
            except _Enough:
                pass
        if len(found) < len(self._saved):
            raise self._refused(
                f"saved {len(found)} tensors in the recomputation, {len(self._saved)} in forward"
            )
        self._found = found
        self._before.clear()

    def _written(self) -> Iterator[str]:
        """Yield the names of state tensors that were replaced or modified since forward began."""
        now = self._state()
        for what, (one, version) in self._before.items():
            if version_of(one) != version or now.get(what) is not one:
                yield what

    def _number(self, tensor: Tensor) -> int:
        self._saved.append((tensor.shape, tensor.dtype))
        self._watched.append(InplaceWatch(tensor))
        return len(self._saved) - 1

    def _take(self, number: int) -> Tensor:
        if self._watched[number].is_written:
            raise modified_inplace(self._name)
        if self._running:
            raise self._asked()
        self.compute()
        assert self._found is not None
        if number not in self._found:
            raise self._refused("reads its saved tensors twice in backward")
        return self._found.pop(number)

    def _never(self, number: int) -> Tensor:
        raise self._asked()

    def _asked(self) -> PulseError:
        return self._refused("computes gradients in forward")

    def _refused(self, why: str) -> PulseError:
        return PulseError(
            f"layer {self._name} {why}: its activations cannot be recomputed. Exclude it from "
            "--pulse-recompute, or make the plan with --no-recompute"
        )


class _Enough(BaseException):
    """All saved tensors are recomputed.

    A BaseException, so that no ``except Exception`` in a layer catches it.
    """
