"""A cascade's two backbones in one pipeline, beside training them in any other way on it.

    .venv/bin/python -m tests.benchmarks.cascade --json cascade.json        # as root: minutes
    .venv/bin/python -m tests.benchmarks.cascade --quick

Real processes and transfers over links of a limited rate, computing sleeps (as ``claim``): analytic
A100 times in bfloat16, one sample a microbatch of each chain.

====================  =============================================================================
cascade               both chains folded over all devices, in opposite directions, one schedule
one after the other   each folded over all devices: the sum of both steps
side by side          each on some of the devices, as many as make the longer step shortest
====================  =============================================================================
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.placement import fold, opposite, sequential
from tests.benchmarks.cell import run_cell
from tests.benchmarks.contestant import Contestant
from tests.benchmarks.contestants import Planner
from tests.benchmarks.emulation import MODEL_S, Emulation, slowed
from tests.benchmarks.fill_encoders import A100
from tests.benchmarks.network import unavailable

PAIRS = (("sd-v2.1", "sdxl"), ("uvit-h", "uvit-2.7b"), ("pixart-alpha", "sd3-medium"))
RATES = (10.0, 2.5)
"""GB/s of a device's link."""


@dataclass(frozen=True)
class Cell:
    """A cascade on ``devices``; emulated seconds of a step: measured, and predicted."""

    chains: str
    rate: float
    split: bool
    devices: int
    microbatches: int
    cascade_s: float
    in_turn_s: float
    beside_s: float
    beside_devices: tuple[int, int]
    predicted_s: tuple[float, float, float]

    def row(self) -> str:
        """Of the table."""
        shares = "+".join(map(str, self.beside_devices))
        return (
            f"| {self.chains} | {self.rate:g} | {'split' if self.split else 'whole'} | "
            f"{self.cascade_s:.2f} | {self.in_turn_s / self.cascade_s:.2f} | "
            f"{self.beside_s / self.cascade_s:.2f} ({shares}) | "
            f"{self.predicted_s[1] / self.predicted_s[0]:.2f}, "
            f"{self.predicted_s[2] / self.predicted_s[0]:.2f} |"
        )


@cache
def emulated(pair: tuple[str, str], model_s: float) -> tuple[Emulation, Emulation, Emulation]:
    """The cascade, and each of its backbones alone, on one slow scale."""
    from megatron_pulse.profile.analytic import analyse
    from model_specs import load_backbone

    both = load_backbone(f"cascade:base={pair[0]},upper={pair[1]}")
    whole = slowed(both.name, both, analyse(both, [1], A100), 1, model_s)
    alone = []
    for part in both.parts.values():
        profile = analyse(part, [1], A100)
        costs = profile.at(1)
        seconds = whole.time_scale * (sum(costs.forward_s) + sum(costs.backward_s))
        alone.append(slowed(part.name, part, profile, 1, seconds))
    return whole, alone[0], alone[1]


def planned(
    emulation: Emulation, link: Link, devices: int, count: int, split: bool, several: bool = False
) -> Contestant:
    """The emulation folded over so many devices; with ``several`` chains, each of them."""
    plan = Planner(emulation, link, devices, count, 0.0)
    placement = opposite(devices) if several else fold(devices)
    if devices == 1:
        placement = sequential(1)
    partition = plan.cut(plan.costs, placement, True) or plan.cut(plan.costs, placement)
    assert partition is not None
    return plan.synthesized(emulation.name, partition, split)


def measured(
    pair: tuple[str, str], rate: float, split: bool, devices: int, count: int, times: int, s: float
) -> Cell:
    """One row."""
    whole, *alone = emulated(pair, s)
    link, mbit = whole.link(rate * 1e9), whole.rate_mbit(rate * 1e9)

    def run(emulation: Emulation, contestant: Contestant, ranks: int) -> float:
        if ranks == 1:
            return contestant.predicted_s
        (found,) = run_cell(emulation.backbone, [contestant], ranks, mbit, times)
        return found.median_s

    cascade = planned(whole, link, devices, count, split, several=True)
    in_turn = [planned(one, link, devices, count, split) for one in alone]
    shares = [(n, devices - n) for n in range(1, devices)]
    beside = min(
        (
            [planned(one, link, n, count, split) for one, n in zip(alone, share, strict=True)]
            for share in shares
        ),
        key=lambda two: max(c.predicted_s for c in two),
    )
    sizes = tuple(c.partition.placement.num_devices for c in beside if c.partition is not None)
    return Cell(
        " + ".join(pair),
        rate,
        split,
        devices,
        count,
        run(whole, cascade, devices),
        sum(run(one, c, devices) for one, c in zip(alone, in_turn, strict=True)),
        max(run(one, c, n) for one, c, n in zip(alone, beside, sizes, strict=True)),
        (sizes[0], sizes[1]),
        (
            cascade.predicted_s,
            sum(c.predicted_s for c in in_turn),
            max(c.predicted_s for c in beside),
        ),
    )


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    """All that are asked for."""
    pairs, rates = (PAIRS[:1], RATES[:1]) if args.quick else (PAIRS, RATES)
    for pair in pairs:
        for rate in rates:
            for split in (False, True):
                yield measured(
                    pair, rate, split, args.devices, args.microbatches, args.times, args.model_s
                )


def main() -> None:
    """Print a row for each cell."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=4, metavar="P")
    parser.add_argument("--microbatches", type=int, default=8, metavar="M")
    parser.add_argument("--times", type=int, default=3, metavar="N", help="repetitions (default 3)")
    parser.add_argument("--model-s", type=float, default=MODEL_S, help="of a whole microbatch")
    parser.add_argument("--quick", action="store_true", help="one pair, one rate")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if why := unavailable():
        sys.exit(f"no emulated network: {why}")
    print("| chains | GB/s | backwards | cascade, s | one after the other | side by side "
          "(devices) | the same, predicted |\n|---|---|---|---|---|---|---|")  # fmt: skip
    found = []
    for cell in cells(args):
        print(cell.row(), flush=True)
        found.append(asdict(cell))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
