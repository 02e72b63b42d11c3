"""The tuner's predictions against real steps of this machine, over degrees, sizes and layouts.

Profiles a U-ViT and a UNet on two cores at once and probes the links between two ranks; then, for
each config, predicts a step as the tuner does and measures steps of the same plan on real ranks.
Gradients are not reduced and nothing is optimized here: a pipeline's step is compared.

    .venv/bin/python -m tests.benchmarks.steps
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from megatron_pulse.planner.cluster.cluster import Cluster
from megatron_pulse.planner.layout.layouts import FOLD_EXACT, LOOP, ROW, WHOLE
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from megatron_pulse.planner.step.plan import Plan
from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.evaluate import Evaluator
from model_specs import load_backbone
from tests.benchmarks.busy import BACKBONES, pipeline_of
from tests.ranks import run_ranks

SIZES = (1, 4)
FOLD, ROW, LOOPED, WHOLE = (
    FOLD_EXACT,
    ROW,
    LOOP,
    WHOLE,
)
CASES: tuple[tuple[Config, int], ...] = (
    (Config(1, 1, 1, 2, WHOLE), 4),
    (Config(1, 1, 1, 4, WHOLE), 4),
    (Config(2, 1, 1, 1, FOLD), 8),
    (Config(2, 1, 1, 2, FOLD), 2),
    (Config(2, 1, 1, 2, FOLD), 8),
    (Config(2, 1, 1, 4, FOLD), 4),
    (Config(2, 1, 1, 2, FOLD, split=True), 8),
    (Config(2, 1, 1, 2, ROW), 4),
    (Config(2, 1, 1, 4, ROW), 8),
    (Config(2, 1, 1, 2, LOOPED), 8),
)
"""Config and microbatches of a step."""


@dataclass(frozen=True)
class Cell:
    """Seconds of a step, predicted and measured (median), and samples of the step."""

    backbone: str
    config: str
    microbatches: int
    samples: int
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted_s / self.measured_s - 1


def profile(kind: str) -> Any:
    """A measured profile in a process of its own."""
    from megatron_pulse.profile.measuring.measure import measure

    torch.set_num_threads(1)
    name, options = BACKBONES[kind]
    return measure(load_backbone(name, options), SIZES, once_per_kind=True)


def probed() -> Cluster | None:
    """The links between the ranks, on rank 0."""
    import torch.distributed as dist

    from megatron_pulse.runtime.measure.probe import ProbeSettings, probe

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = probe(ProbeSettings("this machine", torch.device("cpu")))
    return None if found is None else found.cluster


def measured(
    kind: str, cuts: tuple[int, ...], config: Config, orders: Any, count: int, steps: int
) -> list[float]:
    """Seconds of each step on this rank."""
    import torch.distributed as dist

    from megatron_pulse.planner.layout.placement import Partition
    from megatron_pulse.planner.schedule.files import from_json

    name, options = BACKBONES[kind]
    plan = Plan(
        load_backbone(name, options),
        Partition(config.placement, cuts),
        schedules=(from_json(orders),),
    )
    pipeline, batches = pipeline_of(plan, count, config.micro_batch_size)
    seconds = []
    for _ in range(steps):
        dist.barrier()
        began = time.perf_counter()
        pipeline.step(batches)
        dist.barrier()
        seconds.append(time.perf_counter() - began)
    return seconds[2:]


def compare(kind: str, cluster: Cluster, steps: int) -> list[Cell]:
    """Every case of one backbone."""
    from megatron_pulse.planner.schedule.files import to_json

    measured_profile = run_ranks(2, profile, kind, timeout_s=600)[0]
    cells = []
    for config, count in CASES:
        samples = count * config.micro_batch_size
        evaluator = Evaluator(measured_profile, cluster, samples)
        found = synthesize(evaluator.problem(config, count), effort=20)
        outcome = evaluator.evaluate(config, found)
        cuts = outcome.stages.partition.cuts
        orders = to_json(found.schedule)
        ranks = run_ranks(
            config.pipeline, measured, kind, cuts, config, orders, count, steps, timeout_s=600
        )
        seconds = statistics.median(ranks[0])
        cells.append(Cell(kind, str(config), count, samples, outcome.pipeline_s, seconds))
    return cells


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's."""

    def ranks(values: list[float]) -> list[float]:
        order = sorted(range(len(values)), key=values.__getitem__)
        return [float(order.index(i)) for i in range(len(values))]

    return statistics.correlation(ranks(a), ranks(b))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=5, help="of each config, two more to warm up")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    cluster = run_ranks(2, probed, timeout_s=300)[0]
    cells = [cell for kind in BACKBONES for cell in compare(kind, cluster, args.steps + 2)]
    errors = [abs(cell.error) for cell in cells]
    per_sample = [(c.predicted_s / c.samples, c.measured_s / c.samples) for c in cells]
    summary = {
        "median_error": statistics.median(errors),
        "largest_error": max(errors),
        "rank_correlation": rank_correlation(
            [c.predicted_s for c in cells], [c.measured_s for c in cells]
        ),
        "rank_correlation_per_sample": rank_correlation(*map(list, zip(*per_sample, strict=True))),
    }
    if args.json:
        print(json.dumps({"cells": [vars(cell) for cell in cells], **summary}))
        return
    print(f"links: {cluster.intra_node}")
    for c in cells:
        print(
            f"{c.backbone}, {c.config}, M={c.microbatches}: {1e3 * c.predicted_s:.0f} ms "
            f"predicted, {1e3 * c.measured_s:.0f} ms measured ({100 * c.error:+.1f} %)"
        )
    for name, value in summary.items():
        print(f"{name.replace('_', ' ')}: {value:.3f}")


if __name__ == "__main__":
    main()
