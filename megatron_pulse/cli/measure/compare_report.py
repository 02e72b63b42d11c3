"""Output of ``pulse compare``: tables, text, JSON and pictures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any

from megatron_pulse.cli import html_page
from megatron_pulse.cli.output import draw_timeline, table
from megatron_pulse.format import in_mb, in_ms
from megatron_pulse.planner.draw.lanes import sent, waited
from megatron_pulse.planner.draw.schedule import Panel
from megatron_pulse.planner.draw.style import NAMES
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.planner.program.simulate import SimulatedStep
from megatron_pulse.planner.trace.compare import Comparison, OperationTimes
from megatron_pulse.planner.trace.trace import Trace
from megatron_pulse.planner.trace.trace_to_profile import timeline_of, typical_step


@dataclass(frozen=True)
class PlanComparison:
    """Plan, trace of a run of the plan, and their comparison."""

    plan: PlanFile
    trace: Trace
    replayed: SimulatedStep
    found: Comparison

    @cached_property
    def predicted_bytes(self) -> float:
        """Predicted bytes that the traced pipeline (one rank of each device) sends in a step."""
        samples = self.plan.global_batch_size / self.plan.data
        per_sample: float = self.plan.predicted["pipeline_bytes_per_sample"]
        return per_sample * samples / (self.plan.tensor * self.plan.context)

    @cached_property
    def measured_bytes(self) -> float:
        """Measured bytes sent in a step, including conditioning, which is not predicted."""
        return median(sum(t.sent_bytes for t in step.traffic) for step in self.trace.steps)


def as_json(compared: PlanComparison) -> dict[str, Any]:
    """JSON record of all figures, in seconds and bytes."""
    found = compared.found
    return {
        "makespan_s": _pair(found.predicted_makespan_s, found.measured_makespan_s),
        "bubble": _pair(found.predicted_bubble, found.measured_bubble),
        "sent_bytes": _pair(compared.predicted_bytes, compared.measured_bytes),
        "clock_accuracy_s": found.clock_accuracy_s,
        "steps": [step.step for step in compared.trace.steps],
        "stages": [
            {
                "kind": NAMES[row.kind],
                "stage": row.stage,
                "count": row.count,
                "seconds": _pair(row.predicted_s, row.measured_s),
            }
            for row in found.rows
        ],
        "devices": [asdict(device) for device in found.devices],
        "in_words": words(compared),
    }


def _pair(predicted: float, measured: float) -> dict[str, float]:
    return {"predicted": predicted, "measured": measured}


def report(compared: PlanComparison) -> list[str]:
    """Lines of the report."""
    return [
        *_heading(compared),
        "",
        *table([_TOTALS_COLUMNS, *_totals(compared)]),
        "",
        *table([_ROW_COLUMNS, *_rows(compared)]),
        "",
        *table([_DEVICE_COLUMNS, *_devices(compared)]),
        "",
        *words(compared),
    ]


_TOTALS_COLUMNS = ("", "predicted", "measured", "off by")
_ROW_COLUMNS = ("operation", "stage", "times", "predicted", "measured", "off by", "in a step")
_DEVICE_COLUMNS = ("device", "computes", "measured", "off by", "waits (measured)")


def _heading(compared: PlanComparison) -> list[str]:
    trace = compared.trace
    steps = ", ".join(str(step.step) for step in trace.steps)
    machine = ", ".join(f"{name} {value}" for name, value in trace.machine.items())
    return [
        compared.plan.heading,
        f"measured in step(s) {steps} of one pipeline, on {machine}; medians; clocks of devices "
        f"synchronised to {1e6 * trace.clock_accuracy_s:.3g} us ({trace.clock})",
    ]


def _totals(compared: PlanComparison) -> list[tuple[str, ...]]:
    found = compared.found
    rows = [
        ("makespan", found.predicted_makespan_s, found.measured_makespan_s, 1e3, "ms"),
        ("bubble", found.predicted_bubble, found.measured_bubble, 100.0, "%"),
        ("sent", compared.predicted_bytes, compared.measured_bytes, 1e-6, "MB"),
    ]
    return [
        (name, f"{a * scale:.4g} {unit}", f"{b * scale:.4g} {unit}", _off(a, b, unit == "%"))
        for name, a, b, scale, unit in rows
    ]


def _rows(compared: PlanComparison) -> list[tuple[str, ...]]:
    return [
        (
            NAMES[row.kind],
            str(row.stage),
            str(row.count),
            in_ms(row.predicted_s),
            in_ms(row.measured_s),
            _off(row.predicted_s, row.measured_s),
            f"{1e3 * row.total_difference_s:+.3g} ms",
        )
        for row in compared.found.rows
    ]


def _devices(compared: PlanComparison) -> list[tuple[str, ...]]:
    return [
        (
            str(d.device),
            in_ms(d.predicted_busy_s),
            in_ms(d.measured_busy_s),
            _off(d.predicted_busy_s, d.measured_busy_s),
            in_ms(d.measured_wait_s),
        )
        for d in compared.found.devices
    ]


def _off(predicted: float, measured: float, share: bool = False) -> str:
    if share:
        return f"{100 * (measured - predicted):+.1f} points"
    if not predicted:
        return "as predicted" if not measured else "none predicted"
    return f"{100 * (measured / predicted - 1):+.1f} %"


def words(compared: PlanComparison) -> list[str]:
    """Sentences on the largest differences between run and plan."""
    found = compared.found
    gap = found.measured_makespan_s - found.predicted_makespan_s
    lines = [
        f"the pipeline took {_amount(gap)} than predicted "
        f"({_off(found.predicted_makespan_s, found.measured_makespan_s)})"
    ]
    busiest = max(found.devices, key=lambda d: d.measured_busy_s)
    extra = busiest.measured_busy_s - busiest.predicted_busy_s
    lines.append(
        f"the busiest device, {busiest.device}, computed {_amount(extra)} than predicted and "
        f"waited {in_ms(busiest.measured_wait_s, 3)} for messages"
    )
    lines += [_in_words(row) for row in found.differing_most(3) if row.total_difference_s]
    sent_extra = compared.measured_bytes - compared.predicted_bytes
    if abs(sent_extra) > 0.01 * max(compared.measured_bytes, compared.predicted_bytes):
        more = sent_extra > 0
        lines.append(
            f"{in_mb(abs(sent_extra))} {'more' if more else 'less'} were sent than predicted"
            + "; conditioning, replicated embedders and results of encoders are not "
            "predicted" * more
        )
    return lines


def _in_words(row: OperationTimes) -> str:
    return (
        f"{NAMES[row.kind]}s of stage {row.stage} took {_amount(row.measured_s - row.predicted_s)} "
        f"each, {in_ms(abs(row.total_difference_s), 3)} in a step "
        f"({_off(row.predicted_s, row.measured_s)})"
    )


def _amount(seconds: float) -> str:
    return f"{in_ms(abs(seconds), 3)} {'longer' if seconds >= 0 else 'less'}"


def write_drawing(compared: PlanComparison, path: Path) -> str:
    """Draw both timelines as a picture, a page or events, by the suffix of ``path``."""
    plan, step = compared.plan, typical_step(compared.trace)
    panels = [
        Panel("predicted", compared.replayed.timeline, sent(compared.replayed.transfers)),
        Panel(f"measured, step {step.step}", timeline_of(plan.schedule, step), waited(step.waits)),
    ]
    title = f"{plan.heading}, M = {plan.num_microbatches}"
    page = partial(_page, compared)
    return draw_timeline(path, plan.problem, panels, title, page, in_bytes=True)


def _page(compared: PlanComparison, picture: str) -> str:
    return html_page.page(
        f"Predicted and measured: {compared.plan.heading}",
        html_page.lines(_heading(compared)[1:]),
        html_page.table(_TOTALS_COLUMNS, _totals(compared), left=(0,)),
        "<h2>Where they differ most</h2>" + html_page.lines(words(compared)),
        "<h2>One step of a pipeline</h2>" + html_page.picture(picture),
        "<h2>Operations</h2>" + html_page.table(_ROW_COLUMNS, _rows(compared), left=(0,)),
        "<h2>Devices</h2>" + html_page.table(_DEVICE_COLUMNS, _devices(compared)),
    )
