"""Settings of a run's tensors: microbatch size, dtype and device; shapes come from the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pulse.backbone.chain import COMPUTE, TensorSpec

Batch = Mapping[str, Tensor]
LossFunction = Callable[[Tensor, Batch], Tensor]


META = torch.device("meta")
"""Device of tensors with a shape and no memory."""


def compute_device() -> torch.device:
    """Device on which this process computes. Offloaded weights may be elsewhere."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@dataclass(frozen=True)
class RunSettings:
    """Tensor settings of a run and its loss, or one loss per chain of a cascade, by name."""

    micro_batch_size: int
    dtype: torch.dtype
    device: torch.device
    loss: LossFunction | Mapping[str, LossFunction]
    grad_scale: Callable[[Tensor], Tensor] | None = None

    def loss_of(self, chain: str) -> LossFunction:
        """Loss of a chain, called with its prediction and the chain's own fields."""
        return self.loss[chain] if isinstance(self.loss, Mapping) else self.loss

    def make_empty(self, spec: TensorSpec, device: torch.device | None = None) -> Tensor:
        """Uninitialised tensor of ``spec`` for one microbatch, on the compute device by default."""
        shape = spec.full_shape(self.micro_batch_size)
        return torch.empty(shape, dtype=self.dtype_of(spec), device=device or self.device)

    def dtype_of(self, spec: TensorSpec) -> torch.dtype:
        """torch dtype of ``spec``."""
        return self.dtype if spec.dtype == COMPUTE else getattr(torch, spec.dtype)
