"""A plan in words, for people."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron_pulse.backbone.named import name_of, tell_layers
from megatron_pulse.cli.output import columns, ends, table
from megatron_pulse.encoders.recipe import VAE
from megatron_pulse.planner.fill.fillers import FilledSchedule
from megatron_pulse.planner.partition.memory import host_bytes_per_parameter
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.planner.schedule.check.simulate import Timeline, grid
from megatron_pulse.planner.schedule.check.validate import held_most
from megatron_pulse.planner.schedule.operations import BACKWARDS, Kind, Schedule
from megatron_pulse.planner.step.replay import Replay
from megatron_pulse.profile.memory_format import format_of

GRID_WIDTH = 180
"""Characters that a grid may take where nobody asked for it."""


def batch(plan: PlanFile) -> str:
    """The batch and how a step is run, in a line."""
    parts = [
        f"batch {plan.global_batch_size} = {plan.data} replica(s) x {plan.num_microbatches} "
        f"microbatch(es) of {plan.micro_batch_size}",
        plan.dtype,
        "split backwards" if plan.problem.weight_grad is not None else "whole backwards",
    ]
    if laid := format_of(plan.backbone):
        parts.append(f"convolutions {laid}")
    for name in ("sequence_parallel", "distributed_optimizer"):
        parts += [name.replace("_", " ")] * getattr(plan, name)
    parts += ["optimizer on the host"] * plan.host_optimizer
    if plan.recompute:
        told = tell_layers(plan.recomputed, len(plan.profile.layers))
        parts.append(f"activations computed again of layers {told}")
    if plan.selective:
        told = tell_layers(plan.selected, len(plan.profile.layers))
        parts.append(f"what is cheap computed again of layers {told}")
    if plan.offload:
        told = tell_layers(plan.offloaded, len(plan.profile.layers))
        parts.append(f"on the host, where there is no room, of layers {told}")
    return ", ".join(parts)


def predicted(plan: PlanFile) -> list[tuple[str, str]]:
    """Names and values of what the tuner expects."""
    p = plan.predicted
    own: list[tuple[str, str]] = []
    if plan.self_conditioning:
        own = [
            (
                "before",
                f"all forwards in {100 * plan.self_conditioning:g} % of the steps, for "
                f"self-conditioning: {1e3 * p['self_conditioning_s']:.4g} ms in the mean",
            )
        ]
    return [
        ("step", f"{1e3 * p['step_s']:.4g} ms, {p['samples_per_s']:.4g} samples/s"),
        (
            "of that",
            f"pipeline {1e3 * p['pipeline_s']:.4g} ms, gradients' reduction that nothing hides "
            f"{1e3 * p['exposed_reduction_s']:.3g} ms, optimizer {1e3 * p['optimizer_s']:.3g} ms",
        ),
        *own,
        ("bubble", f"{100 * p['bubble']:.1f} % of the devices' time in the pipeline"),
        ("memory", f"at most {max(p['memory_bytes']) / 1e9:.3g} GB on a device"),
        *_for_optimizer(plan),
        (
            "sent",
            f"{p['pipeline_bytes_per_sample'] / 1e6:.3g} MB a sample in the pipeline, "
            f"{p['data_bytes_per_sample'] / 1e6:.3g} MB for the gradients' reduction",
        ),
    ]


def _for_optimizer(plan: PlanFile) -> list[tuple[str, str]]:
    """The most of a node's memory that the optimizer of one of its devices has there."""
    if not plan.host_optimizer:
        return []
    stages, layers = plan.partition, plan.profile.layers
    most = max(
        sum(layers[i].trained_parameters for s in held for i in stages.layers_of_stage(s))
        for held in map(stages.placement.stages_of_device, range(plan.pipeline))
    )
    num_bytes = most * host_bytes_per_parameter(plan.data, plan.state)
    return [
        ("optimizer", f"at most {num_bytes / 1e9:.3g} GB of its node's memory for a device's share")
    ]


def filling_facts(found: FilledSchedule) -> list[tuple[str, str]]:
    """What filling gives over encoding in front, and what other times cost."""
    made, front = found.certificate, found.front_s
    spread = (
        f"{over - 1:.1%} above the bound at {factor:g} of their times"
        for factor, over in made.spread.items()
    )
    return [
        ("filled", str(made)),
        ("in front", f"{front:.4g} s: filling is {front / made.makespan:.3f} times as fast"),
        ("spread", ", ".join(spread)),
    ]


def policies(plan: PlanFile) -> list[str]:
    """A table of when encoders run, with the step of each way; stored is said, not chosen."""
    if plan.policies is None:
        return []

    def shown(seconds: float | None) -> str:
        return "-" if seconds is None else f"{1e3 * seconds:.4g}"

    rows = [("", "encoder", "runs", "ms filled", "ms in front", "ms stored", "MB a sample stored")]
    for one in plan.policies:
        when = "in idle time" if one["policy"] == "fill" else "in front"
        steps = (shown(one[name]) for name in ("fill_s", "front_s", "stored_s"))
        rows.append(("", one["name"], when, *steps, f"{one['stored_bytes'] / 1e6:.4g}"))
    return [*table(rows, left=(1, 2)), "  (a pipeline's step, the other encoders as is soonest)"]


def homes(schedule: Schedule) -> list[tuple[str, str]]:
    """Names of the fillers, and where and in how many pieces their components run."""
    rows = []
    for number, filler in enumerate(schedule.fillers):
        every = range(schedule.placement.num_devices)
        devices = every if filler.devices is None else filler.devices
        rows.append(
            (
                f"X{number}",
                f"{filler.name}: {len(filler.slice_seconds)} pieces on device "
                f"{shown(list(devices))}, {1e3 * sum(filler.slice_seconds):.4g} ms",
            )
        )
    return rows


def on_host(plan: PlanFile) -> list[tuple[str, str]]:
    """Names of the devices whose activations wait on the host, how many, and the most at once:
    from the forward's end, when the copy begins, to the backward."""
    problem, rows = plan.problem, []
    for device, order in enumerate(plan.schedule.order):
        left = [op for op in order if op.kind is Kind.OFFLOAD]
        if not left or problem.offloaded is None:
            continue
        stages = problem.placement.stages_of_device(device)
        may = sum(problem.offloaded[s] > 0 for s in stages) * plan.num_microbatches
        num_bytes = sum(problem.offloaded[op.stage] for op in left)
        seconds = sum(problem.copying_of(op.stage) for op in left)
        leaving, held, most = {(op.stage, op.microbatch) for op in left}, 0.0, 0.0
        for op in order:
            if (op.stage, op.microbatch) in leaving:
                sign = (op.kind is Kind.FORWARD) - (op.kind in BACKWARDS)
                most = max(most, held := held + sign * problem.offloaded[op.stage])
        rows.append(
            (
                f"device {device}",
                f"those of {len(left)} of {may} forwards that may leave: {num_bytes / 1e9:.3g} GB "
                f"in a step, {most / 1e9:.3g} GB of pinned memory at most, {1e3 * seconds:.3g} ms "
                "each way, beside computing",
            )
        )
    return rows


def provenance(plan: PlanFile) -> list[tuple[str, str]]:
    """Names and values of where the plan is from."""
    p = plan.provenance
    made, cluster = p["schedule"], p["cluster"]
    known = "proved: none is shorter" if made["proved"] else f"gap {100 * made['gap']:.2f} %"
    size = [str(cluster[key]) for key in ("nodes", "devices_per_node") if key in cluster]
    return [
        ("profile", f"{p['profile']} (sha256 {p['profile_sha256'][:12]})"),
        ("cluster", f"{cluster.get('name', 'unknown')} ({' x '.join(size)} devices)"),
        (
            "schedule",
            f"{made['solver']}: {1e3 * made['makespan']:.4g} ms without waiting for shared links, "
            f"lower bound {1e3 * made['lower_bound']:.4g} ms ({known})",
        ),
        ("versions", ", ".join(f"{name} {value}" for name, value in p["versions"].items())),
    ]


def command(plan: PlanFile, path: Path) -> str:
    """How the plan is run; a table's is not."""
    if "table" in plan.backbone:
        return f"not run: {name_of(plan.backbone)} is a table of layers"
    cluster = plan.provenance["cluster"]
    per_node = min(plan.world_size, int(cluster.get("devices_per_node", plan.world_size)))
    nodes = -(-plan.world_size // per_node)
    several = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:PORT " * (nodes > 1)
    return (
        f"pulse run {several}--nproc-per-node {per_node} launch/pretrain_diffusion.py --pulse-plan "
        f"{shlex.quote(str(path))} {_data(plan)} --train-iters 1000 --lr 1e-4 "
        + f"{NO_AVERAGES} " * (not plan.averages)
        + f"--save runs/{name_of(plan.backbone)}"
    )


def _data(plan: PlanFile) -> str:
    """What a plan's run reads: images, where it encodes them itself."""
    encoders = [*(plan.encoders or ()), *(plan.in_front or ())]
    if not encoders:
        return "--pulse-data latents:PATH"
    images = any(one["name"] == VAE for one in encoders)
    return f"--pulse-data {'folder' if images else 'latents'}:PATH --pulse-encoders DIR"


def flags(plan: PlanFile) -> str:
    """The flags that the plan stands for, but for its cuts and schedule."""
    again, part, count = len(plan.recompute), len(plan.selective), len(plan.profile.layers)
    given = [
        f"--pipeline-model-parallel-size {plan.pipeline}",
        f"--tensor-model-parallel-size {plan.tensor}",
        f"--global-batch-size {plan.global_batch_size}",
        f"--micro-batch-size {plan.micro_batch_size}",
    ]
    for flag, wanted in (
        ("--bf16", plan.dtype == "bfloat16"),
        ("--fp16", plan.dtype == "float16"),
        ("--sequence-parallel", plan.sequence_parallel),
        ("--recompute-granularity full", again == count),
        *((f"--pulse-recompute {shlex.quote(name)}", again < count) for name in plan.recompute),
        *((f"--pulse-offload {shlex.quote(name)}", True) for name in plan.offload),
        ("--recompute-granularity selective", part == count),
        *(
            (f"--pulse-recompute-selective {shlex.quote(name)}", part < count)
            for name in plan.selective
        ),
        (NO_AVERAGES, not plan.averages),
        ("--use-distributed-optimizer", plan.distributed_optimizer),
        ("--optimizer-cpu-offload", plan.host_optimizer),
        ("--grad-reduce-in-bf16", plan.half_gradients),
        ("--overlap-grad-reduce", plan.overlap_grad_reduce),
        ("--use-tp-pp-dp-mapping", plan.rank_order == "tp-pp-dp"),
    ):
        given += [flag] * wanted
    return " ".join(given)


def ranks_of(plan: PlanFile, device: int) -> list[int]:
    """The ranks that are this device of a pipeline, in all replicas."""
    wide, inside = plan.tensor, plan.rank_order == "tp-pp-dp"
    firsts = [
        wide * (device + plan.pipeline * r if inside else r + plan.data * device)
        for r in range(plan.data)
    ]
    return [first + t for first in firsts for t in range(wide)]


def shown(numbers: Sequence[int]) -> str:
    """Ascending numbers with runs joined: 0-3, 8-11."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    if len(runs) > 4:
        return ", ".join(map(str, numbers[:4])) + f", ... {numbers[-1]}"
    return ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs)


NO_AVERAGES = "--pulse-ema-decay 0"
"""What a run is given whose plan has no memory for averages of the weights."""

DEVICE_COLUMNS = ("device", "ranks", "busy", "idle", "sends", "activations", "memory", "stages")


def devices(plan: PlanFile, replayed: Replay) -> list[tuple[str, ...]]:
    """A row of ``DEVICE_COLUMNS`` for each device; stages with the layers that they hold."""
    line, partition = replayed.timeline, plan.partition
    names = [name for stage in plan.stages for name in stage]
    peaks = held_most(plan.problem, plan.schedule)
    rows: list[tuple[str, ...]] = []
    for device in range(plan.pipeline):
        held = []
        for stage in partition.placement.stages_of_device(device):
            held.append(f"{stage}: {ends(partition.layers_of_stage(stage), names)}")
        rows.append(
            (
                str(device),
                shown(ranks_of(plan, device)),
                f"{1e3 * line.busy[device]:.4g} ms",
                f"{100 * line.bubble[device] / line.makespan:.1f} %",
                f"{1e3 * replayed.sending_s[device]:.3g} ms",
                f"{peaks[device] / 1e9:.3g} GB",
                f"{plan.predicted['memory_bytes'][device] / 1e9:.3g} GB",
                "; ".join(held),
            )
        )
    return rows


def describe(plan: PlanFile, replayed: Replay, path: Path, wide: bool) -> list[str]:
    """The plan for people; the grid where it is small, or ``wide``."""
    lines = [plan.heading, batch(plan)]
    if plan.data > 1 and plan.pipeline > 1:
        beside = "devices of one stage" if plan.rank_order == "tp-dp-pp" else "neighbouring stages"
        lines.append(f"rank order {plan.rank_order}: neighbouring ranks are {beside}")
    lines += ["", "predicted"]
    lines += columns(predicted(plan))
    lines += ["", *table([DEVICE_COLUMNS, *devices(plan, replayed)], left=(-1,))]
    if plan.policies is not None:
        lines += ["", "encoders", *policies(plan)]
    if plan.schedule.fillers:
        lines += ["", "in idle time, for the next step", *columns(homes(plan.schedule))]
    if away := on_host(plan):
        lines += ["", "activations on the host, from O to L", *columns(away)]
    if picture := small_grid(replayed.timeline, None if wide else GRID_WIDTH):
        lines += ["", *picture]
    lines += ["", "made from"]
    lines += columns(provenance(plan))
    return [*lines, "", "run it:", f"  {command(plan, path)}", f"which is {flags(plan)}"]


def small_grid(timeline: Timeline, width: int | None) -> list[str]:
    """The timeline in columns of its shortest operation, or only orders; nothing if wider."""
    computing = (op for op in timeline.end if not op.kind.copies)
    shortest = min(timeline.end[op] - timeline.start[op] for op in computing)
    column = 0.999 * shortest  # so that no operation rounds to nothing
    scaled = Timeline(
        timeline.schedule,
        {op: time / column for op, time in timeline.start.items()},
        {op: time / column for op, time in timeline.end.items()},
        timeline.makespan / column,
        timeline.busy,
        timeline.bubble,
    )
    if scaled.makespan <= (width or 2000):
        lines = grid(scaled).splitlines()
        if width is None or max(map(len, lines)) <= width:
            return lines
    lines = grid(timeline.schedule).splitlines()
    return lines if width is None or max(map(len, lines)) <= width else []
