"""Deferred weight gradients of Transformer Engine's linear layers.

Since 2.3 (read in the sources of 2.3 to 2.20), the autograd node of a linear asks a store whether
the weight gradient is deferred. The node takes the store from the module in the forward. If so, the
backward gives the store the pending product and its two factors, and returns no gradient of weight
and bias. Collectives are done by then.

Transformer Engine's own store is one queue for all microbatches of a module, from which
``backward_dw`` takes and assigns gradients. Here each call has a store of its own, which hands the
product to the microbatch's ``WeightGradStore``. The same kernel runs on the same factors, and
autograd adds the results like those of a whole backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE, TELinear
from megatron.core.utils import is_te_min_version
from torch import Tensor, nn

from megatron_pulse.runtime.parameters.split_backward import current_wgrad_store
from megatron_pulse.runtime.parameters.wgrad_queue import WeightGradStore, detached

OLDEST_TE_WITH_DEFERRED_WGRAD = "2.3.0"
"""First version of Transformer Engine with deferred weight gradients."""


def te_can_defer_wgrad() -> bool:
    """True if an installed Transformer Engine can defer weight gradients."""
    return bool(HAVE_TE and is_te_min_version(OLDEST_TE_WITH_DEFERRED_WGRAD))


def defer_te_wgrad() -> None:
    """Patch Transformer Engine's linears to defer weight gradients to the weight-gradient queue.

    Linears with fp8, user buffers or fused gradient accumulation are not handled: a run has none of
    them (``flags/megatron.txt``).
    """
    if not te_can_defer_wgrad() or getattr(TELinear.forward, "waits", False):
        return
    forward = TELinear.forward

    @functools.wraps(forward)
    def waiting(self: Any, x: Tensor) -> Any:
        queue = current_wgrad_store()
        if queue is None or not queue.defers(x, self.weight):
            return forward(self, x)
        own, self.wgrad_store = self.wgrad_store, _Store(queue, (self.weight, *_biases(self)))
        try:
            return forward(self, x)
        finally:
            self.wgrad_store = own

    waiting.waits = True  # type: ignore[attr-defined]
    TELinear.forward = waiting


def untrained_biases(name: str, module: nn.Module) -> Iterator[str]:
    """Faults of biases in the layer ``name`` that Transformer Engine would silently not train.

    It computes a bias's gradient with the weight's product, which it omits if the weight is frozen.
    """
    for inside, part in module.named_modules() if HAVE_TE else ():
        if isinstance(part, TELinear) and not part.weight.requires_grad and _biases(part):
            where = f"{inside}." if inside else ""
            yield (
                f"{name}: Transformer Engine has no gradient of {where}bias while {where}weight "
                "is frozen. Train or freeze both, or use --transformer-impl local"
            )


def _biases(layer: Any) -> tuple[nn.Parameter, ...]:
    """Trained bias whose gradient comes with the weight's.

    A bias that is returned is added elsewhere. A bias of a row-parallel linear is added after the
    sum over ranks.
    """
    in_product = layer.apply_bias and not layer.gemm_bias_unfused_add
    return (layer.bias,) if in_product and layer.bias.requires_grad else ()


class _Store:
    """Weight-gradient store of one call of a linear, with the interface of its node."""

    def __init__(self, queue: WeightGradStore, parameters: tuple[nn.Parameter, ...]) -> None:
        self._queue = queue
        self._parameters = parameters

    def delay_wgrad_compute(self) -> bool:
        """True: the weight gradient is deferred."""
        return True

    def put(self, factors: Sequence[Tensor], product: Callable[..., Sequence[Tensor]]) -> None:
        """Queue ``product(*factors)``: gradients of the weight, of the bias, and perhaps more."""
        parameters, factors = self._parameters, detached(factors)

        def gradients() -> tuple[Tensor, ...]:
            found = zip(parameters, product(*factors), strict=False)
            return tuple(gradient.to(parameter.dtype) for parameter, gradient in found)

        self._queue.add(parameters, gradients)
