"""Cost of a cap on memory: the tuner's choice with no recomputation, with as little as is
needed, of whole layers alone or of what is cheap too, and with all; simulated on analytic V100s.

    .venv/bin/python -m tests.benchmarks.memory --json memory.json
    .venv/bin/python -m tests.benchmarks.memory --table layers.json --gb 48,80
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

from megatron_pulse.cli.import_megatron import prepare_profiling
from megatron_pulse.planner.tune.config import Choices, Recompute
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.profile.analytic import analyse
from megatron_pulse.profile.profile import Profile
from megatron_pulse.profile.profile_from_table import read_table
from megatron_pulse.runtime.measure.execution_modes import RUNNING
from tests.benchmarks.emulation import real_backbone
from tests.benchmarks.report import Flags, Report, existing, positives, some_of
from tests.benchmarks.setups import V100, cluster_of, decide

RANKS = 4
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
    profile = of_whole_layers(profile) if way == "whole layers" else profile
    evaluator = Evaluator(profile, cluster_of(RANKS, rate, gb), samples)
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


def main() -> None:
    """Search and print."""
    flags = Flags(__doc__)
    flags.add("--backbones", list(CASES), "with commas between", type=some_of(CASES))
    flags.add("--table", help="of layers, instead of backbones", type=existing)
    flags.add("--gb", help="of a device (default: each one's own; a table's 48,80)", type=positives)
    flags.add("--seconds", 20.0, "of processor time a search")
    args = flags.parse_args()
    report = Report(args.json)
    for name, profile, samples, sizes, gb in cells(args):
        for rate in RATES:
            found = {w: best(profile, samples, sizes, rate, gb, w, args.seconds) for w in WAYS}
            row = {"backbone": name, "GB/s": rate, "GB": gb}
            row |= {w: None if o is None else o.throughput for w, o in found.items()}
            again = part = held = config = None
            if (own := found["needed"]) is not None:
                chosen, held = own.stages.activations, max(own.memory_bytes) / 1e9
                again, part, config = len(chosen.recompute), len(chosen.selective), str(own.config)
            row |= {"of layers": len(profile.layers), "again": again, "of what is cheap": part}
            report.add(row | {"GB held": held, "config": config})


if __name__ == "__main__":
    main()
