"""Deferred weight gradients of Megatron's linear layers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import megatron.core.tensor_parallel.layers as layers
import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn

from megatron_pulse.integration.megatron.te_wgrad import defer_te_wgrad
from megatron_pulse.runtime.parameters.split_backward import current_wgrad_store
from megatron_pulse.runtime.parameters.split_calls import (
    LinearMap,
    SplitCall,
    deferred_call,
    deferred_linear,
)

_Fused = layers.LinearWithGradAccumulationAndAsyncCommunication


def defer_wgrad() -> None:
    """Patch Megatron's and Transformer Engine's linears to defer weight gradients when asked to.

    Megatron's own autograd node computes both gradients at once and hides collectives behind them.
    If they are split, the collectives are nodes of their own, around a node that runs its backward
    twice.
    """
    defer_te_wgrad()
    fused = layers.linear_with_grad_accumulation_and_async_allreduce
    if getattr(fused, "waits", False):
        return

    parameters = inspect.signature(fused).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}

    @functools.wraps(fused, updated=())
    def product(*args: Any, **kwargs: Any) -> Tensor:
        if (wgrad_store := current_wgrad_store()) is None:
            return fused(*args, **kwargs)
        given = {**defaults, **dict(zip(parameters, args, strict=False)), **kwargs}
        tokens, weight, bias = given["input"], given["weight"], given["bias"]
        does_more = given["gradient_accumulation_fusion"] or given["gtp_remat_size"] > 1
        if does_more or not wgrad_store.defers(tokens, weight):
            return fused(*args, **kwargs)
        if given["sequence_parallel"]:
            tokens = gather_from_sequence_parallel_region(
                tokens, tensor_parallel_output_grad=True, group=given["tp_group"]
            )
        elif given["allreduce_dgrad"]:
            tokens = copy_to_tensor_model_parallel_region(tokens, group=given["tp_group"])
        result = deferred_linear(_FUSED, tokens, weight, bias, wgrad_store)
        if result is not None:
            return result
        return deferred_call(
            _FusedSplit(weight, bias, given["tp_group"]), tokens, bias, wgrad_store
        )

    product.waits = True  # type: ignore[attr-defined]
    product.warned = True  # type: ignore[attr-defined]
    layers.linear_with_grad_accumulation_and_async_allreduce = product


def _fused(given: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = torch.matmul(given, weight.t())
    return product if bias is None else product + bias


_FUSED = LinearMap(_fused, torch.matmul)
"""Megatron's linear without reductions and fusions."""


class _FusedSplit(SplitCall):
    """Split backward of Megatron's node, through its own forward and, twice, its own backward.

    Its backward multiplies the output's gradient by the weight and by the input. For the product
    that is not wanted, the factor has no columns, which costs nothing.
    """

    def __init__(self, weight: nn.Parameter, bias: Tensor | None, tp_group: Any) -> None:
        super().__init__(weight, bias)
        self._tp_group = tp_group
        self._context = SimpleNamespace(save_for_backward=lambda *tensors: None)

    def run(self, given: Tensor, bias: Tensor | None) -> tuple[Tensor, Sequence[Tensor]]:
        """See ``SplitCall``."""
        result: Tensor = _Fused.forward(
            self._context,
            given,
            self.weight,
            self.own_bias if bias is None else bias,
            False,  # gradient_accumulation_fusion
            False,  # allreduce_dgrad
            False,  # sequence_parallel
            None,  # grad_output_buffer
            0,  # wgrad_deferral_limit
            self._tp_group,
            1,  # gtp_remat_size
        )
        return result, (given,)

    def input_gradients(
        self, saved: Sequence[Tensor], gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """See ``SplitCall``."""
        (given,) = saved
        of_given, _, of_bias = self._backward(
            gradient, given[..., :0], self.weight, self.bias_is_computed
        )
        return of_given, of_bias

    def weight_gradients(self, saved: Sequence[Tensor], gradient: Tensor) -> tuple[Tensor, ...]:
        """See ``SplitCall``."""
        (given,) = saved
        _, *found = self._backward(gradient, given, self.weight[:, :0], self.bias_waits)
        return tuple(found[: len(self.parameters)])

    @torch.no_grad()
    def _backward(self, gradient: Tensor, given: Tensor, weight: Tensor, use_bias: bool) -> Any:
        context = SimpleNamespace(**vars(self._context))
        context.saved_tensors, context.use_bias = (given, weight), use_bias
        return _Fused.backward(context, gradient)[:3]
