"""Overhead of the runtime per operation, measured with a step of empty layers."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec
from megatron_pulse.planner.layout.placement import Partition, sequential
from megatron_pulse.planner.program.plan import Plan
from megatron_pulse.runtime.pipeline import Pipeline

_MICROBATCHES = 16
_WARM_UP, _STEPS = 2, 9


class _Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: tuple[Tensor, ...], skips: Any, conditioning: Any) -> Any:
        return (inputs[0] + self.shift,)


def operation_s(group: dist.ProcessGroup, device: torch.device) -> float:
    """Overhead in seconds per operation (forward or backward), on ``group`` of this rank alone."""
    spec = TensorSpec((1,))
    layer = Layer("empty", lambda context: _Empty(), (spec,), (spec,))
    plan = Plan(Backbone("empty", (layer,), {}), Partition(sequential(1), (0, 1)))
    pipeline = Pipeline(plan, _loss, 1, device=device, group=group)
    batches = [{"noisy": torch.zeros(1, 1, device=device)} for _ in range(_MICROBATCHES)]
    seconds = []
    for _ in range(_WARM_UP + _STEPS):
        began = time.perf_counter()
        pipeline.step(batches)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[_WARM_UP:]) / (2 * _MICROBATCHES)


def _loss(prediction: Tensor, batch: Any) -> Tensor:
    return prediction.sum()
