"""Interleaved and two-wave cuts over two devices, with and without limits, beside all there are.

    .venv/bin/python -m tests.benchmarks.cuts

Analytic A100 profiles in bfloat16 of one sample, links of 100 Gbit/s; chains of more than 60
layers as whole blocks. Limits on memory are drawn between the least that any cuts need and 1.5
times as much. Milliseconds are of one core, also over eight devices, where nothing is beside.
"""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.layouts import LOOP, TWO_WAVES, Layout
from megatron_pulse.planner.layout.placement import Placement
from megatron_pulse.planner.partition.evaluate import MemoryRule
from megatron_pulse.planner.partition.find import Goal, PartitionError, find_partition
from megatron_pulse.planner.partition.memory import bytes_per_parameter, in_flight
from megatron_pulse.planner.partition.multi_chunk.batched_cost import BatchedEvaluator
from tests.benchmarks.report import Flags, Report
from tests.benchmarks.setups import A100, analytic
from tests.planner.blocks import OPTIONS, block_of, grouped

BACKBONES = ("uvit-h", "sd-v2.1", "sdxl", "hunyuan-dit-v1.2", "flux-dev", "dit-xl-2", "sd3-medium")
LINK = Link(5e-6, 12.5e9)
MOST = 61
LAYOUTS = (LOOP, TWO_WAVES, replace(TWO_WAVES, name="two waves, soft", skips=LOOP.skips))
NUM_LIMITS = 28


@cache
def costs_of(name: str) -> ChainCosts:
    """The finest layers, or whole blocks where those are too many to try all cuts."""
    fine = analytic(name, OPTIONS.get(name), device=A100).at(1)
    return fine if len(fine.names) <= MOST else grouped(fine, block_of)


def rule_of(placement: Placement, limit: float = float("inf")) -> MemoryRule:
    """bfloat16 with Adam and as many microbatches as there usually are."""
    waiting = in_flight(placement, 4 * placement.num_devices)
    return MemoryRule(limit, bytes_per_parameter("bfloat16"), waiting)


def all_cuts(num_layers: int, placement: Placement) -> np.ndarray:
    """Every choice of cuts between devices; inside a device as needs the least memory.

    That is as early as can be: later stages keep fewer microbatches.
    """
    home = placement.device_of_stage
    moves = [s for s in range(1, len(home)) if home[s] != home[s - 1]]
    chosen = itertools.chain.from_iterable(itertools.combinations(range(1, num_layers), len(moves)))
    outer = np.fromiter(chosen, dtype=np.int64).reshape(-1, len(moves))
    cuts = np.zeros((len(outer), len(home) + 1), dtype=np.int64)
    cuts[:, moves], cuts[:, -1] = outer, num_layers
    for stage in range(1, len(home)):
        if stage not in moves:
            cuts[:, stage] = cuts[:, stage - 1] + 1
    return cuts[(np.diff(cuts, axis=1) > 0).all(axis=1)]


@dataclass
class Row:
    """One backbone in one layout: shares of the load over the least, without and with limits."""

    backbone: str
    layers: int
    layout: str
    over: float
    over_limited: float
    refused: int
    limits: int
    ms: float
    ms_of_8: float


def found_cuts(
    costs: ChainCosts, layout: Layout, num_devices: int, limit: float | None = None
) -> tuple[tuple[int, ...] | None, float]:
    """Cuts within ``limit`` bytes, None where there are none, and the seconds to find them."""
    placement = layout.placement(num_devices)
    memory = None if limit is None else lambda _: rule_of(placement, limit)
    goal = Goal(collocate=layout.collocates, link=LINK, memory=memory)
    begin = time.process_time()
    try:
        cuts = find_partition(costs, placement, goal, explain=False).cuts
    except PartitionError:
        cuts = None
    return cuts, time.process_time() - begin


def measure(name: str, layout: Layout) -> Row | None:
    """Beside all cuts; None where the layout has none."""
    costs, placement = costs_of(name), layout.placement(2)
    if layout.collocates and not costs.skips:
        return None
    many = BatchedEvaluator(costs, placement, LINK, 1.0, rule_of(placement))
    parts = np.array_split(all_cuts(len(costs.names), placement), 40)
    found = [many.measure(part) for part in parts if len(part)]
    load, held, apart = (
        np.concatenate([getattr(each, name) for each in found])
        for name in ("load", "memory", "apart")
    )
    legal = (apart == 0) | (not layout.collocates)
    load, held = load[legal], held[legal]
    rng = random.Random(f"{name} {layout}")
    shares = [1.0] + [rng.uniform(1.0, 1.5) for _ in range(NUM_LIMITS - 1)]
    over, seconds, refused = [], [], 0
    for limit in (float("inf"), *(held.min() * share for share in shares)):
        cuts, spent = found_cuts(costs, layout, 2, limit)
        seconds.append(spent)
        if cuts is None:
            refused += 1
        else:
            best = load[held <= limit * (1 + 1e-12)].min()
            over.append(float(many.measure(np.array([cuts])).load[0] / best) - 1)
    limited = max(over[1:], default=float("nan"))
    ms, ms_of_8 = 1e3 * float(np.median(seconds)), 1e3 * found_cuts(costs, layout, 8)[1]
    layers = len(costs.names)
    return Row(name, layers, layout.name, over[0], limited, refused, len(shares), ms, ms_of_8)


def main() -> None:
    """Measure and print."""
    flags = Flags(__doc__)
    flags.add("--backbones", BACKBONES, nargs="+", choices=BACKBONES)
    args = flags.parse_args()
    report = Report(args.json)
    for name, layout in itertools.product(args.backbones, LAYOUTS):
        if (row := measure(name, layout)) is not None:
            report.add(row)
    rows = report.rows
    shares = [row.over for row in rows]
    print(
        f"\nover the best in the mean {np.mean(shares):.2%}, at most {max(shares):.2%}; "
        f"under limits at most {np.nanmax([row.over_limited for row in rows]):.2%}; refused "
        f"{sum(row.refused for row in rows)} of {sum(row.limits for row in rows)}"
    )


if __name__ == "__main__":
    main()
