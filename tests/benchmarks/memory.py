"""What a cap on memory costs: the tuner's choice without recomputation, with as little as is
needed, of whole layers alone or of what is cheap too, and with all of it, by simulation on analytic
V100s.

    python -m tests.benchmarks.memory --json memory.json
    python -m tests.benchmarks.memory --table layers.json --gb 48,80     # of a table of layers
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_pulse.cli.import_megatron import prepare_profiling
from megatron_pulse.planner.cluster.cluster import BandwidthScope, Cluster, ClusterLink
from megatron_pulse.planner.tune.config import Choices, Recompute
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.profile.analytic import analyse
from megatron_pulse.profile.profile import Profile
from megatron_pulse.profile.profile_from_table import read_table
from megatron_pulse.runtime.measure.execution_modes import RUNNING
from tests.benchmarks.arguments import positive, positives, some_of
from tests.benchmarks.decide import decide
from tests.benchmarks.emulation import V100, real_backbone

RANKS, USABLE = 4, 0.9
RATES = (10.0, 1.25)
"""GB/s of a device's link."""

CASES = {
    "sd-v2-4.6b": (256, (1, 2, 4, 8, 16), (32.0, 28.0, 26.0)),
    "uvit-2.7b": (128, (1, 2, 4, 8, 16), (32.0, 20.0, 14.0)),
    "hunyuan-dit-3b": (16, (1, 2), (32.0, 20.0, 18.0, 17.0)),
    "sdxl": (8, (1, 2), (32.0, 24.0, 20.0, 16.0, 15.0)),
    "flux-dev": (8, (1,), (96.0, 80.0, 72.0)),
}
"""Of each backbone the samples of a step, microbatch sizes, and GB of a device."""

WAYS = {
    "none": (Recompute.NEVER,),
    "whole layers": (Recompute.NEVER, Recompute.NEEDED),
    "needed": (Recompute.NEVER, Recompute.NEEDED),
    "all": (Recompute.ALWAYS,),
}


def cells(args: argparse.Namespace) -> Iterator[tuple[str, Profile, int, tuple[int, ...], float]]:
    """Name, profile, samples, microbatch sizes and GB of each."""
    if args.table is not None:
        profile = read_table(args.table, V100, (1,))
        yield from ((args.table.stem, profile, 8, (1,), gb) for gb in args.gb or (48.0, 80.0))
        return
    prepare_profiling()
    for name in args.backbones:
        samples, sizes, caps = CASES[name]
        profile = analyse(real_backbone(name), sizes, V100, running=RUNNING)
        yield from ((name, profile, samples, sizes, gb) for gb in args.gb or caps)


def best(
    profile: Profile, samples: int, sizes: tuple[int, ...], rate: float, gb: float, way: str,
    seconds: float,
) -> Outcome | None:  # fmt: skip
    """The tuner's choice in so many seconds of this process's time; None where nothing fits."""
    link = ClusterLink("other", rate, 10.0, BandwidthScope.DEVICE)
    cluster = Cluster("cap", RANKS, 1, gb, "V100-32GB", link, link, usable_memory=USABLE)
    evaluator = Evaluator(
        of_whole_layers(profile) if way == "whole layers" else profile, cluster, samples
    )
    choices = Choices(pipeline=(RANKS,), tensor=(1,), micro_batch_size=sizes, recompute=WAYS[way])
    found = decide(evaluator, choices, seconds)
    return None if found is None else found.outcomes[0]


def of_whole_layers(profile: Profile) -> Profile:
    """The same without what it takes and spares to compute again what is cheap."""
    times = {
        size: tuple(replace(layer, selective_bytes=0, selective_s=0.0) for layer in layers)
        for size, layers in profile.times.items()
    }
    return replace(profile, times=times)


def row(name: str, rate: float, gb: float, found: dict[str, Outcome | None]) -> dict[str, Any]:
    """A cell as JSON keeps it."""
    return {
        "backbone": name,
        "gb_per_s": rate,
        "gb": gb,
        **{
            way: outcome
            and {
                "samples_per_s": outcome.throughput,
                "config": str(outcome.config),
                "recomputed": len(outcome.stages.activations.recompute),
                "selective": len(outcome.stages.activations.selective),
                "memory_gb": max(outcome.memory_bytes) / 1e9,
            }
            for way, outcome in found.items()
        },
    }


def main() -> None:
    """Search and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--backbones", type=some_of(CASES), default=list(CASES), help=f"of {', '.join(CASES)}")
    add("--table", type=Path, help="of layers, instead of backbones")
    add(
        "--gb",
        type=positives,
        help="of a device (default: each one's own; a table's 48,80)",
    )
    add("--seconds", type=positive, default=20.0, help="of processor time a search (default: 20)")
    add("--json", type=Path, help="write rows here")
    args = parser.parse_args()
    if args.table is not None and not args.table.is_file():
        parser.error(f"--table {args.table}: there is no such file")
    rows = []
    print(
        "| backbone | GB/s | GB | "
        + " | ".join(WAYS)
        + " | layers again, of what is cheap, GB held |"
    )
    print("|" + "---|" * (4 + len(WAYS)))
    for name, profile, samples, sizes, gb in cells(args):
        for rate in RATES:
            found = {
                way: best(profile, samples, sizes, rate, gb, way, args.seconds) for way in WAYS
            }
            rates = [f"{o.throughput:.3g}" if o is not None else "-" for o in found.values()]
            if (own := found["needed"]) is not None:
                held = max(own.memory_bytes) / 1e9
                again, part = (
                    len(own.stages.activations.recompute),
                    len(own.stages.activations.selective),
                )
                rates.append(f"{again} and {part} of {len(profile.layers)}, {held:.1f}")
            print(f"| {name} | {rate:g} | {gb:g} | {' | '.join(rates)} |", flush=True)
            rows.append(row(name, rate, gb, found))
            if args.json is not None:
                args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
