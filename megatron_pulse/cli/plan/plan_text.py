"""Text output of plan files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_pulse.backbone.activations import ActivationPolicy
from megatron_pulse.backbone.layer_selection import tell_layers
from megatron_pulse.cli.output import first_and_last_layer, name_value_lines, table
from megatron_pulse.cli.plan.plan_facts import (
    bubble_task_lines,
    encoder_schedule_table,
    number_ranges,
    offload_lines,
    predicted,
    provenance,
)
from megatron_pulse.format import in_ms
from megatron_pulse.planner.plan_file.equivalent_flags import equivalent_flags, run_command
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.planner.program.simulate import SimulatedStep
from megatron_pulse.planner.schedule.check.simulate import Timeline, grid
from megatron_pulse.planner.schedule.check.validate import peak_memory
from megatron_pulse.planner.tune.context_rank import of_context_rank
from megatron_pulse.planner.tune.plans.verify_figures import fullest_stepping, layer_costs
from megatron_pulse.profile.channels_last import format_of

GRID_WIDTH = 180
"""Widest grid, in characters, that is printed unasked."""


def batch(plan: PlanFile) -> str:
    """Line on the batch, the dtype and the activation policy."""
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
    parts += ["optimizer offload"] * plan.optimizer_cpu_offload
    parts += ["weight offload"] * plan.profile.offloads_weights
    for policy, layers in plan.activations.sets():
        if layers:
            parts.append(f"activations: {policy} {tell_layers(layers, len(plan.profile.layers))}")
    return ", ".join(parts)


LAYER_COLUMNS = (
    *("layer", "", "device", "stage", "forward ms", "backward ms"),
    *("saves MB", "keeps MB", "to W MB", "activations"),
)


def layers(plan: PlanFile) -> list[tuple[str, ...]]:
    """Rows of ``LAYER_COLUMNS`` for each layer, and for each stage with its sums.

    Columns give the bytes that a layer would save of a microbatch for its backward. Further columns
    give the part kept until the backward, and the part kept until a deferred weight gradient. The
    last column names the treatment of the rest.
    """
    profile = of_context_rank(plan.profile, plan.cluster, plan.context)
    profiled, costs = profile.times[plan.micro_batch_size], layer_costs(plan)
    home, partition = plan.placement.device_of_stage, plan.partition
    split = plan.problem.weight_grad is not None
    waits = costs.wgrad_bytes if split else (0,) * len(profiled)
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


DONE = {
    ActivationPolicy.KEEP: "kept",
    ActivationPolicy.RECOMPUTE: "recomputed",
    ActivationPolicy.OFFLOAD: "offloaded as needed",
    ActivationPolicy.SELECTIVE: "selectively recomputed",
}


def _becomes(plan: PlanFile, layer: int, is_less: bool) -> str:
    """Treatment of the activations that a layer saves; ``is_less`` if not all are kept."""
    policy = plan.activations.of(layer)
    if policy is ActivationPolicy.SELECTIVE and not is_less:
        return "kept: nothing cheap to recompute"
    return DONE[policy]


BUCKET_COLUMNS = (
    *("bucket", "share", "microbatches", "step", "samples/s", "bubble", "memory"),
    *("makespan", "lower bound", "gap"),
)


def buckets(plan: PlanFile) -> list[tuple[str, ...]]:
    """Rows of ``BUCKET_COLUMNS`` for each bucket. Makespan and bound are without contention."""
    rows: list[tuple[str, ...]] = []
    for shape in plan.shapes:
        p, made = shape.plan.predicted, shape.plan.provenance["schedule"]
        rows.append(
            (
                shape.name,
                f"{shape.share:.1%}",
                f"{shape.plan.num_microbatches} x {shape.plan.micro_batch_size}",
                in_ms(p["step_s"]),
                f"{p['samples_per_s']:.4g}",
                f"{p['bubble']:.1%}",
                f"{max(p['memory_bytes']) / 1e9:.3g} GB",
                in_ms(made["makespan"]),
                in_ms(made["lower_bound"]),
                "optimal" if made["proved"] else f"{made['gap']:.2%}",
            )
        )
    return rows


DEVICE_COLUMNS = (
    *("device", "ranks", "busy", "idle", "sends", "activations", "memory", "peak in"),
    "stages",
)


def devices(plan: PlanFile, replayed: SimulatedStep) -> list[tuple[str, ...]]:
    """Rows of ``DEVICE_COLUMNS`` for each device, with its stages and their layers."""
    line, partition = replayed.timeline, plan.partition
    names = [name for stage in plan.stages for name in stage]
    peaks, stepping = peak_memory(plan.problem, plan.schedule), fullest_stepping(plan)
    rows: list[tuple[str, ...]] = []
    places = plan.places
    for device in range(plan.pipeline):
        held = []
        for stage in partition.placement.stages_of_device(device):
            held.append(f"{stage}: {first_and_last_layer(partition.layers_of_stage(stage), names)}")
        rows.append(
            (
                f"{device} {places[device].name}".rstrip(),
                number_ranges(sorted(plan.ranks.of_place(device))),
                in_ms(line.busy[device]),
                f"{100 * line.bubble[device] / line.makespan:.1f} %",
                in_ms(replayed.sending_s[device], 3),
                f"{peaks[device] / 1e9:.3g} GB",
                f"{plan.predicted['memory_bytes'][device] / 1e9:.3g} GB",
                "optimizer" if device in stepping else "compute",
                "; ".join(held),
            )
        )
    return rows


def describe(
    plan: PlanFile, replayed: SimulatedStep, path: Path, wide: bool, by_layer: bool = False
) -> list[str]:
    """Text of the plan, with the grid if small or ``wide``, and with all layers on request."""
    lines = [plan.heading, batch(plan)]
    if plan.data > 1 and plan.pipeline > 1:
        beside = "devices of one stage" if plan.rank_order == "tp-dp-pp" else "neighbouring stages"
        lines.append(f"rank order {plan.rank_order}: neighbouring ranks are {beside}")
    if plan.device_order is not None:
        lines.append(f"device order {' '.join(map(str, plan.device_order))}: of the cluster's file")
    lines += ["", "predicted"]
    lines += name_value_lines(predicted(plan))
    if plan.shapes:
        lines += [
            "",
            "steps of one bucket each; the prediction is their mean, and all below is of "
            "microbatches of any bucket, as in evaluations (--bucket shows one)",
            *table([BUCKET_COLUMNS, *buckets(plan)], left=(0,)),
        ]
    lines += ["", *table([DEVICE_COLUMNS, *devices(plan, replayed)], left=(-1,))]
    if by_layer:
        lines += ["", *table([LAYER_COLUMNS, *layers(plan)], left=(1, -1))]
    if plan.policies is not None:
        lines += ["", "encoders", *encoder_schedule_table(plan)]
    if plan.schedule.bubble_tasks:
        lines += [
            "",
            "in bubbles, for the next step",
            *name_value_lines(bubble_task_lines(plan.schedule)),
        ]
    if away := offload_lines(plan):
        lines += ["", "activation offload, from O to L", *name_value_lines(away)]
    if picture := small_grid(replayed.timeline, None if wide else GRID_WIDTH):
        lines += ["", *picture]
    lines += ["", "origin"]
    lines += name_value_lines(provenance(plan))
    return [
        *lines,
        "",
        "run it:",
        f"  {run_command(plan, path)}",
        f"equivalent flags: {equivalent_flags(plan)}",
    ]


def small_grid(timeline: Timeline, width: int | None) -> list[str]:
    """Timeline as a grid with columns of the shortest operation, else of the order only.

    Empty if both are wider than ``width``.
    """
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
