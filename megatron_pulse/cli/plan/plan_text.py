"""A plan in words, for people."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron_pulse.backbone.named import name_of, tell_layers
from megatron_pulse.cli.output import columns, ends, table
from megatron_pulse.cli.plan.plan_facts import (
    homes,
    on_host,
    policies,
    predicted,
    provenance,
    shown,
)
from megatron_pulse.encoders.recipe import VAE
from megatron_pulse.figures import in_ms
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.planner.schedule.check.simulate import Timeline, grid
from megatron_pulse.planner.schedule.check.validate import held_most
from megatron_pulse.planner.step.replay import Replay
from megatron_pulse.planner.tune.plans.recompute import fullest_stepping, layer_costs
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


LAYER_COLUMNS = (
    *("layer", "", "device", "stage", "forward ms", "backward ms"),
    *("saves MB", "keeps MB", "waits MB", "what is saved is"),
)


def layers(plan: PlanFile) -> list[tuple[str, ...]]:
    """A row of ``LAYER_COLUMNS`` for each layer, and one for each stage with the sums that its
    schedule takes: what a layer would save of a microbatch for its backward, what of it is kept
    until then, and until a weight gradient that waits, and what becomes of the rest."""
    profiled, costs = plan.profile.times[plan.micro_batch_size], layer_costs(plan)
    home, partition = plan.placement.device_of_stage, plan.partition
    split = plan.problem.weight_grad is not None
    waits = costs.waiting_bytes if split else (0,) * len(profiled)
    rows: list[tuple[str, ...]] = []

    def figures(own: Sequence[int]) -> list[str]:
        seconds = (sum(s[i] for i in own) for s in (costs.forward_s, costs.backward_s))
        saved = sum(profiled[i].saved_bytes for i in own)
        held = (sum(n[i] for i in own) for n in (costs.saved_bytes, waits))
        return [
            *(f"{1e3 * s:.4g}" for s in seconds),
            *(f"{n / 1e6:.4g}" for n in (saved, *held)),
        ]

    for stage, names in enumerate(plan.stages):
        own = partition.layers_of_stage(stage)
        for number, name in zip(own, names, strict=True):
            is_less = costs.saved_bytes[number] < profiled[number].saved_bytes
            place = str(number), name, str(home[stage]), str(stage)
            rows.append((*place, *figures([number]), _becomes(plan, number, is_less)))
        rows.append(("", "sum", str(home[stage]), str(stage), *figures(own), ""))
    return rows


def _becomes(plan: PlanFile, layer: int, is_less: bool) -> str:
    """What is done with what a layer saves, of which ``is_less`` is kept, or all."""
    if layer in plan.selected and not is_less:
        return "kept: nothing of it is cheap"
    ways = {
        "computed again": plan.recomputed,
        "on the host, where there is no room": plan.offloaded,
        "what is cheap computed again": plan.selected,
    }
    return ", ".join(way for way, chosen in ways.items() if layer in chosen) or "kept"


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


NO_AVERAGES = "--pulse-ema-decay 0"
"""What a run is given whose plan has no memory for averages of the weights."""

DEVICE_COLUMNS = (
    *("device", "ranks", "busy", "idle", "sends", "activations", "memory", "fullest while"),
    "stages",
)


def devices(plan: PlanFile, replayed: Replay) -> list[tuple[str, ...]]:
    """A row of ``DEVICE_COLUMNS`` for each device; stages with the layers that they hold."""
    line, partition = replayed.timeline, plan.partition
    names = [name for stage in plan.stages for name in stage]
    peaks, stepping = held_most(plan.problem, plan.schedule), fullest_stepping(plan)
    rows: list[tuple[str, ...]] = []
    for device in range(plan.pipeline):
        held = []
        for stage in partition.placement.stages_of_device(device):
            held.append(f"{stage}: {ends(partition.layers_of_stage(stage), names)}")
        rows.append(
            (
                str(device),
                shown(ranks_of(plan, device)),
                in_ms(line.busy[device]),
                f"{100 * line.bubble[device] / line.makespan:.1f} %",
                in_ms(replayed.sending_s[device], 3),
                f"{peaks[device] / 1e9:.3g} GB",
                f"{plan.predicted['memory_bytes'][device] / 1e9:.3g} GB",
                "the optimizer works" if device in stepping else "it computes",
                "; ".join(held),
            )
        )
    return rows


def describe(
    plan: PlanFile, replayed: Replay, path: Path, wide: bool, by_layer: bool = False
) -> list[str]:
    """The plan for people; the grid where it is small, or ``wide``; perhaps all layers."""
    lines = [plan.heading, batch(plan)]
    if plan.data > 1 and plan.pipeline > 1:
        beside = "devices of one stage" if plan.rank_order == "tp-dp-pp" else "neighbouring stages"
        lines.append(f"rank order {plan.rank_order}: neighbouring ranks are {beside}")
    lines += ["", "predicted"]
    lines += columns(predicted(plan))
    lines += ["", *table([DEVICE_COLUMNS, *devices(plan, replayed)], left=(-1,))]
    if by_layer:
        lines += ["", *table([LAYER_COLUMNS, *layers(plan)], left=(1, -1))]
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
