"""Encoders in idle time: the filled step beside encoding in front, and the paper's greedy.

    .venv/bin/python -m tests.benchmarks.fill --json FILE            # ten minutes on a core
    .venv/bin/python -m tests.benchmarks.fill --models sd-v2.1 sdxl --seconds 5
    .venv/bin/python -m tests.benchmarks.fill --random 200 --json FILE   # beside CP-SAT's optimum

Analytic A100 times in bfloat16 of backbones and encoders (``fill_encoders``), folds, schedules of
our synthesizer with whole and with split backwards within 2P and 1.5P activations, 10 GB/s links.

==========  =======================================================================================
front       encoders before the step, samples divided over all devices
stored      latents are read from a disk, text is filled
filled      all encoders are filled: ours, and the greedy of DiffusionPipe (links not counted)
best        shortest step with encoding in front over shortest filled one, of all schedules of that
            memory
over bound  filled step over max(step without encoders, work / P), less one
15 %        the step where encoders take 1.15 and 0.85 times as long as planned, over what ours
            makes of those times when it knows them, and need not last where they are others
==========  =======================================================================================
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.bubble_fill import search
from megatron_pulse.planner.bubble_fill.check import faults_of
from megatron_pulse.planner.bubble_fill.components import Component, FrozenLayer
from megatron_pulse.planner.bubble_fill.diffusionpipe import greedy
from megatron_pulse.planner.bubble_fill.problem import FillProblem
from megatron_pulse.planner.bubble_fill.search import FACTORS, fill
from megatron_pulse.planner.bubble_fill.simulate import FilledSimulation
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.placement import Partition, fold
from megatron_pulse.planner.partition.find import Goal, find_partition
from megatron_pulse.planner.schedule.check.simulate import simulate
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem, boundary_s, stage_problem
from megatron_pulse.planner.schedule.solve import solve
from tests.benchmarks import fill_encoders as encoders
from tests.benchmarks.report import Flags, Report, table
from tests.benchmarks.setups import A100, analytic
from tests.planner.bubble_fill.cases import draw_case
from tests.planner.bubble_fill.reference import shortest

LINK = Link(20e-6, 10e9)
FREE_BYTES = 24e9
"""Of each device's 80 GB beside the step."""
REFERENCE_S = 10.0
"""Of CP-SAT on a small case."""
CAPS = (2.0, 1.5)


@dataclass(frozen=True)
class Model:
    """A backbone with its encoders; ``pixels`` of a picture's side."""

    name: str
    options: dict[str, int]
    pixels: int
    text: Callable[[Sequence[int]], tuple[Component, ...]]
    channels: int = 4
    micro_batch_size: int = 4
    devices: int = 4
    microbatches: int = 8

    def components(self) -> tuple[Component, ...]:
        """Latents are read where a fold begins and ends, text on every device."""
        every = range(self.devices)
        return (encoders.autoencoder(self.pixels, self.channels, (0,)), *self.text(every))


def _text(*names: str, **sizes: int) -> Callable[[Sequence[int]], tuple[Component, ...]]:
    """Text encoders by name, on the devices that read them."""
    return lambda devices: tuple(encoders.text_encoder(n, devices, sizes.get(n)) for n in names)


MODELS = (
    Model("sd-v2.1", {"sample_size": 64}, 512, _text("open_clip_h")),
    Model("sdxl", {"sample_size": 128}, 1024, _text("clip_l", "open_clip_big_g")),
    Model(
        "sd3-medium", {"sample_size": 128, "context_length": 333}, 1024,
        _text("clip_l", "open_clip_big_g", "t5_xxl", t5_xxl=256), 16,
    ),
    Model("pixart-sigma", {"sample_size": 128}, 1024, _text("t5_xxl", t5_xxl=300)),
    Model("hunyuan-dit-v1.2", {"sample_size": 128}, 1024, _text("bert", "mt5_xl")),
    Model(
        "flux-dev", {"sample_size": 64}, 512, _text("clip_l", "t5_xxl", clip_l=768, t5_xxl=512), 16,
        devices=8, microbatches=16,
    ),
)  # fmt: skip


@dataclass
class Row:
    """One model, one memory, one kind of backwards; seconds of a step."""

    model: str
    cap: float
    backwards: str
    share: float
    idle: float
    without: float
    front: float
    stored: float
    stored_spill: float
    filled: float
    spill: float
    over_bound: float
    slower: float
    faster: float
    greedy: float
    faults: int
    hosts: dict[str, int]
    seconds: float


@cache
def costs_of(name: str) -> ChainCosts:
    """Costs of a model's layers for its microbatch."""
    model = next(model for model in MODELS if model.name == name)
    size = model.micro_batch_size
    return analytic(name, model.options, [size], A100).at(size)


def step_of(
    model: Model, cap: float, is_split: bool, seconds: float
) -> tuple[ScheduleProblem, Schedule, Link]:
    """The problem, the synthesized schedule, and what it leaves of a device's link."""
    costs, placement = costs_of(model.name), fold(model.devices)
    partition = cut(costs, model)
    problem = stage_problem(
        costs,
        partition,
        model.microbatches,
        boundary_s(costs, partition, LINK),
        split=is_split,
        cap=(cap * model.devices,) * model.devices,
    )
    schedule = solve(problem, seconds, "none").schedule
    crossing = [
        costs.boundary_bytes[c]
        for s, c in enumerate(partition.cuts[1:-1])
        if placement.device_of_stage[s] != placement.device_of_stage[s + 1]
    ]
    # A device in the middle sends over two boundaries forward and back.
    sent = 2 * model.microbatches * max(crossing) * 2
    makespan = simulate(problem, schedule).makespan
    left = LINK.bytes_per_s - sent / makespan
    return problem, schedule, Link(LINK.latency_s, max(left, 0.05 * LINK.bytes_per_s))


def cut(costs: ChainCosts, model: Model) -> Partition:
    """Stages of a fold; skips stay at home."""
    goal = Goal(collocate=bool(costs.skips), link=LINK)
    return find_partition(costs, fold(model.devices), goal, explain=False)


def before_step(problem: FillProblem) -> float:
    """Seconds of a step with all encoders before it, samples divided over all devices."""
    share = -(-problem.num_samples // problem.num_devices)
    return problem.timeline.makespan + sum(c.least_s(share) for c in problem.components)


def scaled(problem: FillProblem, factor: float) -> FillProblem:
    """The problem where components take ``factor`` times as long."""

    def slower(layer: FrozenLayer) -> FrozenLayer:
        return replace(layer, seconds={n: factor * s for n, s in layer.seconds.items()})

    return replace(
        problem,
        components=tuple(
            replace(c, layers=tuple(map(slower, c.layers))) for c in problem.components
        ),
    )


def measure(model: Model, cap: float, is_split: bool, seconds: float) -> Row:
    """All policies on one schedule."""
    step, schedule, link = step_of(model, cap, is_split, seconds)
    components = model.components()
    samples = model.micro_batch_size * model.microbatches
    free = (FREE_BYTES,) * model.devices
    problem = FillProblem(step, schedule, components, samples, free, link)
    text = replace(problem, components=components[1:])
    ours, stored = fill(problem, seconds), fill(text, seconds)
    step_of_ours = FilledSimulation(problem, ours.filled)
    costs = {
        factor: step_of_ours.run(factor).makespan
        / fill(scaled(problem, factor), seconds, factors=()).certificate.makespan
        for factor in FACTORS
    }
    faults = [*faults_of(problem, ours.filled), *faults_of(text, stored.filled)]
    for fault in faults:
        print(f"{model.name}: {fault}", file=sys.stderr)
    ideal = replace(problem, link=Link(), free_bytes=None)
    theirs = FilledSimulation(ideal, greedy(ideal)).run().makespan
    made = ours.certificate
    timeline = problem.timeline
    work = sum(c.least_s(samples) for c in components)
    return Row(
        model.name,
        cap,
        "split" if is_split else "whole",
        work / sum(timeline.busy),
        timeline.idle_share,
        timeline.makespan,
        before_step(problem),
        stored.certificate.makespan,
        stored.certificate.spill_share,
        made.makespan,
        made.spill_share,
        made.gap,
        costs[1.15] - 1,
        costs[0.85] - 1,
        theirs,
        len(faults),
        {components[c].name: len(home) for c, home in ours.filled.homes.items()},
        made.seconds,
    )


def cells_of(r: Row) -> dict[str, Any]:
    """Cells of a row."""
    ms = {"without ms": r.without, "front": r.front, "stored, text filled": r.stored}
    ms |= {"filled": r.filled, "greedy": r.greedy}
    shares = {"encoders": r.share, "idle": r.idle, "stored spill": r.stored_spill, "spill": r.spill}
    shares |= {"over bound": r.over_bound, "15 % slower": r.slower, "faster": r.faster}
    return {
        "model": r.model, "cap, P": r.cap, "backwards": r.backwards,
        **{name: f"{1e3 * seconds:.0f}" for name, seconds in ms.items()},
        **{name: f"{share:.1%}" for name, share in shares.items()}, "hosts": r.hosts,
    }  # fmt: skip


def summary(rows: Sequence[Row]) -> str:
    """Best over best, and what the search leaves."""
    best = []
    for model, cap in dict.fromkeys((r.model, r.cap) for r in rows):
        same = [r for r in rows if (r.model, r.cap) == (model, cap)]
        front = min(r.front for r in same)
        gains = {"filled": front / min(r.filled for r in same)}
        gains["greedy"] = front / min(r.greedy for r in same)
        best.append({"model": model, "cap, P": cap, **gains})
    over, robust = [r.over_bound for r in rows], [max(r.slower, r.faster) for r in rows]
    return "\n".join(table(best)) + (
        f"\n\nover the bound: within 3 % in {sum(o <= 0.03 for o in over)} of {len(over)}, at most "
        f"{max(over):.1%}; at 15 % within 3 % in {sum(o <= 0.03 for o in robust)}, at most "
        f"{max(robust):.1%}; text alone spills in {sum(r.stored_spill > 1e-3 for r in rows)}; "
        f"faults: {sum(r.faults for r in rows)}"
    )


@dataclass
class Beside:
    """A random small case beside the exact model; seconds of a step."""

    number: int
    ours: float
    optimum: float
    proved: bool
    faults: int


def beside_reference(number: int, seconds: float, seed: int) -> Beside:
    """A random small case, ours and the exact model's."""
    problem = draw_case(random.Random(f"{seed}/{number}"))
    ours = fill(problem, seconds, factors=())
    made = ours.certificate
    optimum, proved = made.makespan, made.gap <= 1e-9
    if not proved:  # nothing is shorter than the bound
        optimum, proved = shortest(problem, REFERENCE_S)
    return Beside(number, made.makespan, optimum, proved, len(faults_of(problem, ours.filled)))


def main() -> int:
    """Run the command; returns its exit status."""
    flags, names = Flags(__doc__), [model.name for model in MODELS]
    flags.add("--models", names, nargs="+", choices=names)
    flags.add("--caps", CAPS, nargs="+", type=float, choices=CAPS)
    flags.add("--seconds", 8.0, "of each search")
    flags.add("--random", type=int, metavar="N", help="N small cases beside CP-SAT")
    flags.add("--first", 0, "of them, to run parts", type=int, metavar="K")
    flags.add("--seed", 0, type=int)
    args = flags.parse_args()
    search.LATE = math.inf  # figures are of the work that was done, on a busy machine too
    report = Report(args.json)
    for number in range(args.first, args.first + (args.random or 0)):
        report.add(beside_reference(number, min(args.seconds, 4.0), args.seed))
    if args.random:
        overs = [row.ours / row.optimum - 1 for row in report.rows]
        print(
            f"\n{len(overs)} cases, {sum(row.proved for row in report.rows)} proved: over the "
            f"optimum {statistics.mean(overs):.2%} in the mean, at most {max(overs):.2%}, above "
            f"2 % in {sum(o > 0.02 for o in overs)}"
        )
    else:
        models = [model for model in MODELS if model.name in args.models]
        for model, cap, is_split in product(models, args.caps, (False, True)):
            report.add(row := measure(model, cap, is_split, args.seconds), cells_of(row))
        print(f"\n{summary(report.rows)}")
    return int(any(row.faults for row in report.rows))


if __name__ == "__main__":
    sys.exit(main())
