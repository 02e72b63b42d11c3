"""Interleaved and two-wave cuts over two devices, with and without limits, beside all there are.

    .venv/bin/python -m tests.benchmarks.cuts

Analytic A100 profiles in bfloat16 of one sample, links of 100 Gbit/s; chains of more than 60
layers as whole blocks. Limits on memory are drawn between the least that any cuts need and 1.5
times as much. Milliseconds are of one core, also over eight devices, where nothing is beside.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from dataclasses import asdict, dataclass, replace

import numpy as np

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.cluster.link import Link
from megatron_pulse.planner.layout.layouts import LOOP, TWO_WAVES, Layout
from megatron_pulse.planner.layout.placement import Placement
from megatron_pulse.planner.partition.evaluate import MemoryRule
from megatron_pulse.planner.partition.find import Goal, PartitionError, find_partition
from megatron_pulse.planner.partition.memory import bytes_per_parameter, in_flight
from megatron_pulse.planner.partition.several.many import ManyCuts

BACKBONES = ("uvit-h", "sd-v2.1", "sdxl", "hunyuan-dit-v1.2", "flux-dev", "dit-xl-2", "sd3-medium")
LINK = Link(5e-6, 12.5e9)
MOST = 61
LAYOUTS = (LOOP, TWO_WAVES, replace(TWO_WAVES, name="two waves, soft", skips=LOOP.skips))
NUM_LIMITS = 28


def costs_of(name: str) -> ChainCosts:
    """The finest layers, or whole blocks where those are too many to try all cuts."""
    from megatron_pulse.profile.analytic import analyse
    from megatron_pulse.profile.devices import PRESETS, Roofline
    from model_specs import load_backbone
    from tests.planner.blocks import OPTIONS, block_of, grouped

    roofline = Roofline(PRESETS["A100-80GB"], "bfloat16")
    fine = analyse(load_backbone(name, OPTIONS.get(name, {})), [1], roofline).at(1)
    return fine if len(fine.names) <= MOST else grouped(fine, block_of)


def rule_of(placement: Placement) -> MemoryRule:
    """bfloat16 with Adam and as many microbatches as there usually are."""
    waiting = in_flight(placement, 4 * placement.num_devices)
    return MemoryRule(float("inf"), bytes_per_parameter("bfloat16"), waiting)


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
    """One backbone in one layout: the load over the least, without and with limits."""

    backbone: str
    layers: int
    layout: str
    over: float
    over_limited: float
    refused: int
    limits: int
    milliseconds: float
    milliseconds_of_8: float


def measure(name: str, layout: Layout) -> Row | None:
    """Beside all cuts; None where the layout has none."""
    costs, placement = costs_of(name), layout.placement(2)
    if layout.collocates and not costs.skips:
        return None
    many = ManyCuts(costs, placement, LINK, 1.0, rule_of(placement))
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
    over, seconds = [], []
    for limit in (float("inf"), *(held.min() * share for share in shares)):
        rule = replace(rule_of(placement), limit_bytes=limit)
        goal = Goal(collocate=layout.collocates, link=LINK, memory=lambda _, rule=rule: rule)
        begin = time.process_time()
        try:
            cuts = find_partition(costs, placement, goal, explain=False).cuts
        except PartitionError:
            over.append(float("inf"))
        else:
            best = load[held <= limit * (1 + 1e-12)].min()
            over.append(float(many.measure(np.array([cuts])).load[0] / best))
        seconds.append(time.process_time() - begin)
    limited = [share for share in over[1:] if share < float("inf")]
    return Row(
        name,
        len(costs.names),
        layout.name,
        over[0],
        max(limited, default=float("nan")),
        len(over) - 1 - len(limited),
        len(over) - 1,
        1e3 * float(np.median(seconds)),
        1e3 * of_eight(costs, layout),
    )


def of_eight(costs: ChainCosts, layout: Layout) -> float:
    """Seconds to cut over eight devices."""
    placement = layout.placement(8)
    begin = time.process_time()
    try:
        find_partition(
            costs, placement, Goal(collocate=layout.collocates, link=LINK), explain=False
        )
    except PartitionError:
        return float("nan")
    return time.process_time() - begin


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    tried = ((name, layout) for name in BACKBONES for layout in LAYOUTS)
    rows = [row for name, layout in tried if (row := measure(name, layout)) is not None]
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print(
        f"{'backbone':18}{'n':>4}  {'layout':17}{'over best':>10}{'with limits':>12}{'refused':>10}"
        f"{'ms':>6}{'ms, P = 8':>11}"
    )
    for row in rows:
        over = round(row.over - 1, 4) + 0.0  # not -0.00%
        print(
            f"{row.backbone:18}{row.layers:>4}  {row.layout:17}{over:>10.2%}"
            f"{row.over_limited - 1:>12.2%}{row.refused:>4} of {row.limits}"
            f"{row.milliseconds:>6.0f}{row.milliseconds_of_8:>11.0f}"
        )
    shares = [row.over - 1 for row in rows]
    print(
        f"\nover the best in the mean {np.mean(shares):.2%}, at most {max(shares):.2%}; "
        f"under limits at most {np.nanmax([row.over_limited for row in rows]) - 1:.2%}; refused "
        f"{sum(row.refused for row in rows)} of {sum(row.limits for row in rows)}"
    )


if __name__ == "__main__":
    main()
