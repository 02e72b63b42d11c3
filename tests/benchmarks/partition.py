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

import argparse
import json
import platform
import random
import time
from dataclasses import asdict, dataclass

from megatron_pulse.backbone.costs import ChainCosts, SkipCost
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.placement import Partition, fold
from megatron_pulse.planner.partition.find import Goal, find_partition
from megatron_pulse.planner.partition.volume import volume
from megatron_pulse.planner.schedule.problem import stage_problem
from megatron_pulse.planner.schedule.search.synthesize import synthesize

LINK = Link(5e-6, 10e9)
NUM_MICROBATCHES = 32


def random_chain(num_layers: int) -> ChainCosts:
    """Uneven units; every second one of the first half pushes a skip to its mirror."""
    rng = random.Random(1)
    forward = tuple(rng.uniform(0.3, 1.0) for _ in range(num_layers))
    return ChainCosts(
        tuple(f"u{i}" for i in range(num_layers)),
        forward,
        tuple(rng.uniform(1.8, 2.2) * f for f in forward),
        (1,) * num_layers,
        (1,) * num_layers,
        (10,) * num_layers,
        tuple(SkipCost(i, num_layers - 1 - i, 10) for i in range(0, num_layers // 2 - 2, 2)),
    )


@dataclass
class Speed:
    """Seconds to find a partition of n units over 16 devices."""

    units: int
    exact_s: float
    soft_s: float
    soft_slow_links_s: float


def measure_speed(num_layers: int) -> Speed:
    """The best of three runs each."""
    costs = random_chain(num_layers)

    def seconds(goal: Goal) -> float:
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            find_partition(costs, fold(16), goal)
            best = min(best, time.perf_counter() - start)
        return best

    return Speed(
        num_layers,
        seconds(Goal(collocate=True, link=Link(0, 1000))),
        seconds(Goal(link=Link(0, 1000))),
        seconds(Goal(link=Link(0, 10))),
    )


@dataclass
class Gain:
    """One backbone over P devices by one rule."""

    backbone: str
    num_devices: int
    rule: str
    iteration_ms: float
    load_ms: float
    megabytes: float


def measure_gain(name: str, num_devices: int) -> list[Gain]:
    """By the paper's rule, and by ours."""
    fine = v100_costs(name)
    from tests.planner.blocks import block_of, grouped

    rules: dict[str, tuple[ChainCosts, Goal]] = {
        "paper: stage, blocks, exact": (
            grouped(fine, block_of),
            Goal(("stage", "load", "bytes"), collocate=True, link=LINK),
        ),
        "ours: load, fine, exact": (fine, Goal(collocate=True, link=LINK)),
        "ours: load, fine, soft": (fine, Goal(link=LINK)),
    }
    gains = []
    for rule, (costs, goal) in rules.items():
        partition = find_partition(costs, fold(num_devices), goal)
        gains.append(
            Gain(
                name,
                num_devices,
                rule,
                1e3 * predicted_iteration(costs, partition),
                1e3 * max(goal.evaluate(costs, partition).load_s),
                volume(costs, partition).total / 1e6,
            )
        )
    return gains


def v100_costs(name: str) -> ChainCosts:
    """Analytic costs of one sample in half precision."""
    from megatron_pulse.profile.analytic import analyse
    from megatron_pulse.profile.roofline import PRESETS, Roofline
    from model_specs import load_backbone
    from tests.planner.blocks import OPTIONS

    roofline = Roofline(PRESETS["V100-32GB"], "float16")
    return analyse(load_backbone(name, OPTIONS[name]), [1], roofline).at(1)


def predicted_iteration(costs: ChainCosts, partition: Partition) -> float:
    """Seconds of an iteration under the wave schedule."""
    placement = partition.placement

    sent = [
        LINK.time_s(costs.boundary_bytes[partition.cuts[s]])
        for s in range(1, placement.num_stages)
        if placement.device_of_stage[s] != placement.device_of_stage[s - 1]
    ]
    link = sum(sent) / len(sent)
    cap = (float(placement.num_stages),) * placement.num_devices
    problem = stage_problem(costs, partition, NUM_MICROBATCHES, link, cap=cap)
    return synthesize(problem).certificate.makespan


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    speeds = [measure_speed(n) for n in (50, 100, 200, 400)]
    gains = [
        gain
        for name, num_devices in (("sd-v2.1", 4), ("sd-v2.1", 8), ("sdxl", 8))
        for gain in measure_gain(name, num_devices)
    ]
    if args.json:
        print(
            json.dumps({"speed": [asdict(s) for s in speeds], "gain": [asdict(g) for g in gains]})
        )
        return
    print(f"{platform.processor() or platform.machine()}, P = 16; seconds")
    print(f"{'units':>6}{'exact':>9}{'soft':>9}{'soft, slow links':>18}")
    for s in speeds:
        print(f"{s.units:>6}{s.exact_s:>9.2f}{s.soft_s:>9.2f}{s.soft_slow_links_s:>18.2f}")
    print(f"\n{'backbone':10}{'P':>3}  {'rule':30}{'iteration ms':>14}{'load ms':>10}{'MB':>8}")
    for g in gains:
        print(
            f"{g.backbone:10}{g.num_devices:>3}  {g.rule:30}{g.iteration_ms:>14.1f}"
            f"{g.load_ms:>10.2f}{g.megabytes:>8.1f}"
        )


if __name__ == "__main__":
    main()
