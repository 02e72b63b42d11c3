"""Predicted against measured: two profiles of this machine, and the busy time of each device.

For a U-ViT and a UNet: profiles on two cores at once, partitions by each over 2 folded ranks, runs
the first partition, and compares the time that each rank spends in its operations with what the
profile says.

    .venv/bin/python -m tests.benchmarks.busy
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from tests.ranks import run_ranks

BACKBONES: dict[str, tuple[str, dict[str, Any]]] = {
    "uvit": ("uvit-tiny", {"depth": 10, "embed_dim": 256, "num_heads": 4, "image_size": 24}),
    "unet": ("sd-tiny", {"block_out_channels": (64, 64, 128, 128), "sample_size": 32}),
}
MICRO_BATCH_SIZE = 4


def profile(kind: str) -> Any:
    """A measured profile in a process of its own."""
    import torch

    from megatron_pulse.profile.measurement.measure import measure
    from model_specs import load_backbone

    torch.set_num_threads(1)
    name, options = BACKBONES[kind]
    return measure(load_backbone(name, options), [MICRO_BATCH_SIZE])


def pipeline_of(plan: Any, num_microbatches: int, micro_batch_size: int) -> tuple[Any, Any]:
    """This rank's part of ``plan``, and a step's batches."""
    import torch

    from megatron_pulse.backbone.build_context import LayerContext
    from megatron_pulse.runtime.pipeline import Pipeline
    from tests.runtime.equality import Case, join_pipeline, make_batch, mean_squared_error

    torch.set_num_threads(1)
    config, _ = join_pipeline()
    pipeline = Pipeline(
        plan, mean_squared_error, micro_batch_size, seed=1, context=LayerContext(config)
    )
    case = Case("fold", num_microbatches, dtype="float32", micro_batch_size=micro_batch_size)
    batches = [make_batch(plan.backbone, case, 0, m) for m in range(num_microbatches)]
    return pipeline, batches


def busy(kind: str, cuts: tuple[int, ...], num_microbatches: int, steps: int) -> list[float]:
    """Seconds that this rank spends in operations, for each step."""
    import torch.distributed as dist

    from megatron_pulse.planner.layout.placement import Partition, fold
    from megatron_pulse.planner.program.plan import Plan
    from model_specs import load_backbone

    name, options = BACKBONES[kind]
    plan = Plan(load_backbone(name, options), Partition(fold(2), cuts))
    pipeline, batches = pipeline_of(plan, num_microbatches, MICRO_BATCH_SIZE)
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
    from megatron_pulse.planner.layout.placement import fold
    from megatron_pulse.planner.partition.find import Goal, find_partition

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = []
    for kind in BACKBONES:
        goal = Goal(collocate=True)
        loads, partitions = [], []
        # At once, so that both cores are as busy as in the run.
        profiles = run_ranks(2, profile, kind, timeout_s=300)
        first = profiles[0].at(MICRO_BATCH_SIZE)
        for found in profiles:
            costs = found.at(MICRO_BATCH_SIZE)
            partitions.append(find_partition(costs, fold(2), goal))
            loads.append(goal.evaluate(costs, partitions[-1]))
        ranks = run_ranks(
            2, busy, kind, partitions[0].cuts, args.microbatches, args.steps + 2, timeout_s=600
        )
        measured = [statistics.median(seconds) for seconds in ranks]
        predicted = [args.microbatches * seconds for seconds in loads[0].compute_s]
        results.append(
            {
                "backbone": kind,
                "largest_load_s": [max(load.load_s) for load in loads],
                "second_partition_s": max(goal.evaluate(first, partitions[1]).load_s),
                "predicted_busy_s": predicted,
                "measured_busy_s": measured,
            }
        )
    if args.json:
        print(json.dumps(results))
        return
    for result in results:
        first, second = result["largest_load_s"]
        print(
            f"{result['backbone']}: predicted load by two profiles {1e3 * first:.1f} and "
            f"{1e3 * second:.1f} ms per microbatch ({100 * (second / first - 1):+.1f} %); the "
            f"second's partition by the first profile: "
            f"{100 * (result['second_partition_s'] / first - 1):+.1f} %"
        )
        pairs = zip(result["predicted_busy_s"], result["measured_busy_s"], strict=True)
        for device, (said, seen) in enumerate(pairs):
            print(
                f"  device {device}: {1e3 * said:.0f} ms busy predicted, {1e3 * seen:.0f} ms "
                f"measured ({100 * (said / seen - 1):+.1f} %)"
            )


if __name__ == "__main__":
    main()
