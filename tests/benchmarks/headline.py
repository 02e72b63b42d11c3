"""The claim, side by side: less communication, more throughput on slow links, against whom.

    bash tests/benchmarks/run.sh [--quick] [--backbones uvit-2.7b,sdxl] [--rates 10,1.25]
    bash tests/benchmarks/run.sh --memory-gb 32 --batches 1 4

Ranks are processes in network namespaces, joined by links of a limited rate. Every operation sleeps
its profiled time, tensors of the right relative size travel (see ``emulation``). All contestants of
a cell run in the same processes, one after the other, in every repetition. With ``--memory-gb`` all
have devices of so much, each runs at its best that fits, FSDP2 and HSDP too, and what does not fit
is refused. Results go to ``--out``: results.json after every cell, then report.md and plots.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from megatron_pulse.planner.tune.config import Choices, Recompute
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.tune import DECISION_S
from model_specs import available
from tests.benchmarks.capped import capped, pipeline_sizes, way
from tests.benchmarks.cell import require_network, run_cell
from tests.benchmarks.contestant import REPLICAS, Contestant, Engine, Refused
from tests.benchmarks.contestants import SOLVER_S, contestants, needed_bytes, tuned
from tests.benchmarks.emulation import (
    ADAPTERS,
    BACKBONES,
    MODEL_S,
    NF4,
    OPERATION_S,
    Emulation,
    emulate,
    more_sizes,
    setup_of,
)
from tests.benchmarks.headline_report import volumes, write_report
from tests.benchmarks.report import Flags, count, positives, write_json
from tests.benchmarks.setups import USABLE, cluster_of, decide

RATES = (10.0, 2.5, 1.25)
"""GB/s of a V100: the paper's link to one of them alone, to 4, and to all 8 of its node at once."""

V100_GB = 32.0


def run(args: argparse.Namespace) -> None:
    """All cells, then the report."""
    file = args.out / "results.json"
    args.out.mkdir(parents=True, exist_ok=True)
    done: dict[str, Any] = {"cells": [], "volumes": []}
    if args.resume and file.exists():
        done = json.loads(file.read_text())
    cells = list(product(args.backbones, args.batches, args.rates))
    emulated: dict[str, Emulation] = {}
    for number, (name, batch, rate) in enumerate(cells):
        num = args.microbatches or setup_of(name).microbatches_per_device * args.ranks
        num *= batch
        key = f"{name} {rate:g} GB/s P={args.ranks} M={num}"
        key += f" {args.memory_gb:g} GB" if args.memory_gb else ""
        if any(cell["key"] == key for cell in done["cells"]):
            continue
        began = time.monotonic()
        if name not in emulated:
            sizes = more_sizes(name) if args.memory_gb else ()
            emulated[name] = emulate(name, args.model_seconds, sizes)
        done["cells"].append({"key": key, **measure(emulated[name], rate, num, args)})
        spent = time.monotonic() - began
        print(f"cell {number + 1} of {len(cells)}, {key}: {spent:.0f} s", flush=True)
        write_json(file, done)
    if not done["volumes"] or not args.resume:
        done["volumes"] = volumes()
        write_json(file, done)
    print(write_report(done, args.out))


def measure(
    emulation: Emulation, rate: float, count: int, args: argparse.Namespace
) -> dict[str, Any]:
    """One cell, of ``count`` microbatches."""
    entered, refused, pick = enter(emulation, rate, count, args)
    if args.only:
        name = pick and pick["contestant"]
        entered = [c for c in entered if c.name == name or any(w in c.name for w in args.only)]
    entered, passed_over = within(entered, args.within)
    rate_mbit = emulation.rate_mbit(rate * 1e9)
    results = run_cell(emulation.backbone, entered, args.ranks, rate_mbit, args.repetitions)
    return {
        "backbone": emulation.name,
        "rate_gbs": rate,
        "ranks": args.ranks,
        "microbatches": count,
        "micro_batch_size": emulation.micro_batch_size,
        "batch": count * emulation.micro_batch_size,
        "memory_gb": args.memory_gb or None,
        "time_scale": emulation.time_scale,
        "byte_divisor": emulation.byte_divisor,
        "rate_mbit": rate_mbit,
        "num_skips": len(emulation.costs.skips),
        "pick": pick,
        "results": list(map(asdict, results)),
        "refused": list(map(asdict, refused)),
        "passed_over": {one.name: one.predicted_s for one in passed_over},
    }


def enter(
    emulation: Emulation, rate: float, count: int, args: argparse.Namespace
) -> tuple[list[Contestant], list[Refused], dict[str, Any] | None]:
    """Contestants of a cell, what does not fit, and the tuner's pick, if anything of ours fits."""
    link, samples = emulation.link(rate * 1e9), count * emulation.micro_batch_size
    refused: list[Refused] = []
    if args.memory_gb:
        given = args.ranks, samples, USABLE * args.memory_gb * 1e9, args.solver_seconds
        entered, refused = capped(emulation, link, *given)
        memories = [args.memory_gb]
    else:
        entered = contestants(emulation, link, args.ranks, count, args.solver_seconds)
        base = next(c for c in entered if c.engine is Engine.MEGATRON_1F1B)
        # As much memory as the baseline has, where nothing fits.
        memories = [V100_GB, needed_bytes(base) / 1e9 / USABLE]
    found = (tune(emulation, rate, samples, args, memory) for memory in memories)
    if (outcome := next(filter(None, found), None)) is None:
        return entered, refused, None
    config, emulated, said = outcome.config, emulation, ""
    if args.memory_gb:
        chosen = outcome.stages.activations
        again, part = len(chosen.recompute), len(chosen.selective)
        said = way(config.micro_batch_size, again, len(emulation.costs), part)
        emulated = emulation.variant(config.micro_batch_size, chosen)
    best = tuned(emulated, link, outcome, entered, said)
    entered += [best] if best not in entered else []
    predicted_s = outcome.step_s * emulation.time_scale
    pick = {"config": str(config), "contestant": best.name, "predicted_s": predicted_s}
    return entered, refused, pick


def within(
    entered: Sequence[Contestant], factor: float
) -> tuple[list[Contestant], list[Contestant]]:
    """Who runs and who does not, being predicted to take more than ``factor`` times as long as the
    soonest of the others. Ours, Megatron's 1F1B, with which all are compared, and the soonest
    relayed pipeline, the soonest that shards (FSDP2, HSDP) and DDP, whose collectives are taken as
    ideal, always run."""
    kinds = dict.fromkeys(REPLICAS, "replicated") | {
        Engine.FSDP2: "sharded",
        Engine.HSDP: "sharded",
    }
    soonest: dict[str, Contestant] = {}
    for one in (one for one in entered if one.engine is not Engine.OURS):
        before = soonest.setdefault(kinds.get(one.engine, "relayed"), one)
        soonest[kinds.get(one.engine, "relayed")] = min(before, one, key=lambda c: c.predicted_s)
    least_s = min((one.predicted_s for one in soonest.values()), default=0.0)

    def runs(one: Contestant) -> bool:
        always = one.engine in (Engine.OURS, Engine.MEGATRON_1F1B) or one in soonest.values()
        return always or one.predicted_s <= factor * least_s

    return [c for c in entered if runs(c)], [c for c in entered if not runs(c)]


def tune(
    emulation: Emulation, rate: float, samples: int, args: argparse.Namespace, memory_gb: float
) -> Outcome | None:
    """The tuner's choice for as many V100s on such links, whose operations take as much longer as
    they do here; None if nothing fits ``memory_gb``.

    It chooses among its ways to use the devices; microbatches are those of all contestants, or
    under a cap those that pipelines may take, recomputed or not.
    """
    operation_us = 1e6 * OPERATION_S / emulation.time_scale
    device = setup_of(emulation.name).device.device.name
    cluster = cluster_of(args.ranks, rate, memory_gb, device, operation_us=operation_us)
    usual = [emulation.micro_batch_size]
    choices = Choices(
        pipeline=(1, args.ranks),
        tensor=(1,),
        micro_batch_size=tuple(pipeline_sizes(emulation, samples) if args.memory_gb else usual),
        recompute=(Recompute.NEVER, *[Recompute.NEEDED] * bool(args.memory_gb)),
    )
    evaluator = Evaluator(emulation.profile, cluster, samples)
    found = decide(evaluator, choices, args.decision_seconds)
    return None if found is None else found.outcomes[0]


def parse() -> argparse.Namespace:
    """The flags."""

    def names(text: str) -> list[str]:
        return [part for part in text.split(",") if part]

    flags = Flags(__doc__)
    flags.add("--backbones", help="of pulse backbones (default: the five of the table)", type=names)
    flags.add("--rates", help="GB/s of a real V100's link (default: 10,2.5,1.25)", type=positives)
    flags.add("--repetitions", help="of every contestant in a cell (default: 5)", type=count)
    flags.add("--ranks", 4, "pipeline devices P")
    flags.add("--microbatches", help="of a step (default: 4P for SD v2, 2P for others)", type=count)
    flags.add("--batches", [1], "times the usual global batch", type=count, nargs="+")
    flags.add("--memory-gb", 0.0, "of a device: what does not fit 0.9 of it is refused")
    flags.add("--model-seconds", MODEL_S, "a microbatch, emulated")
    flags.add("--solver-seconds", help=f"of each ILP (default: {SOLVER_S:g}); 0: none", type=float)
    flags.add("--decision-seconds", DECISION_S, "of processor time for the tuner's pick")
    flags.add("--only", [], "the pick, and whose name has one of these words", type=names)
    flags.add(
        "--within", math.inf,
        "of the others, pass over those predicted to take more than so many times as long as the "
        "soonest, but for 1F1B, the soonest pipeline, the soonest of FSDP2 and HSDP, and DDP "
        "(default: all run)",
        type=float,
    )  # fmt: skip
    flags.add("--out", Path("runs/claim"), "folder of results", type=Path)
    flags.add("--resume", False, "keep the cells that --out has")
    flags.add("--quick", False, "U-ViT, two rates, 2 repetitions, no ILP, unless given")
    args = flags.parse_args()
    usual = (list(BACKBONES), list(RATES), 5, SOLVER_S)
    if args.quick:
        usual = (["uvit-2.7b"], [10.0, 1.25], 2, 0.0)
    names_of = ("backbones", "rates", "repetitions", "solver_seconds")
    for name, value in zip(names_of, usual, strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)
    known = {*available(), *ADAPTERS, *(f"{name}{NF4}" for name in ADAPTERS)}
    unknown = [name for name in args.backbones if name not in known]
    faults = [f"no backbone is called {name!r}: see pulse backbones" for name in unknown]
    if not 0 <= args.solver_seconds < math.inf:
        faults.append(f"--solver-seconds {args.solver_seconds:g} is no number from 0 on")
    if not args.within >= 1:
        faults.append(f"--within {args.within:g} is less than the soonest prediction, which is 1")
    if faults:
        flags.error("; ".join(faults))
    return args


def main() -> None:
    """Measure and report."""
    args = parse()
    require_network()
    run(args)


if __name__ == "__main__":
    main()
