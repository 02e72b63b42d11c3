"""Time of a step under our executor against Megatron-Core's own 1F1B.

The same skip-free sequential model, weights, ranks and microbatches, in the same processes, steps
of the two in turn; prints the ratio of medians and its spread. Compute is small on purpose: what is
measured is what an executor adds.

    python -m tests.benchmarks.overhead [--ranks 2] [--microbatches 8] [--width 64] [--repeats 30]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec
from tests.ranks import run_ranks

SEQUENCE, BATCH, LAYERS = 64, 4, 8


class Block(nn.Module):
    """A residual two-layer perceptron in the calling convention of chain layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, inputs: tuple[Tensor, ...], skips: Any, conditioning: Any) -> Any:
        (x,) = inputs
        return (x + self.down(torch.relu(self.up(x))),)


def make_backbone(width: int) -> Backbone:
    """A chain of blocks without skips."""
    spec = (TensorSpec((SEQUENCE, width), batch_dim=1),)
    return Backbone(
        "plain",
        tuple(Layer(f"block{i}", lambda c: Block(width), spec, spec) for i in range(LAYERS)),
    )


class MegatronStage(nn.Module):
    """The same blocks as Megatron's schedules call them."""

    def __init__(self, blocks: list[nn.Module], config: Any) -> None:
        super().__init__()
        self.blocks, self.config, self.given = nn.ModuleList(blocks), config, None

    def set_input_tensor(self, tensor: Any) -> None:
        """The tensor received from the stage before."""
        self.given = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.given is None else self.given
        for block in self.blocks:
            (x,) = block((x,), {}, {})
        return x


def measure(width: int, num_microbatches: int, repeats: int) -> list[tuple[float, float]]:
    """(ours, Megatron's) seconds of each repetition on this rank."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import (
        forward_backward_pipelining_without_interleaving as megatron_schedule,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_pulse.planner.costs import weighted_costs
    from megatron_pulse.planner.placement import sequential
    from megatron_pulse.planner.plan import make_plan
    from megatron_pulse.runtime.exchange import message_spec
    from megatron_pulse.runtime.executor import Executor
    from megatron_pulse.runtime.failures import default_board
    from megatron_pulse.runtime.links import Links
    from megatron_pulse.runtime.settings import RunSettings
    from megatron_pulse.runtime.stage import Stage

    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world)
    config = TransformerConfig(
        num_layers=world,
        hidden_size=width,
        num_attention_heads=1,
        pipeline_model_parallel_size=world,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=True,
        deallocate_pipeline_outputs=True,
    )
    backbone = make_backbone(width)
    plan = make_plan(backbone, weighted_costs(backbone, [1.0] * LAYERS), sequential(world), "1f1b")
    stage = Stage(config, backbone, plan.routes, rank, seed=1)
    settings = RunSettings(
        BATCH, torch.float32, torch.device("cpu"), lambda p, b: (p - b["target"]).square().mean()
    )
    board = default_board()
    links = Links(
        parallel_state.get_pipeline_model_parallel_group(),
        lambda m: settings.make_empty(message_spec(plan.routes, m)),
        board,
        60.0,
    )
    step = plan.step(num_microbatches)
    executor = Executor(
        backbone, plan.routes, step.schedule, step.programs[rank], rank, {rank: stage}, links, board
    )
    theirs = MegatronStage([getattr(stage, s.name) for s in stage._specs], config)
    data = torch.randn(SEQUENCE, BATCH, width)

    def forward_step(iterator: Any, model: nn.Module) -> Any:
        return model(data), lambda out: ((out - data).square().mean(), {})

    def run_ours() -> None:
        executor.run(iter([{"noisy": data, "target": data}] * num_microbatches), settings)

    def run_theirs() -> None:
        megatron_schedule(
            forward_step_func=forward_step,
            data_iterator=None,
            model=theirs,
            num_microbatches=num_microbatches,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
        )

    def timed(function: Any) -> float:
        dist.barrier()
        start = time.perf_counter()
        function()
        dist.barrier()
        return time.perf_counter() - start

    for _ in range(3):
        run_ours(), run_theirs()
    return [(timed(run_ours), timed(run_theirs)) for _ in range(repeats)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    times = run_ranks(
        args.ranks, measure, args.width, args.microbatches, args.repeats, timeout_s=600
    )[0]
    ratios = sorted(ours / theirs for ours, theirs in times)
    result = {
        "machine": f"{platform.processor() or platform.machine()}, torch {torch.__version__}",
        "ranks": args.ranks,
        "microbatches": args.microbatches,
        "width": args.width,
        "ours_ms": 1e3 * statistics.median(t[0] for t in times),
        "megatron_ms": 1e3 * statistics.median(t[1] for t in times),
        "ratio": statistics.median(ratios),
        "ratio_10_to_90": [ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]],
    }
    if args.json:
        print(json.dumps(result))
        return
    low, high = result["ratio_10_to_90"]
    print(f"{result['machine']}; {args.ranks} ranks, {args.microbatches} microbatches")
    print(f"ours {result['ours_ms']:.1f} ms, Megatron 1F1B {result['megatron_ms']:.1f} ms per step")
    print(f"ratio {result['ratio']:.3f} (10th to 90th percentile {low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
