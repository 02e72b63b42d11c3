"""What messages of compiled steps wait for each other: channels beside ideal transfers.

    .venv/bin/python -m tests.benchmarks.waiting --json FILE        # some minutes on a core
    .venv/bin/python -m tests.benchmarks.waiting --models sdxl --seconds 1

Steps of backbones on H200s (analytic times, bfloat16), cut and scheduled for their links, are
played by four rules (``tests/planner/channel_times.py``).

================  =================================================================================
step_ms           ideal transfers: a link from one device to another carries one message after the
                  other, each as soon as it is made and the link is free
penalty_percent   what the compiled step adds: a message also waits until its receive is posted
shared_percent    what the ideal step is above one whose links carry any number at full speed
one_percent       the penalty if each device moved one message at a time, whichever its channel
held_percent      what buffers of messages take at most on a device, of the most activations
held_of_counted   for each device, over what the tuner counts (``in_transit_bytes``)
================  =================================================================================
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.crossing import crossings
from megatron_pulse.planner.layout.embedder_choice import choose_embedders, provided
from megatron_pulse.planner.layout.placement import Partition, fold, sequential
from megatron_pulse.planner.layout.routes import trace_routes
from megatron_pulse.planner.partition.find import Goal, PartitionError, find_partition
from megatron_pulse.planner.partition.memory import in_transit_bytes
from megatron_pulse.planner.program.communication import (
    CommunicationPlan,
    compile_communication,
    message_spec,
)
from megatron_pulse.planner.program.device_program import compile_program
from megatron_pulse.planner.schedule.check.validate import peak_activations
from megatron_pulse.planner.schedule.message import Message
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem, boundary_s, stage_problem
from megatron_pulse.planner.schedule.solve import solve
from megatron_pulse.profile.roofline import ELEMENT_BYTES
from model_specs import load_backbone
from tests.benchmarks.report import Flags, Report, record
from tests.benchmarks.setups import H200, analytic
from tests.planner.channel_times import Rule, held_bytes, play, without_releases

MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "uvit-h": (8, {}),
    "sd-v2.1": (8, {"sample_size": 64}),
    "sdxl": (2, {}),
    "hunyuan-dit-v1.2": (2, {}),
    "sd3-medium": (2, {}),
}
"""Samples of a microbatch, and options."""
GB_PER_S = (20, 40, 100, 300)
DEVICES = (4, 8)
LAYOUTS = ("fold", "soft fold", "sequential")
LATENCY_S = 10e-6


@dataclass(frozen=True)
class Row:
    """One step (see above)."""

    model: str
    devices: int
    gb_per_s: int
    layout: str
    backwards: str
    step_ms: float
    penalty_percent: float
    shared_percent: float
    one_percent: float
    messages: int
    held_percent: float
    held_of_counted: list[float]


@cache
def chain(name: str) -> tuple[Backbone, ChainCosts, int]:
    """The backbone, what its layers cost for a microbatch, and the samples of that."""
    size, options = MODELS[name]
    return load_backbone(name, options), analytic(name, options, [size], H200).at(size), size


def step_of(
    name: str, devices: int, link: Link, layout: str, is_split: bool, seconds: float
) -> tuple[Partition, ScheduleProblem, Schedule]:
    """The cuts, and the schedule of 2P microbatches that is found in ``seconds``."""
    costs = chain(name)[1]
    placement = sequential(devices) if layout == "sequential" else fold(devices)
    partition = find_partition(
        costs, placement, Goal(collocate=layout == "fold", link=link), explain=False
    )
    problem = stage_problem(
        costs,
        partition,
        2 * devices,
        boundary_s(costs, partition, link),
        split=is_split,
        cap=(2.0 * devices,) * devices,
    )
    return partition, problem, solve(problem, seconds, "none").schedule


def compiled(
    name: str, partition: Partition, problem: ScheduleProblem, schedule: Schedule, link: Link
) -> tuple[CommunicationPlan, dict[Message, float]]:
    """All messages of the step, and the seconds of each."""
    backbone, costs, size = chain(name)
    num_bytes, samples = ELEMENT_BYTES[H200.dtype], size * schedule.num_microbatches
    choices = choose_embedders(
        provided(backbone, num_bytes), partition, costs.parameters, samples, num_bytes
    )
    replicated = frozenset(c.layer for c in choices.values() if c.replicated)
    routes = trace_routes(backbone, partition, replicated)
    plan = compile_communication(routes, schedule, problem)

    def seconds(message: Message) -> float:
        spec = message_spec(routes, message)
        return link.time_s(size * spec.bytes_per_sample(num_bytes))

    return plan, {message: seconds(message) for message in plan.messages}


def look_at(
    name: str, devices: int, rate: int, layout: str, is_split: bool, seconds: float = 2.0
) -> Row:
    """One row of the table."""
    link = Link(LATENCY_S, rate * 1e9)
    partition, problem, schedule = step_of(name, devices, link, layout, is_split, seconds)
    plan, transfer_s = compiled(name, partition, problem, schedule, link)
    programs = [compile_program(schedule, plan, device) for device in range(devices)]
    ideals = [without_releases(program) for program in programs]
    makespans = []
    for rule in (Rule.FREE, Rule.LINK, Rule.APART, Rule.ONE):
        makespan = play(
            ideals if rule in (Rule.FREE, Rule.LINK) else programs,
            lambda op: problem.duration(op.kind, op.stage),
            transfer_s.__getitem__,
            rule,
        ).makespan
        if makespan is None:
            raise RuntimeError(f"{name} on {devices} devices, {layout}: hangs where {rule.value}")
        makespans.append(makespan)
    free, ideal, apart, one = makespans
    costs, sizes = chain(name)[1], {m: (transfer_s[m] - LATENCY_S) * rate * 1e9 for m in transfer_s}
    held = [held_bytes(program, sizes.__getitem__) for program in programs]
    crossed, count = crossings(costs, partition), schedule.num_microbatches
    counted = in_transit_bytes(crossed, partition.placement, count)
    kept = max(peak_activations(schedule, partition.per_stage(costs.saved_bytes)))
    return Row(
        name,
        devices,
        rate,
        layout,
        "split" if is_split else "whole",
        1e3 * ideal,
        100 * (apart / ideal - 1),
        100 * (ideal / free - 1),
        100 * (one / ideal - 1),
        len(plan.messages),
        100 * max(held) / kept,
        [a / b for a, b in zip(held, counted, strict=True)],
    )


def rows(names: Sequence[str], seconds: float) -> Iterator[Row]:
    """The table; a layout that a backbone has not enough layers for is left out."""
    for name in names:
        skips = bool(chain(name)[0].skips)
        for devices in DEVICES:
            for rate in GB_PER_S:
                for layout in LAYOUTS if skips else LAYOUTS[2:]:
                    for is_split in (False, True):
                        try:
                            yield look_at(name, devices, rate, layout, is_split, seconds)
                        except PartitionError as error:
                            print(f"{name} on {devices} devices, {layout}: {error}")
                            break


def main() -> int:
    """The command; 1 if a penalty is above 3 %."""
    flags = Flags(__doc__)
    flags.add("--models", list(MODELS), nargs="+", choices=MODELS)
    flags.add("--seconds", 2.0, "of each schedule's search")
    args = flags.parse_args()
    report = Report(args.json)
    for row in rows(args.models, args.seconds):
        report.add(row, record(row) | {"held_of_counted": max(row.held_of_counted)})
    worst = max(report.rows, key=lambda row: row.penalty_percent)
    shares = sorted(share for row in report.rows for share in row.held_of_counted)
    print(
        f"of what the tuner counts buffers take {median(shares):.2f} in the median, "
        f"{shares[len(shares) * 9 // 10]:.2f} or less on nine devices of ten, "
        f"{shares[-1]:.2f} at most"
    )
    print(f"{len(report.rows)} steps; at most {worst.penalty_percent:.2f} %: {worst}")
    return int(worst.penalty_percent > 3)


if __name__ == "__main__":
    sys.exit(main())
