"""Predicted against measured: two profiles of this machine, and the busy time of each device.

For a U-ViT and a UNet: profiles on two cores at once, partitions by each over 2 folded ranks, runs
the first partition, and compares the time that each rank spends in its operations with what the
profile says.

    .venv/bin/python -m tests.benchmarks.busy
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from megatron_pulse.planner.layout.placement import Partition, fold
from megatron_pulse.planner.partition.find import Goal, find_partition
from tests.benchmarks.report import Flags, Report
from tests.ranks import run_ranks

BACKBONES: dict[str, tuple[str, dict[str, Any]]] = {
    "uvit": ("uvit-tiny", {"depth": 10, "embed_dim": 256, "num_heads": 4, "image_size": 24}),
    "unet": ("sd-tiny", {"block_out_channels": (64, 64, 128, 128), "sample_size": 32}),
}
SIZE = 4
"""Samples of a microbatch."""


def profile(kind: str, sizes: tuple[int, ...] = (SIZE,), **how: Any) -> Any:
    """A measured profile in a process of its own."""
    import torch

    from megatron_pulse.profile.measurement.measure import measure
    from model_specs import load_backbone

    torch.set_num_threads(1)
    return measure(load_backbone(*BACKBONES[kind]), sizes, **how)


def busy(kind: str, cuts: tuple[int, ...], num_microbatches: int, steps: int) -> list[float]:
    """Seconds that this rank spends in operations, for each step."""
    import torch
    import torch.distributed as dist

    from megatron_pulse.backbone.build_context import LayerContext
    from megatron_pulse.planner.program.plan import Plan
    from megatron_pulse.runtime.pipeline import Pipeline
    from model_specs import load_backbone
    from tests.runtime.equality import Case, join_pipeline, make_batches, mean_squared_error

    torch.set_num_threads(1)
    plan = Plan(load_backbone(*BACKBONES[kind]), Partition(fold(2), cuts))
    context = LayerContext(join_pipeline()[0])
    pipeline = Pipeline(plan, mean_squared_error, SIZE, seed=1, context=context)
    case = Case("fold", num_microbatches, dtype="float32", micro_batch_size=SIZE)
    batches = make_batches(plan.backbone, case, 0)
    executor = pipeline.executor(num_microbatches)
    spent = 0.0
    run = executor._run

    def timed(operation: Any) -> None:
        nonlocal spent
        start = time.perf_counter()
        run(operation)
        spent += time.perf_counter() - start

    executor._run = timed
    seconds = []
    for _ in range(steps):
        spent = 0.0
        pipeline.step(batches)
        seconds.append(spent)
        dist.barrier()
    return seconds[2:]


def main() -> None:
    """Measure and print."""
    flags = Flags(__doc__)
    flags.add("--microbatches", 8)
    flags.add("--steps", 8)
    args = flags.parse_args()
    report, goal = Report(args.json), Goal(collocate=True)
    for kind in BACKBONES:
        # At once, so that both cores are as busy as in the run.
        costs = [each.at(SIZE) for each in run_ranks(2, profile, kind, timeout_s=300)]
        partitions = [find_partition(each, fold(2), goal) for each in costs]
        loads = [goal.evaluate(*pair) for pair in zip(costs, partitions, strict=True)]
        first, second = (max(load.load_s) for load in loads)
        other = max(goal.evaluate(costs[0], partitions[1]).load_s)
        given = kind, partitions[0].cuts, args.microbatches, args.steps + 2
        for device, seen in enumerate(run_ranks(2, busy, *given, timeout_s=600)):
            predicted = args.microbatches * loads[0].compute_s[device]
            measured = statistics.median(seen)
            row = {
                "backbone": kind,
                "load by two profiles, ms": (1e3 * first, 1e3 * second),
                "the second's over the first's, %": 100 * (second / first - 1),
                "the second's partition, by the first, %": 100 * (other / first - 1),
                "device": device,
                "busy: predicted, measured, ms": (1e3 * predicted, 1e3 * measured),
                "over measured, %": 100 * (predicted / measured - 1),
            }
            report.add(row)


if __name__ == "__main__":
    main()
