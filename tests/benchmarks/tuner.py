"""The tuner's answer beside what longer searches of each pipeline degree alone find.

    .venv/bin/python -m tests.benchmarks.tuner --jobs 2                      # 70 cells: many hours
    .venv/bin/python -m tests.benchmarks.tuner --reference 20 --jobs 2       # over an hour
    .venv/bin/python -m tests.benchmarks.tuner --clusters 64:25 dgx-a100 --models sdxl flux-dev

Clusters are presets, files, or N:G for N A100s of 80 GB, eight to a node with NVLink, whose nodes
share G Gb/s, or N:G:M, of which M GB are there. Times of layers are analytic. A step has so many
samples for each device. Both searches are those of `pulse tune`, whole schedules included, without
a solver, and stop after seconds of their own process's time, so that a busy machine does not bear
on them (--wall: after seconds of the wall's).
Loss is how much more throughput the best of the restricted searches has than the answer. Degrees
are searched alone, first for 5 seconds each, those that come within 25 % of the best for 20, and
those within 5 % for as long as --reference says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any

from megatron_pulse.cli.import_megatron import prepare_megatron
from megatron_pulse.planner.cluster.cluster import (
    BandwidthScope,
    Cluster,
    ClusterError,
    ClusterLink,
    cluster,
)
from megatron_pulse.planner.tune.config import Choices, divisors
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.profile.profile import Profile
from megatron_pulse.profile.roofline import Roofline
from megatron_pulse.progress import track
from tests.benchmarks.report import Flags, Report
from tests.benchmarks.setups import Tuning, analytic, decide

MODELS = ("uvit-h", "sdxl", "sd-v2-4.6b", "hunyuan-dit-3b", "flux-dev")
CLUSTERS = (
    *("dgx-a100", "dgx-a100:8", "dgx-h100:8", "pulse-v100", "pulse-910a"),
    *("8:100", "64:100", "64:25", "256:100", "256:25", "1024:100", "1024:25"),
)
LOOKS = ((0.0, 5.0), (0.75, 20.0), (0.95, float("inf")))
"""Searches of each degree alone: what share of the best throughput it has to have come to before,
and for how many seconds at the most, where --reference says no less."""

SHOWN = 1.001
"""Times the throughput before, from which an answer counts as a better one."""


@dataclass(frozen=True)
class Cell:
    """A cluster and a backbone with its profile there; ``divides`` and ``heads`` are for T > 1."""

    cluster: str
    model: str
    profile: Profile
    divides: bool
    heads: tuple[int, ...]
    batch: int

    def evaluator(self) -> Evaluator:
        """Without anything that an earlier search has learnt."""
        where = machine(self.cluster)
        samples = self.batch * where.num_devices
        return Evaluator(self.profile, where, samples, self.divides, self.heads)


@dataclass(frozen=True)
class Answer:
    """What a search found: samples/s (0: nothing fits), when within 1 % of that, and its size."""

    throughput: float
    config: str
    near_s: float
    spent_s: float
    num_configs: int
    num_simulated: int
    proved: bool


@dataclass(frozen=True)
class Result:
    """A cell's answer, and those of every pipeline degree alone."""

    cluster: str
    model: str
    answer: Answer
    alone: dict[int, Answer]

    @property
    def best(self) -> Answer:
        """The best of the restricted searches, or the answer where it is better."""
        return max((self.answer, *self.alone.values()), key=lambda a: a.throughput)

    @property
    def loss(self) -> float:
        """How much of the best throughput the answer lacks, as a share."""
        return 1 - self.answer.throughput / self.best.throughput if self.best.throughput else 0.0


def machine(name: str) -> Cluster:
    """A preset or a file, or N:G as the module has it; raises ClusterError."""
    number, rate, *memory = name.split(":")[:3] if ":" in name else (name, "")
    if not number.isdigit():
        return cluster(name)
    if not all(word.isdigit() for word in (rate, *memory)) or int(number) % 8:
        raise ClusterError(
            f"{name!r}: write N:G or N:G:M, N a multiple of 8, G in Gb/s, M in GB, or a preset"
        )
    nvlink = ClusterLink("nvlink", 300.0, 5.0, BandwidthScope.DEVICE)
    network = ClusterLink("ethernet", int(rate) / 8, 20.0, BandwidthScope.NODE)
    nodes = int(number) // 8
    memory_gb = float(memory[0]) if memory else 80.0
    between = network if nodes > 1 else None
    return Cluster(name, nodes, 8, memory_gb, "A100-80GB", nvlink, between, 0.9)


def answer(cell: Cell, choices: Choices, seconds: float, clock: Callable[[], float]) -> Answer:
    """What is found in so many seconds, whole schedules among them."""
    better = [(0.0, 0.0)]

    def progress(what: str, now: Tuning) -> None:
        if now.outcomes and now.outcomes[0].throughput > better[-1][1] * SHOWN:
            better.append((now.seconds, now.outcomes[0].throughput))

    found = decide(cell.evaluator(), choices, seconds, clock, progress)
    if found is None:
        return Answer(0.0, "nothing fits", 0.0, seconds, 0, 0, False)
    near_s = next((s for s, rate in better if rate >= 0.99 * better[-1][1]), 0.0)
    best, sizes = found.outcomes[0], (found.num_configs, found.num_simulated)
    return Answer(best.throughput, str(best.config), near_s, found.seconds, *sizes, found.proved)


def measure(cell: Cell, seconds: float, reference: float, wall: bool) -> Result:
    """The answer to a cell after ``seconds``, and those of each degree alone, of the promising ones
    after ``reference``."""
    clock = time.monotonic if wall else time.process_time
    result = Result(cell.cluster, cell.model, answer(cell, Choices(), seconds, clock), {})
    alone = result.alone
    for degree in divisors(machine(cell.cluster).num_devices) if reference else ():
        alone[degree] = Answer(0.0, "not yet searched", 0.0, 0.0, 0, 0, False)
    spent_s = 0.0
    for near, most_s in LOOKS:
        before_s, spent_s = spent_s, min(most_s, reference)
        for degree, before in alone.items() if spent_s > before_s else ():
            if before.throughput >= near * result.best.throughput and not before.proved:
                longer = answer(cell, Choices(pipeline=(degree,)), spent_s, clock)
                alone[degree] = max(before, longer, key=lambda a: a.throughput)
    return result


def cells(clusters: Sequence[str], models: Sequence[str], batch: int) -> list[Cell]:
    """All pairs, their profiles worked out once for each kind of device."""
    from model_specs import load_backbone

    prepare_megatron()
    profiles: dict[tuple[str, str], Profile] = {}
    found = []
    for name, model in product(clusters, models):
        device, backbone = machine(name).peaks, load_backbone(model, {})
        if device is None:
            raise ClusterError(f"{name!r} has a measured device; here times are analytic")
        if (model, device.name) not in profiles:
            dtype = next(d for d in ("bfloat16", "float16", "float32") if d in device.peak_flops)
            profiles[model, device.name] = analytic(model, {}, (1, 8), Roofline(device, dtype))
        about = backbone.divides_sequences, backbone.num_heads, batch
        found.append(Cell(name, model, profiles[model, device.name], *about))
    return found


def cells_of(result: Result) -> dict[str, Any]:
    """Cells of a row of the table."""
    own, best = result.answer, result.best
    return {
        "cluster": result.cluster,
        "model": result.model,
        "answer": own.config,
        "samples/s": own.throughput,
        "restricted": best.config if best is not own else "the same",
        "its samples/s": best.throughput,
        "loss %": round(100 * result.loss, 1),
        "near after s": round(own.near_s, 1),
        "simulated": own.num_simulated,
        "of": f"{own.num_configs:,}{', proved' * own.proved}",
    }


def main() -> None:
    """Print the table."""
    flags = Flags(__doc__)
    flags.add("--clusters", CLUSTERS, "presets or N:G", nargs="+", metavar="NAME")
    flags.add("--models", MODELS, "of 'pulse backbones'", nargs="+", metavar="NAME")
    flags.add("--batch", 8, "samples for each device", metavar="N")
    flags.add("--seconds", 28.0, "of the answer")
    flags.add("--reference", 60.0, "of each degree alone; 0: none (default 60)", type=float)
    flags.add("--wall", False, "seconds of the wall's clock, not the process's")
    flags.add("--jobs", 1, "processes, one cell each at a time")
    args = flags.parse_args()
    todo, report = cells(args.clusters, args.models, args.batch), Report(args.json)
    with ProcessPoolExecutor(args.jobs) as pool:
        jobs = [pool.submit(measure, c, args.seconds, args.reference, args.wall) for c in todo]
        for job in track(jobs, "tuning", "cells"):
            report.add(result := job.result(), cells_of(result))
    losses = [100 * r.loss for r in report.rows]
    above = sum(loss > 1 for loss in losses)
    print(f"\n{len(losses)} cells; loss of {max(losses):.1f} % at most, above 1 % in {above}")
    late = max(r.answer.spent_s for r in report.rows)
    print(f"longest: {late:.1f} s of {args.seconds:g}")


if __name__ == "__main__":
    main()
