"""The claim, side by side: less communication, more throughput on slow links, against whom.

    bash tests/benchmarks/run.sh [--quick] [--backbones uvit-2.7b,sdxl] [--rates 10,1.25]

Ranks are processes in network namespaces, joined by links of a limited rate. Every operation sleeps
its profiled time, tensors of the right relative size travel (see ``emulation``). All contestants of
a cell run in the same processes, one after the other, in every repetition. Results go to ``--out``:
results.json after every cell, then report.md and plots.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_pulse.files import replacing
from megatron_pulse.planner.tune.evaluate import Outcome
from model_specs import available
from tests.benchmarks.cell import run_cell
from tests.benchmarks.contestants import SOLVER_S, contestants, memory_of_1f1b, tuned
from tests.benchmarks.emulation import BACKBONES, MODEL_S, Emulation, emulate, setup_of
from tests.benchmarks.network import unavailable

RATES = (10.0, 2.5, 1.25)
"""GB/s of a V100: the paper's link to one of them alone, to 4, and to all 8 of its node at once."""

V100_GB, USABLE = 32.0, 0.9


@dataclass(frozen=True)
class Pick:
    """What the tuner chose, as which contestant, and the step it predicts in emulated seconds."""

    config: str
    contestant: str
    predicted_s: float


def run(args: argparse.Namespace) -> None:
    """All cells, then the report."""
    from tests.benchmarks.claim_report import write_report
    from tests.benchmarks.claim_volumes import volumes

    file = args.out / "results.json"
    done: dict[str, Any] = {"cells": [], "volumes": []}
    if args.resume and file.exists():
        done = json.loads(file.read_text())
    cells = [(name, rate) for name in args.backbones for rate in args.rates]
    emulated: dict[str, Emulation] = {}
    for number, (name, rate) in enumerate(cells):
        count = args.microbatches or setup_of(name).microbatches_per_device * args.ranks
        key = f"{name} {rate:g} GB/s P={args.ranks} M={count}"
        if any(cell["key"] == key for cell in done["cells"]):
            continue
        began = time.monotonic()
        if name not in emulated:
            emulated[name] = emulate(name, args.model_seconds)
        cell = {"key": key, **measure(emulated[name], rate, count, args)}
        done["cells"].append(cell)
        spent = time.monotonic() - began
        print(f"cell {number + 1} of {len(cells)}, {key}: {spent:.0f} s", flush=True)
        save(done, file)
    if not done["volumes"] or not args.resume:
        done["volumes"] = volumes()
        save(done, file)
    print(write_report(done, args.out))


def save(results: dict[str, Any], file: Path) -> None:
    """Whole or not at all."""
    with replacing(file) as beside:
        beside.write_text(json.dumps(results, indent=1) + "\n")


def measure(
    emulation: Emulation, rate: float, count: int, args: argparse.Namespace
) -> dict[str, Any]:
    """One cell, of ``count`` microbatches."""
    link = emulation.link(rate * 1e9)
    entered = contestants(emulation, link, args.ranks, count, args.solver_seconds)
    pick = None
    # As much memory as the baseline has, where nothing fits.
    for memory in (V100_GB, memory_of_1f1b(entered) / 1e9 / USABLE):
        if (outcome := tune(emulation, rate, count, args.ranks, memory)) is not None:
            break
    if outcome is not None:
        best = tuned(emulation, link, outcome, entered)
        pick = Pick(str(outcome.config), best.name, outcome.step_s * emulation.time_scale)
        entered += [best] if best not in entered else []
    if args.only:
        entered = [c for c in entered if any(word in c.name for word in args.only)]
    results = run_cell(
        emulation.backbone,
        entered,
        args.ranks,
        emulation.rate_mbit(rate * 1e9),
        args.repetitions,
        args.ranks_per_node,
    )
    return {
        "backbone": emulation.name,
        "rate_gbs": rate,
        "ranks": args.ranks,
        "ranks_per_node": args.ranks_per_node,
        "microbatches": count,
        "micro_batch_size": emulation.micro_batch_size,
        "time_scale": emulation.time_scale,
        "byte_divisor": emulation.byte_divisor,
        "rate_mbit": emulation.rate_mbit(rate * 1e9),
        "num_skips": len(emulation.costs.skips),
        "pick": asdict(pick) if pick is not None else None,
        "results": [result.record() for result in results],
    }


def tune(
    emulation: Emulation, rate: float, count: int, ranks: int, memory_gb: float
) -> Outcome | None:
    """The tuner's choice for as many V100s on such links; None if nothing fits ``memory_gb``.

    It chooses among its ways to use the devices; microbatches are those of all contestants.
    """
    from megatron_pulse.planner.cluster.cluster import Cluster, ClusterLink, Shared
    from megatron_pulse.planner.tune.config import Choices
    from megatron_pulse.planner.tune.evaluate import Evaluator
    from megatron_pulse.planner.tune.searching.search import search

    link = ClusterLink("other", rate, 10.0, Shared.DEVICE)
    cluster = Cluster("claim", ranks, 1, memory_gb, "V100-32GB", link, link, usable_memory=USABLE)
    samples = count * emulation.micro_batch_size
    choices = Choices(
        pipeline=(1, ranks),
        tensor=(1,),
        micro_batch_size=(emulation.micro_batch_size,),
        recompute=(False,),
    )
    evaluator = Evaluator(emulation.profile, cluster, samples)
    found = search(evaluator, evaluator.candidates(choices), keep=1)
    return found.outcomes[0] if found.outcomes else None


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def names(text: str) -> list[str]:
        return [part for part in text.split(",") if part]

    def numbers(text: str) -> list[float]:
        return list(map(float, names(text)))

    add = parser.add_argument
    add("--backbones", type=names, default=list(BACKBONES), help="of pulse backbones")
    add("--rates", type=numbers, default=list(RATES), help="GB/s of a real V100's link")
    add("--repetitions", type=int, default=5)
    add("--ranks", type=int, default=4, help="pipeline devices P")
    add("--microbatches", type=int, help="of a step (default: 4P for SD v2, 2P for others)")
    add("--ranks-per-node", type=int, default=1, help="those on a node reach each other without")
    add("--model-seconds", type=float, default=MODEL_S, help="the model on a microbatch, emulated")
    add("--solver-seconds", type=float, default=SOLVER_S, help="for each ILP; 0: none")
    add("--only", type=names, default=[], help="contestants whose name has one of these words")
    add("--out", type=Path, default=Path("runs/claim"))
    add("--resume", action="store_true", help="keep the cells that --out has")
    add("--quick", action="store_true", help="one backbone, two rates, 2 repetitions, no ILP")
    args = parser.parse_args(argv)
    if args.quick:
        args.backbones, args.rates = ["uvit-2.7b"], [10.0, 1.25]
        args.repetitions, args.solver_seconds = 2, 0.0
    unknown = [name for name in args.backbones if name not in available()]
    faults = [f"no backbone is called {name!r}: see pulse backbones" for name in unknown]
    if args.ranks % args.ranks_per_node:
        faults.append(f"{args.ranks} ranks do not divide into nodes of {args.ranks_per_node}")
    if not args.rates or min(args.rates) <= 0 or args.repetitions < 1:
        faults.append("rates and repetitions must be positive")
    if faults:
        parser.error("; ".join(faults))
    return args


def main() -> None:
    """Measure and report."""
    args = parse()
    # An end from outside must not leave ranks and namespaces behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    if why := unavailable():
        sys.exit(f"the benchmark needs network namespaces: {why}")
    run(args)


if __name__ == "__main__":
    main()
