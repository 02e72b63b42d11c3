"""Pure data parallelism: Megatron's DDP with overlapped reduction and distributed optimizer."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.benchmarks.contestant import Contestant, Runner, counted
from tests.runtime.emulated import sleep_until

NUM_BUCKETS = 8
"""Megatron's buckets, in which gradients are reduced while the backward goes on."""


class SleepingLayer(nn.Module):
    """A layer with parameters of its size, whose operations sleep."""

    def __init__(self, forward_s: float, backward_s: float, parameters: int) -> None:
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s
        self.weight = nn.Parameter(torch.zeros(max(1, parameters)))

    def forward(self, x: Tensor) -> Tensor:
        return _Layer.apply(self, self.weight, x)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: SleepingLayer, weight: Tensor, x: Tensor) -> Tensor:
        deadline = time.perf_counter() + layer.forward_s
        ctx.layer = layer
        result = torch.empty_like(x)
        sleep_until(deadline)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        deadline = time.perf_counter() + ctx.layer.backward_s
        sleep_until(deadline)
        return None, torch.zeros_like(ctx.layer.weight), torch.zeros_like(gradient)


def data_parallel(contestant: Contestant) -> Runner:
    """Every rank runs the whole backbone on its share of the microbatches.

    Gradients are reduce-scattered in buckets during the last backward, and the parameters of the
    step before are gathered, bucket by bucket, during the first forward: Megatron's distributed
    optimizer with both overlaps. gloo's own reduce-scatter is an all-reduce, twice the bytes; with
    ``reduce_scatter_with_fp32_accumulation`` Megatron makes it of an all-to-all, which is not. The
    optimizer's own arithmetic takes no time, as with the others.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    world = dist.get_world_size()
    mine = [dist.new_group([r]) for r in range(world)][dist.get_rank()]
    collection = ProcessGroupCollection()
    for name in ("dp", "dp_cp", "intra_dp_cp", "expt_dp", "intra_expt_dp"):
        setattr(collection, name, dist.group.WORLD)
    for name in ("tp", "pp", "ep", "cp", "mp"):
        setattr(collection, name, mine)
    config = TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1)
    total = sum(n for _, _, n in contestant.layers)
    model = nn.Sequential(*(SleepingLayer(*layer) for layer in contestant.layers))
    settings = DistributedDataParallelConfig(
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        reduce_scatter_with_fp32_accumulation=True,
        use_distributed_optimizer=True,
        bucket_size=max(1, total // NUM_BUCKETS),
    )
    ddp = DistributedDataParallel(config, settings, model, pg_collection=collection)
    count, left = divmod(contestant.num_microbatches, world)
    if left:
        raise ValueError(f"{contestant.num_microbatches} microbatches on {world} replicas")
    x = torch.zeros(1, requires_grad=True)

    def step() -> None:
        ddp.zero_grad_buffer()
        ddp.reset_param_sync_dispatch_state()
        with ddp.no_sync():
            for _ in range(count - 1):
                ddp(x).sum().backward()
        ddp(x).sum().backward()
        ddp.finish_grad_sync()

    held = sum(contestant.saved_bytes)
    return counted(step, 2 * 4 * total * (world - 1) // world, lambda: held)
