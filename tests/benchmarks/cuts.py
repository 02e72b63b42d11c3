"""Interleaved and two-wave cuts over two devices, with and without limits, beside all there are.

    .venv/bin/python -m tests.benchmarks.cuts
    .venv/bin/python -m tests.benchmarks.cuts --devices 4 8    # beside more work: 5 minutes

Analytic A100 profiles in bfloat16 of one sample, links of 100 Gbit/s; chains of more than 60
layers as whole blocks. Limits on memory are drawn between the least that any cuts need and 1.5
times as much. Milliseconds are of one core, also over eight devices, where nothing is beside.

With --devices limits are drawn between the least for which cuts are found and what the best need
without a limit, and what is found is set beside what so many times the usual work finds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from dataclasses import asdict, dataclass, replace
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
from megatron_pulse.planner.partition.multi_chunk.search import WORK

BACKBONES = ("uvit-h", "sd-v2.1", "sdxl", "hunyuan-dit-v1.2", "flux-dev", "dit-xl-2", "sd3-medium")
LINK = Link(5e-6, 12.5e9)
MOST = 61
LAYOUTS = (LOOP, TWO_WAVES, replace(TWO_WAVES, name="two waves, soft", skips=LOOP.skips))
DEEP = replace(LOOP.with_chunks(3), name="three interleaved")
NUM_LIMITS = 28

MORE, NUM_TIGHT = 7.5, 4
"""Times the usual work, and limits, where cuts are set beside those of more work."""


@cache
def costs_of(name: str) -> ChainCosts:
    """The finest layers, or whole blocks where those are too many to try all cuts."""
    from megatron_pulse.profile.analytic import analyse
    from megatron_pulse.profile.roofline import PRESETS, Roofline
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


@dataclass
class Tight:
    """One backbone in one layout over some devices: loads over those of more work, under limits.

    ``over`` counts limits under which both found cuts, ``refused`` those under which only more work
    did, and ``found`` those under which only the usual did.
    """

    backbone: str
    layers: int
    layout: str
    devices: int
    over: list[float]
    refused: int
    found: int
    milliseconds: float


def tight(name: str, layout: Layout, num_devices: int) -> Tight | None:
    """Beside more work; None where the layout has no cuts."""
    costs, placement = costs_of(name), layout.placement(num_devices)
    seconds = []

    def cut(limit: float, work: int) -> tuple[float, float]:
        """The load and the memory of the cuts; infinite for none."""
        rule = replace(rule_of(placement), limit_bytes=limit)
        goal = Goal(collocate=layout.collocates, link=LINK, memory=lambda _: rule)
        begin = time.process_time()
        try:
            found = find_partition(costs, placement, goal, explain=False, work=work)
        except PartitionError:
            return float("inf"), float("inf")
        finally:
            seconds.append(time.process_time() - begin)
        measured = goal.evaluate(costs, found)
        return max(measured.load_s), max(measured.memory_bytes)

    free = least = cut(1e18, WORK)[1]
    if free == float("inf"):
        return None
    low = least / 4
    while least > 1.01 * low:
        middle = (least * low) ** 0.5
        held = cut(middle, 2 * WORK)[1]
        low, least = (low, held) if held <= middle else (middle, least)
    rng = random.Random(f"{name} {layout} {num_devices}")
    limits = [least, *(rng.uniform(least, max(least, free)) for _ in range(NUM_TIGHT - 1))]
    more = [cut(limit * (1 + 1e-9), round(MORE * WORK))[0] for limit in limits]
    seconds.clear()
    usual = [cut(limit * (1 + 1e-9), WORK)[0] for limit in limits]
    pairs = list(zip(usual, more, strict=True))
    none = float("inf")
    return Tight(
        name,
        len(costs.names),
        layout.name,
        num_devices,
        [a / b - 1 for a, b in pairs if max(a, b) < none],
        sum(a == none > b for a, b in pairs),
        sum(a < none == b for a, b in pairs),
        1e3 * float(np.median(seconds)),
    )


def show_tight(num_devices: list[int]) -> None:
    """Measure beside more work, and print."""
    print(f"{'backbone':18}{'n':>4}  {'layout':17}{'P':>3}{'over':>8}{'refused':>9}{'ms':>6}")
    rows = []
    for name, layout, count in itertools.product(BACKBONES, (*LAYOUTS, DEEP), num_devices):
        if layout.num_chunks * count <= len(costs_of(name).names) and (
            row := tight(name, layout, count)
        ):
            rows.append(row)
            print(
                f"{name:18}{row.layers:>4}  {layout.name:17}{count:>3}"
                f"{max(row.over, default=0.0):>8.1%}{row.refused:>9}{row.milliseconds:>6.0f}",
                flush=True,
            )
    over = [share for row in rows for share in row.over]
    above = sum(share > 0.01 for share in over)
    more, fewer = (sum(getattr(row, name) for row in rows) for name in ("refused", "found"))
    print(
        f"\nover those of {MORE} times the work, under {NUM_TIGHT * len(rows)} limits: in the mean "
        f"{np.mean(over):.2%}, at most {max(over):.1%}, above 1 % in {above}; refused {more} more, "
        f"{fewer} fewer"
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
    parser.add_argument("--devices", type=int, nargs="+", metavar="P", help="beside more work")
    args = parser.parse_args()
    if args.devices:
        show_tight(args.devices)
        return
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
