"""Contestants in training an adapter: pipelines, FSDP2, and data parallelism under one memory cap.

    .venv/bin/python -m tests.benchmarks.adapters --json adapters.json

Predicted, on analytic RTX 4090s; nothing is run. Contestants and their predictions are those of
``headline``, which runs cells of the same names (``--backbones flux-lora``). LoRA of rank 16 at the
projections of attention; the base is frozen, in half precision or in NF4. Every contestant is at
its best that fits. A row has samples/s of the tuner's pick and of the fastest of each kind of the
others, and who is fastest. ``pulse tune`` also picks FSDP2, HSDP and the streamed base (weight
offload), by the same predictions.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from tests.benchmarks.contestant import Contestant, Engine
from tests.benchmarks.emulation import ADAPTERS, NF4, Emulation, emulate, quantized, setup_of
from tests.benchmarks.headline import enter
from tests.benchmarks.report import Flags, Report, count, positives, some_of
from tests.benchmarks.sharded_best import HOST_GBS

SIZES = (1, 2, 4)
"""Samples of a microbatch."""

KINDS = {
    "relayed 1F1B": (Engine.MEGATRON_1F1B, Engine.MEGATRON_INTERLEAVED, Engine.TORCH_1F1B,
                     Engine.TORCH_INTERLEAVED, Engine.TORCH_ZBV),
    "DeepSpeed 1F1B": (Engine.DEEPSPEED_1F1B,),
    "FSDP2": (Engine.FSDP2, Engine.HSDP),
    "DDP": (Engine.DATA_PARALLEL,),
}  # fmt: skip
"""Kinds of the other contestants, beside the streamed ones."""


def rates(
    emulation: Emulation, entered: Sequence[Contestant], samples: int
) -> dict[str, float | None]:
    """Samples/s of the fastest contestant of each kind; None where none fits."""
    found: dict[str, float | None] = {}
    streamed = {f"streamed, {rate:g} GB/s": f", {rate:g} GB/s" for rate in HOST_GBS}
    of_kind = {kind: [c for c in entered if c.engine in KINDS[kind]] for kind in KINDS} | {
        kind: [c for c in entered if c.engine is Engine.STREAMED and c.name.endswith(end)]
        for kind, end in streamed.items()
    }
    for kind, several in of_kind.items():
        least_s = min((c.predicted_s for c in several), default=None)
        found[kind] = least_s and samples * emulation.time_scale / least_s
    return found


def winner(rates: dict[str, float | None]) -> str:
    """Name of the largest rate."""
    return max(rates, key=lambda name: rates[name] or 0.0) if any(rates.values()) else "none fits"


def rows(
    emulation: Emulation, speeds: Sequence[float], samples: int, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Cells from the slowest links to the fastest.

    A pick for slower links counts if it is faster: it is no slower here.
    """
    ours, config = 0.0, "nothing fits"
    for rate in sorted(speeds):
        entered, _, pick = enter(emulation, rate, samples, args)
        others = rates(emulation, entered, samples)
        if pick is not None:
            found = samples * emulation.time_scale / pick["predicted_s"]
            ours, config = max((ours, config), (found, pick["config"]))
        fastest = max(filter(None, others.values()), default=None)
        yield {
            "model": emulation.name,
            "devices": args.ranks,
            "GB": args.memory_gb,
            "samples": samples,
            "GB/s": rate,
            "ours": ours or None,
            **others,
            "x fastest other": ours / fastest if ours and fastest else None,
            "fastest": winner({"ours": ours or None, **others}),
            "the pick": config,
        }


def main() -> None:
    """Predict and print."""
    flags = Flags(__doc__)
    flags.add("--models", list(ADAPTERS), "with commas between", type=some_of(ADAPTERS))
    flags.add("--devices", [4], type=count, nargs="+")
    flags.add("--memory-gb", [24.0], "of a device, with commas between", type=positives)
    flags.add("--rates", [10.0, 5.0, 2.5, 1.25], "GB/s, with commas between", type=positives)
    flags.add("--batches", [8], "samples of a step for each device", type=count, nargs="+")
    flags.add("--decision-seconds", 30.0, "of processor time for the tuner's pick")
    args = flags.parse_args()
    report = Report(args.json)
    for name in args.models:
        base = emulate(name, sizes=SIZES)
        packed = quantized(base.profile, setup_of(name).device)
        costs = packed.at(base.micro_batch_size)
        small = replace(base, name=f"{name}{NF4}", profile=packed, costs=costs)
        cells = product((base, small), args.devices, args.memory_gb, args.batches)
        for emulation, devices, memory_gb, batch in cells:
            given = {"ranks": devices, "memory_gb": memory_gb, "solver_seconds": 0.0}
            of = argparse.Namespace(**given, decision_seconds=args.decision_seconds)
            for found in rows(emulation, args.rates, batch * devices, of):
                report.add(found)


if __name__ == "__main__":
    main()
