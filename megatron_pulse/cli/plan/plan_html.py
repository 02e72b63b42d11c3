"""Plan as an HTML page and as pictures."""

from __future__ import annotations

import html
from functools import partial
from pathlib import Path

from megatron_pulse.backbone.layer_selection import name_of
from megatron_pulse.cli import html_page
from megatron_pulse.cli.output import draw_timeline
from megatron_pulse.cli.plan import plan_facts, plan_text
from megatron_pulse.format import in_ms
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.cluster.places import Place
from megatron_pulse.planner.draw.lanes import sent
from megatron_pulse.planner.draw.partition import draw_partition
from megatron_pulse.planner.draw.schedule import Panel
from megatron_pulse.planner.partition.evaluate import evaluate
from megatron_pulse.planner.plan_file.equivalent_flags import equivalent_flags, run_command
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.planner.program.simulate import SimulatedStep
from megatron_pulse.planner.schedule.check.validate import peak_memory
from megatron_pulse.planner.tune.plans.verify_figures import fullest_stepping, layer_costs


def write_page(plan: PlanFile, replayed: SimulatedStep, path: Path, at: Path) -> str:
    """Write a picture, a page or a trace of the plan of file ``path``, by the suffix of ``at``."""
    return draw_timeline(
        at,
        plan.problem,
        [Panel("predicted", replayed.timeline, sent(replayed.transfers), _kinds(plan))],
        f"{plan.heading}, M = {plan.num_microbatches}",
        partial(_page, plan, replayed, path),
        lower_bound=plan.provenance["schedule"]["lower_bound"],
        in_bytes=True,
    )


def _kinds(plan: PlanFile) -> tuple[str, ...]:
    return tuple(place.name for place in plan.places)


def _page(plan: PlanFile, replayed: SimulatedStep, path: Path, timeline: str) -> str:
    parts = [
        html_page.lines([plan_text.batch(plan)]),
        "<h2>Predicted</h2>"
        + html_page.listed([*plan_facts.predicted(plan), *plan_facts.offload_lines(plan)]),
        *_buckets(plan),
        "<h2>Partition</h2>" + html_page.picture(_partition(plan)),
        "<h2>One step of a pipeline</h2>" + html_page.picture(timeline),
        "<h2>Devices</h2>"
        + html_page.table(
            plan_text.DEVICE_COLUMNS, plan_text.devices(plan, replayed), left=(1, 7, 8)
        ),
        "<h2>Memory</h2>" + _memory(plan),
        "<h2>Layers</h2>"
        + html_page.table(plan_text.LAYER_COLUMNS, plan_text.layers(plan), left=(1, 9)),
        "<h2>Messages of a step of one pipeline</h2>" + _messages(plan, replayed),
        "<h2>Origin</h2>" + html_page.listed(plan_facts.provenance(plan)),
        f"<h2>Run it</h2><pre>{html.escape(run_command(plan, path))}</pre>",
        html_page.lines([f"equivalent flags: {equivalent_flags(plan)}"]),
    ]
    return html_page.page(plan.heading, *parts)


def _buckets(plan: PlanFile) -> list[str]:
    """Table of the steps of each bucket, if they have schedules of their own."""
    if not plan.shapes:
        return []
    rows = html_page.table(plan_text.BUCKET_COLUMNS, plan_text.buckets(plan), left=(0,))
    note = "all below is of microbatches of any bucket; 'pulse show --bucket' draws one"
    return ["<h2>Steps of each bucket</h2>", rows, html_page.lines([note])]


def _partition(plan: PlanFile) -> str:
    costs = plan.profile.at(plan.micro_batch_size, plan.activations)
    if plan.profile.kinds or plan.context > 1:
        costs = layer_costs(plan)
    slowest = max((edge.seconds for edge in plan.edges), default=0.0)
    found = evaluate(costs, plan.partition, Link(slowest))
    what = f"microbatch of {plan.micro_batch_size}; loads with {in_ms(slowest, 3)} a message"
    title = f"{name_of(plan.backbone)}: {plan.placement.kind} on P = {plan.pipeline}"
    return draw_partition(costs, plan.partition, found, title, what)


def _memory(plan: PlanFile) -> str:
    """Bar for each device: activations, and other contents, as shares of the usable memory.

    If the optimizer's step takes more memory, the bar shows its contents instead.
    """
    held = plan.predicted["memory_bytes"]
    places = plan.places
    limit = max(place.usable_bytes for place in places)
    whole = max(limit, *held) if max(held) > limit / 5 else max(held)
    rows = []
    peaks, stepping = peak_memory(plan.problem, plan.schedule), fullest_stepping(plan)
    for device, (size, peak) in enumerate(zip(held, peaks, strict=True)):
        shown = 0.0 if device in stepping else peak
        rest = max(0.0, size - shown)
        bars = "".join(
            f'<span class="bar {look}" style="width: {100 * part / whole:.2f}%"></span>'
            for look, part in (("solid", rest), ("hatched", shown))
        )
        rows.append(
            f"<tr><td>device {device}{_of_kind(places[device])}</td>"
            f'<td><span class="track">{bars}</span></td>'
            f"<td>{size / 1e9:.3g} GB</td><td>{rest / 1e9:.3g} GB</td><td>{shown / 1e9:.3g} GB</td>"
            f"<td>{'the optimizer works' if device in stepping else 'it computes'}</td></tr>"
        )
    usable = ", ".join(
        f"{place.usable_bytes / 1e9:.4g} GB{' of ' * bool(place.kinds)}{html.escape(place.name)}"
        for place in dict.fromkeys(places)
    )
    note = f"a full bar is {whole / 1e9:.3g} GB; {usable} are usable"
    key = '<span class="bar {}" style="width: 24px"></span> {}'
    looks = "; ".join(
        key.format(look, text)
        for look, text in (
            ("solid", "weights, gradients, optimizer, workspace"),
            ("hatched", "activations"),
        )
    )
    names = ("", "", "in all", "held", "activations", "peak in")
    head = f"<tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>"
    return f'<div class="wide"><table>{head}{"".join(rows)}</table></div><p>{looks}; {note}</p>'


def _of_kind(place: Place) -> str:
    return f" {html.escape(place.name)}" if place.kinds else ""


def _messages(plan: PlanFile, replayed: SimulatedStep) -> str:
    """Table of messages by sender and receiver: number and time."""
    found: dict[tuple[int, int], list[float]] = {}
    for transfer in replayed.transfers:
        key = (transfer.source, transfer.destination)
        found.setdefault(key, []).append(transfer.end - transfer.start)
    makespan = replayed.timeline.makespan
    rows = [
        (
            f"{source} to {destination}",
            str(len(times)),
            in_ms(sum(times), 3),
            f"{100 * sum(times) / makespan:.2f} %",
        )
        for (source, destination), times in sorted(found.items())
    ]
    sent, reduced = (
        plan.predicted[name] * plan.global_batch_size / 1e9
        for name in ("pipeline_bytes_per_sample", "data_bytes_per_sample")
    )
    total = (
        f"{sent:.4g} GB a step in pipelines, over all ranks; {reduced:.4g} GB for gradient "
        "reduction"
    )
    if not rows:
        return html_page.lines(["none: one device per pipeline", total])
    return html_page.table(
        ("devices", "messages", "sending", "of the step"), rows
    ) + html_page.lines([total])
