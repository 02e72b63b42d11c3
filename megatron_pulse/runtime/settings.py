"""What the tensors of a run look like: shapes come from the plan, the rest from here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pulse.backbone.chain import COMPUTE, TensorSpec

Batch = Mapping[str, Tensor]
LossFunction = Callable[[Tensor, Batch], Tensor]


META = torch.device("meta")
"""Tensors there have a shape, and no memory."""


@dataclass(frozen=True)
class RunSettings:
    """What the tensors of a run look like, and the loss: one, or one for each of a cascade's
    chains by name."""

    micro_batch_size: int
    dtype: torch.dtype
    device: torch.device
    loss: LossFunction | Mapping[str, LossFunction]
    grad_scale: Callable[[Tensor], Tensor] | None = None

    def loss_of(self, chain: str) -> LossFunction:
        """The loss of a chain's prediction, and of the microbatch as the chain alone has it."""
        return self.loss[chain] if isinstance(self.loss, Mapping) else self.loss

    def make_empty(self, spec: TensorSpec, device: torch.device | None = None) -> Tensor:
        """An empty tensor of ``spec``'s shape for one microbatch; on the device that computes, if
        not on another."""
        shape = spec.full_shape(self.micro_batch_size)
        return torch.empty(shape, dtype=self.dtype_of(spec), device=device or self.device)

    def dtype_of(self, spec: TensorSpec) -> torch.dtype:
        """The torch dtype of ``spec``."""
        return self.dtype if spec.dtype == COMPUTE else getattr(torch, spec.dtype)
