"""Transformer Engine's linear layers, whose weight gradients wait where the runtime wants it.

From 2.3 on (read in the sources of 2.3 to 2.20) its linear node asks a store, which it takes from
the module in the forward, whether the weight's gradient waits. If so the backward hands it the
product that is still to be computed, and its two factors, and says that weight and bias have no
gradient yet; collectives are done by then. Its own store is one queue for all microbatches of a
module, from which ``backward_dw`` takes and assigns gradients. Here each call has a store of its
own, which hands the product to the microbatch's ``Later``: the same kernel on the same factors, and
its results are added by autograd as those of a whole backward pass are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE, TELinear
from megatron.core.utils import is_te_min_version
from torch import Tensor, nn

from megatron_pulse.runtime.parameters.later import Later, alone
from megatron_pulse.runtime.parameters.weight_gradients import waiting_weights

OLDEST_THAT_WAITS = "2.3.0"
"""The first Transformer Engine whose weight gradients can wait."""


def engine_waits() -> bool:
    """Whether there is a Transformer Engine whose weight gradients can wait."""
    return bool(HAVE_TE and is_te_min_version(OLDEST_THAT_WAITS))


def wait_in_engine() -> None:
    """Let weight gradients of Transformer Engine's linears wait where the runtime wants it.

    Those of fp8, of user buffers and of gradients that a kernel adds up are not handled: a run has
    none of them (``flags/megatron.txt``).
    """
    if not engine_waits() or getattr(TELinear.forward, "waits", False):
        return
    forward = TELinear.forward

    @functools.wraps(forward)
    def waiting(self: Any, x: Tensor) -> Any:
        later = waiting_weights()
        if later is None or not later.takes(x, self.weight):
            return forward(self, x)
        own, self.wgrad_store = self.wgrad_store, _Store(later, (self.weight, *_biases(self)))
        try:
            return forward(self, x)
        finally:
            self.wgrad_store = own

    waiting.waits = True  # type: ignore[attr-defined]
    TELinear.forward = waiting


def untrained_biases(name: str, module: nn.Module) -> Iterator[str]:
    """Of the layer ``name`` what Transformer Engine would leave untrained without a word: it has a
    bias's gradient of the weight's product, which it leaves out where the weight is frozen."""
    for inside, part in module.named_modules() if HAVE_TE else ():
        if isinstance(part, TELinear) and not part.weight.requires_grad and _biases(part):
            where = f"{inside}." if inside else ""
            yield (
                f"{name}: Transformer Engine has no gradient of {where}bias while {where}weight is "
                "frozen: train or freeze both, or take --transformer-impl local"
            )


def _biases(layer: Any) -> tuple[nn.Parameter, ...]:
    """A trained bias whose gradient comes with the weight's: one that is returned is added
    elsewhere, and one of rows behind a sum over ranks."""
    in_product = layer.apply_bias and not layer.gemm_bias_unfused_add
    return (layer.bias,) if in_product and layer.bias.requires_grad else ()


class _Store:
    """Where one call of a linear leaves its weight's gradient, as its node knows stores."""

    def __init__(self, later: Later, parameters: tuple[nn.Parameter, ...]) -> None:
        self._later = later
        self._parameters = parameters

    def delay_wgrad_compute(self) -> bool:
        """Whether it waits."""
        return True

    def put(self, factors: Sequence[Tensor], product: Callable[..., Sequence[Tensor]]) -> None:
        """Keep ``product(*factors)``: the weight's gradient, the bias's, and perhaps more."""
        parameters, factors = self._parameters, alone(factors)

        def gradients() -> tuple[Tensor, ...]:
            found = zip(parameters, product(*factors), strict=False)
            return tuple(gradient.to(parameter.dtype) for parameter, gradient in found)

        self._later.add(parameters, gradients)
