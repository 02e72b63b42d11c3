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
from functools import cache
from itertools import product
from typing import Any

from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.placement import fold, opposite, sequential
from tests.benchmarks.cell import require_network, run_cell
from tests.benchmarks.contestant import Contestant
from tests.benchmarks.contestants import Planner
from tests.benchmarks.emulation import MODEL_S, Emulation, slowed
from tests.benchmarks.report import Flags, Report
from tests.benchmarks.setups import A100

PAIRS = (("sd-v2.1", "sdxl"), ("uvit-h", "uvit-2.7b"), ("pixart-alpha", "sd3-medium"))
RATES = (10.0, 2.5)
"""GB/s of a device's link."""


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
    pair: tuple[str, str], rate: float, split: bool, args: argparse.Namespace
) -> dict[str, Any]:
    """One row; emulated seconds of a step."""
    whole, *alone = emulated(pair, args.model_s)
    link, mbit = whole.link(rate * 1e9), whole.rate_mbit(rate * 1e9)
    devices, count = args.devices, args.microbatches

    def run(emulation: Emulation, contestant: Contestant, ranks: int) -> float:
        if ranks == 1:
            return contestant.predicted_s
        (found,) = run_cell(emulation.backbone, [contestant], ranks, mbit, args.times)
        return found.median_s

    cascade = planned(whole, link, devices, count, split, several=True)
    in_turn = [planned(one, link, devices, count, split) for one in alone]
    shares = [(n, devices - n) for n in range(1, devices)]
    parts = [
        [planned(one, link, n, count, split) for one, n in zip(alone, share, strict=True)]
        for share in shares
    ]
    longest = [max(c.predicted_s for c in two) for two in parts]
    share, beside = min(zip(longest, shares, parts, strict=True), key=lambda each: each[0])[1:]
    seconds = run(whole, cascade, devices)
    turns = sum(run(one, c, devices) for one, c in zip(alone, in_turn, strict=True))
    side = max(run(one, c, n) for one, c, n in zip(alone, beside, share, strict=True))
    predicted = sum(c.predicted_s for c in in_turn), max(c.predicted_s for c in beside)
    return {
        "chains": " + ".join(pair),
        "GB/s": rate,
        "backwards": "split" if split else "whole",
        "cascade, s": seconds,
        "one after the other": turns / seconds,
        "side by side": side / seconds,
        "devices": share,
        "the same, predicted": [each / cascade.predicted_s for each in predicted],
    }


def main() -> None:
    """Print a row for each cell."""
    flags = Flags(__doc__)
    flags.add("--devices", 4, metavar="P")
    flags.add("--microbatches", 8, metavar="M")
    flags.add("--times", 3, "repetitions", metavar="N")
    flags.add("--model-s", MODEL_S, "of a whole microbatch")
    flags.add("--quick", False, "one pair, one rate")
    args = flags.parse_args()
    require_network()
    report = Report(args.json)
    pairs, rates = (PAIRS[:1], RATES[:1]) if args.quick else (PAIRS, RATES)
    for pair, rate, split in product(pairs, rates, (False, True)):
        report.add(measured(pair, rate, split, args))


if __name__ == "__main__":
    main()
