"""The partitioner: how fast it is, and what it gains over the paper's rule.

    .venv/bin/python -m tests.benchmarks.partition

Speed: chains of n units with nested skips over 16 devices. Gain: SD 2.1 at 512 px and SDXL at 1024
px on V100s (half precision, roofline), 32 microbatches of one sample, 10 GB/s between devices: the
paper's rule (largest stage by equation 1, whole blocks, every skip at home) against ours (device
load with communication, finest units, skips may travel). The predicted iteration simulates the
wave schedule of each partition's own stage times; a boundary takes its mean time over the link,
and skips that travel are assumed to overlap, except in the load.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from megatron_pulse.backbone.costs import ChainCosts, SkipCost
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.placement import Partition, fold
from megatron_pulse.planner.partition.find import Goal, find_partition
from megatron_pulse.planner.partition.volume import volume
from megatron_pulse.planner.schedule.problem import boundary_s, stage_problem
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from tests.benchmarks.report import Flags, Report
from tests.benchmarks.setups import analytic
from tests.planner.blocks import OPTIONS, block_of, grouped

LINK = Link(5e-6, 10e9)
NUM_MICROBATCHES = 32
UNITS = (50, 100, 200, 400)
GAINS = (("sd-v2.1", 4), ("sd-v2.1", 8), ("sdxl", 8))


def random_chain(num_layers: int) -> ChainCosts:
    """Uneven units; every second one of the first half pushes a skip to its mirror."""
    rng = random.Random(1)
    forward = tuple(rng.uniform(0.3, 1.0) for _ in range(num_layers))
    ones = (1,) * num_layers
    return ChainCosts(
        tuple(f"u{i}" for i in range(num_layers)),
        forward,
        tuple(rng.uniform(1.8, 2.2) * f for f in forward),
        ones,
        ones,
        (10,) * num_layers,
        tuple(SkipCost(i, num_layers - 1 - i, 10) for i in range(0, num_layers // 2 - 2, 2)),
    )


@dataclass
class Speed:
    """Seconds to find a partition of n units over 16 devices; the best of three runs each."""

    units: int
    exact_s: float
    soft_s: float
    soft_slow_links_s: float


def measure_speed(num_layers: int) -> Speed:
    """With each goal."""
    costs = random_chain(num_layers)

    def seconds(goal: Goal) -> float:
        took = []
        for _ in range(3):
            start = time.perf_counter()
            find_partition(costs, fold(16), goal)
            took.append(time.perf_counter() - start)
        return min(took)

    fast, slow = Link(0, 1000), Link(0, 10)
    goals = Goal(collocate=True, link=fast), Goal(link=fast), Goal(link=slow)
    return Speed(num_layers, *map(seconds, goals))


@dataclass
class Gain:
    """One backbone over P devices by one rule."""

    backbone: str
    P: int
    rule: str
    iteration_ms: float
    load_ms: float
    MB: float


def measure_gain(name: str, num_devices: int) -> Iterator[Gain]:
    """By the paper's rule, and by ours."""
    fine = analytic(name, OPTIONS[name]).at(1)
    rules: dict[str, tuple[ChainCosts, Goal]] = {
        "paper: stage, blocks, exact": (
            grouped(fine, block_of),
            Goal(("stage", "load", "bytes"), collocate=True, link=LINK),
        ),
        "ours: load, fine, exact": (fine, Goal(collocate=True, link=LINK)),
        "ours: load, fine, soft": (fine, Goal(link=LINK)),
    }
    for rule, (costs, goal) in rules.items():
        partition = find_partition(costs, fold(num_devices), goal)
        load, moved = goal.evaluate(costs, partition).load_s, volume(costs, partition).total
        step_s = predicted_iteration(costs, partition)
        yield Gain(name, num_devices, rule, 1e3 * step_s, 1e3 * max(load), moved / 1e6)


def predicted_iteration(costs: ChainCosts, partition: Partition) -> float:
    """Seconds of an iteration under the wave schedule."""
    placement = partition.placement
    moves = pairwise(placement.device_of_stage)
    sent = [
        seconds
        for seconds, (a, b) in zip(boundary_s(costs, partition, LINK), moves, strict=True)
        if a != b
    ]
    cap = (float(placement.num_stages),) * placement.num_devices
    problem = stage_problem(costs, partition, NUM_MICROBATCHES, sum(sent) / len(sent), cap=cap)
    return synthesize(problem).certificate.makespan


def main() -> None:
    """Measure and print."""
    report = Report(Flags(__doc__).parse_args().json)
    for units in UNITS:
        report.add(measure_speed(units))
    for name, num_devices in GAINS:
        for gain in measure_gain(name, num_devices):
            report.add(gain)


if __name__ == "__main__":
    main()
