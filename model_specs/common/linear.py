"""Megatron's linear layers where only a part of them is trained."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor


class BiasColumnParallelLinear(ColumnParallelLinear):
    """Megatron's, but a bias behind a frozen weight has its gradient, which Megatron's loses."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        bias: Tensor | None = kwargs.get("bias")
        if weight.requires_grad or bias is None or not bias.requires_grad:
            return super()._forward_impl(input, weight, *args, **kwargs)
        product: Tensor = super()._forward_impl(input, weight, *args, **{**kwargs, "bias": None})
        return product + bias
