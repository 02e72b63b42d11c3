"""Megatron's linear layers, corrected for partly frozen parameters."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor


class BiasColumnParallelLinear(ColumnParallelLinear):
    """ColumnParallelLinear that computes the bias gradient of a frozen weight; Megatron
    drops it."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        bias: Tensor | None = kwargs.get("bias")
        if weight.requires_grad or bias is None or not bias.requires_grad:
            return super()._forward_impl(input, weight, *args, **kwargs)
        product: Tensor = super()._forward_impl(input, weight, *args, **{**kwargs, "bias": None})
        return product + bias
