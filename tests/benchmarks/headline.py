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
import fcntl
import json
import math
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from megatron_pulse.files import replacing
from megatron_pulse.planner.tune.evaluate import Outcome
from model_specs import available
from tests.benchmarks.arguments import count, positive, positives
from tests.benchmarks.capped import capped, pipeline_sizes, way
from tests.benchmarks.cell import run_cell
from tests.benchmarks.contestant import Contestant, Engine, Refused
from tests.benchmarks.contestants import SOLVER_S, contestants, needed_bytes, tuned
from tests.benchmarks.emulation import (
    BACKBONES,
    MODEL_S,
    OPERATION_S,
    Emulation,
    emulate,
    more_sizes,
    setup_of,
)
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
    from tests.benchmarks.headline_report import write_report
    from tests.benchmarks.headline_volumes import volumes

    file = args.out / "results.json"
    done: dict[str, Any] = {"cells": [], "volumes": []}
    if args.resume and file.exists():
        done = json.loads(file.read_text())
    cells = list(product(args.backbones, args.batches, args.rates))
    emulated: dict[str, Emulation] = {}
    for number, (name, batch, rate) in enumerate(cells):
        count = args.microbatches or setup_of(name).microbatches_per_device * args.ranks
        count *= batch
        key = f"{name} {rate:g} GB/s P={args.ranks} M={count}"
        key += f" {args.memory_gb:g} GB" if args.memory_gb else ""
        if any(cell["key"] == key for cell in done["cells"]):
            continue
        began = time.monotonic()
        if name not in emulated:
            sizes = more_sizes(name) if args.memory_gb else ()
            emulated[name] = emulate(name, args.model_seconds, sizes)
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
    samples = count * emulation.micro_batch_size
    refused: list[Refused] = []
    if args.memory_gb:
        usable = USABLE * args.memory_gb * 1e9
        solver_s = args.solver_seconds
        entered, refused = capped(emulation, link, args.ranks, samples, usable, solver_s)
        memories = [args.memory_gb]
    else:
        entered = contestants(emulation, link, args.ranks, count, args.solver_seconds)
        base = next(c for c in entered if c.engine is Engine.MEGATRON_1F1B)
        # As much memory as the baseline has, where nothing fits.
        memories = [V100_GB, needed_bytes(base) / 1e9 / USABLE]
    pick = None
    for memory in memories:
        if (outcome := tune(emulation, rate, samples, args, memory)) is not None:
            break
    if outcome is not None:
        config, said = outcome.config, ""
        if args.memory_gb:
            chosen = outcome.stages.activations
            again, part = len(chosen.recompute), len(chosen.selective)
            said = way(config.micro_batch_size, again, len(emulation.costs), part)
            emulated = emulation.variant(config.micro_batch_size, chosen)
        else:
            emulated = emulation
        best = tuned(emulated, link, outcome, entered, said)
        pick = Pick(str(config), best.name, outcome.step_s * emulation.time_scale)
        entered += [best] if best not in entered else []
    if args.only:
        name = pick and pick.contestant
        entered = [c for c in entered if c.name == name or any(w in c.name for w in args.only)]
    entered, passed_over = within(entered, args.within)
    with alone(args.together):
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
        "batch": samples,
        "memory_gb": args.memory_gb,
        "time_scale": emulation.time_scale,
        "byte_divisor": emulation.byte_divisor,
        "rate_mbit": emulation.rate_mbit(rate * 1e9),
        "num_skips": len(emulation.costs.skips),
        "pick": asdict(pick) if pick is not None else None,
        "results": [result.record() for result in results],
        "refused": [asdict(one) for one in refused],
        "passed_over": {one.name: one.predicted_s for one in passed_over},
    }


@contextmanager
def alone(together: bool) -> Iterator[None]:
    """One call of this machine measures at a time, while others plan their next cell; those that
    do it ``together`` do not wait for each other."""
    how = fcntl.LOCK_SH if together else fcntl.LOCK_EX
    with (Path(tempfile.gettempdir()) / "megatron_pulse-claim.lock").open("a") as file:
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            print("planned; another call measures a cell", flush=True)
            fcntl.flock(file, how)
        yield


def within(
    entered: Sequence[Contestant], factor: float
) -> tuple[list[Contestant], list[Contestant]]:
    """Who runs and who does not, being predicted to take more than ``factor`` times as long as the
    soonest of the others. Ours, Megatron's 1F1B, with which all are compared, and the soonest
    relayed pipeline, the soonest that shards (FSDP2, HSDP) and DDP, whose collectives are taken as
    ideal, always run."""
    others = [one for one in entered if one.engine is not Engine.OURS]
    soonest: dict[str, Contestant] = {}
    for one in others:
        before = soonest.setdefault(_kind(one.engine), one)
        soonest[_kind(one.engine)] = min(before, one, key=lambda c: c.predicted_s)
    least_s = min((one.predicted_s for one in soonest.values()), default=0.0)

    def runs(one: Contestant) -> bool:
        always = one.engine in (Engine.OURS, Engine.MEGATRON_1F1B) or one in soonest.values()
        return always or one.predicted_s <= factor * least_s

    return [c for c in entered if runs(c)], [c for c in entered if not runs(c)]


def _kind(engine: Engine) -> str:
    if engine in (Engine.FSDP2, Engine.HSDP):
        return "sharded"
    return "replicated" if engine is Engine.DATA_PARALLEL else "relayed"


def tune(
    emulation: Emulation, rate: float, samples: int, args: argparse.Namespace, memory_gb: float
) -> Outcome | None:
    """The tuner's choice for as many V100s on such links, whose operations take as much longer as
    they do here; None if nothing fits ``memory_gb``.

    It chooses among its ways to use the devices; microbatches are those of all contestants, or
    under a cap those that pipelines may take, recomputed or not.
    """
    from megatron_pulse.planner.cluster.cluster import BandwidthScope, Cluster, ClusterLink
    from megatron_pulse.planner.tune.config import Choices, Recompute
    from megatron_pulse.planner.tune.evaluate import Evaluator
    from megatron_pulse.planner.tune.tune import DECISION_S
    from tests.benchmarks.decide import decide

    link = ClusterLink("other", rate, 10.0, BandwidthScope.DEVICE)
    cluster = Cluster(
        "claim",
        args.ranks,
        1,
        memory_gb,
        "V100-32GB",
        link,
        link,
        usable_memory=USABLE,
        operation_us=1e6 * OPERATION_S / emulation.time_scale,
    )
    sizes = [emulation.micro_batch_size]
    if args.memory_gb:
        sizes = pipeline_sizes(emulation, samples)
    choices = Choices(
        pipeline=(1, args.ranks),
        tensor=(1,),
        micro_batch_size=tuple(sizes),
        recompute=(Recompute.NEVER, *[Recompute.NEEDED] * bool(args.memory_gb)),
    )
    evaluator = Evaluator(emulation.profile, cluster, samples)
    found = decide(evaluator, choices, DECISION_S)
    return None if found is None else found.outcomes[0]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def names(text: str) -> list[str]:
        return [part for part in text.split(",") if part]

    add = parser.add_argument
    add("--backbones", type=names, help="of pulse backbones (default: the five of the table)")
    add("--rates", type=positives, help="GB/s of a real V100's link (default: 10,2.5,1.25)")
    add("--repetitions", type=count, help="of every contestant in a cell (default: 5)")
    add("--ranks", type=count, default=4, help="pipeline devices P")
    add("--microbatches", type=count, help="of a step (default: 4P for SD v2, 2P for others)")
    add("--batches", type=count, nargs="+", default=[1], help="times the usual global batch")
    add("--memory-gb", type=positive, help="of a device: what does not fit 0.9 of it is refused")
    add("--ranks-per-node", type=count, default=1, help="those on a node reach each other without")
    add(
        "--model-seconds",
        type=positive,
        default=MODEL_S,
        help="a microbatch, emulated",
    )
    add("--solver-seconds", type=float, help=f"for each ILP (default: {SOLVER_S:g}); 0: none")
    add("--only", type=names, default=[], help="the pick, and whose name has one of these words")
    add(
        "--within",
        type=float,
        default=math.inf,
        help="of the others, pass over those predicted to take more than so many times as long as "
        "the soonest, but for 1F1B, the soonest pipeline, the soonest of FSDP2 and HSDP, and DDP "
        "(default: all run)",
    )
    add(
        "--together",
        action="store_true",
        help="measure beside other calls that say so, not one at a time: two of four ranks load a "
        "machine as one of eight does",
    )
    add("--out", type=Path, default=Path("runs/claim"))
    add("--resume", action="store_true", help="keep the cells that --out has")
    add(
        "--quick", action="store_true", help="U-ViT, two rates, 2 repetitions, no ILP, unless given"
    )
    args = parser.parse_args(argv)
    usual = (list(BACKBONES), list(RATES), 5, SOLVER_S)
    if args.quick:
        usual = (["uvit-2.7b"], [10.0, 1.25], 2, 0.0)
    names_of = ("backbones", "rates", "repetitions", "solver_seconds")
    for name, value in zip(names_of, usual, strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)
    unknown = [name for name in args.backbones if name not in available()]
    faults = [f"no backbone is called {name!r}: see pulse backbones" for name in unknown]
    if args.ranks % args.ranks_per_node:
        faults.append(f"{args.ranks} ranks do not divide into nodes of {args.ranks_per_node}")
    if not 0 <= args.solver_seconds < math.inf:
        faults.append(f"--solver-seconds {args.solver_seconds:g} is no number from 0 on")
    if not args.within >= 1:
        faults.append(f"--within {args.within:g} is less than the soonest prediction, which is 1")
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
