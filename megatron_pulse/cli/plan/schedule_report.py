"""Output of ``pulse schedule``: tables, JSON, and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from megatron_pulse.cli import html_page
from megatron_pulse.cli.output import draw_timeline, name_value_lines, table
from megatron_pulse.cli.plan.plan_facts import bubble_task_lines, filling_facts
from megatron_pulse.cli.plan.schedule_input import ScheduleInput
from megatron_pulse.planner.bubble_fill.filled_schedule import FilledSchedule
from megatron_pulse.planner.schedule.check.simulate import grid, simulate
from megatron_pulse.planner.schedule.classic.compare import ClassicResult
from megatron_pulse.planner.schedule.operations import OpType
from megatron_pulse.planner.schedule.problem import ScheduleProblem, Synthesis

_GRID_WIDTH = 180


@dataclass(frozen=True)
class ScheduleReport:
    """Schedule for ``problem``, which is one of the task's, and other schedules on request."""

    task: ScheduleInput
    problem: ScheduleProblem
    found: Synthesis
    others: Sequence[ClassicResult]
    filled: FilledSchedule | None = None

    @cached_property
    def ours(self) -> ClassicResult:
        """The found schedule in the form of the others."""
        schedule = self.found.schedule
        return ClassicResult(
            schedule.name, self.problem, schedule, simulate(self.problem, schedule)
        )

    @property
    def title(self) -> str:
        """Line on the scheduled problem."""
        placement = self.problem.placement
        splits = OpType.WEIGHT_GRAD in self.problem.kinds
        return (
            f"{self.task.name}: {self.found.schedule.name}, {placement.kind.name} of "
            f"{placement.num_stages} stages on P = {placement.num_devices}, M = "
            f"{self.problem.num_microbatches}{', split backwards' * splits}"
        )

    def time(self, value: float) -> str:
        """Time as text in the unit of the task."""
        return f"{value * self.task.scale:.5g}{f' {self.task.unit}' * bool(self.task.unit)}"


def as_json(result: ScheduleReport) -> dict[str, Any]:
    """Figures and the order of every device; ``comparison`` only on request."""
    made = result.found.certificate
    record: dict[str, Any] = {
        "makespan": made.makespan,
        "lower_bound": made.lower_bound,
        "gap": made.gap,
        "proved": made.proved,
        "solver": made.solver,
        "seconds": made.seconds,
        "peak": list(result.ours.peak),
        "order": [[str(op) for op in order] for order in result.found.schedule.order],
    }
    if result.filled is not None:
        record["encoders"] = asdict(result.filled.certificate) | {
            "before-step": result.filled.before_step_s
        }
    if result.others:
        record["comparison"] = [
            {
                "schedule": other.name,
                "placement": other.placement,
                "backward": _backward(other.problem),
                "makespan": other.timeline.makespan,
                "ratio": other.timeline.makespan / made.makespan,
                "bubble": other.bubble,
                "peak": max(other.peak),
                "fits": other.fits(result.problem.cap),
            }
            for other in result.others
        ]
    return record


def report(result: ScheduleReport) -> list[str]:
    """Lines of the report: figures, devices, the grid if small, and the comparison."""
    made, cap = result.found.certificate, result.problem.cap
    line, peak = result.ours.timeline, result.ours.peak
    caps = "no cap" if cap is None else f"cap {max(cap):.4g}"
    lines = [result.title, *_figures(result), ""]
    rows = [("device", "busy", "idle", "peak", f"({caps})")]
    for device, (busy, idle) in enumerate(zip(line.busy, line.bubble, strict=True)):
        share = f"{100 * idle / made.makespan:.1f} %"
        rows.append((str(device), result.time(busy), share, f"{peak[device]:.4g}", ""))
    lines += table(rows, left=(-1,))
    if result.filled is not None:
        facts = [*filling_facts(result.filled), *bubble_task_lines(result.found.schedule)]
        lines += ["", "in bubbles, for the next step", *name_value_lines(facts)]
    if picture := _grid(result):
        lines += ["", *picture]
    if result.others:
        lines += ["", *_comparison(result)]
    return lines


def _figures(result: ScheduleReport) -> list[str]:
    made = result.found.certificate
    known = "optimal" if made.proved else f"gap {100 * made.gap:.2f} %"
    lines = [
        f"makespan {result.time(made.makespan)}, lower bound {result.time(made.lower_bound)} "
        f"({known}); {made.solver}, {made.seconds:.3g} s",
        f"bubble {100 * result.ours.bubble:.1f} %, peak {max(result.ours.peak):.4g} live stage "
        "activations",
    ]
    if result.task.samples is not None:
        samples = result.task.samples * result.problem.num_microbatches / made.makespan
        lines[-1] += f", {samples:.4g} samples/s on each pipeline"
    return lines


def _grid(result: ScheduleReport) -> list[str]:
    """Grid with a column per unit of time if times are whole, else of orders; empty if wide."""
    line = result.ours.timeline
    whole = line.makespan <= _GRID_WIDTH and all(t == round(t) for t in line.end.values())
    for shown in [line] * whole + [result.found.schedule]:
        text = grid(shown)
        if max(map(len, text.splitlines())) <= _GRID_WIDTH:
            return text.splitlines()
    return []


_COLUMNS = ("schedule", "placement", "backward", "makespan", "to ours", "bubble", "peak", "cap")


def _rows(result: ScheduleReport) -> list[tuple[str, ...]]:
    """Rows of the found schedule and of the classic ones, as text."""
    cap = result.problem.cap
    rows: list[tuple[str, ...]] = []
    for each in (result.ours, *result.others):
        is_ours = each is result.ours
        fits = "kept" if is_ours else "fits" if each.fits(cap) else "exceeds"
        rows.append(
            (
                each.name + " (ours)" * is_ours,
                each.placement,
                _backward(each.problem),
                result.time(each.timeline.makespan),
                f"{each.timeline.makespan / result.ours.timeline.makespan:.3f}",
                f"{100 * each.bubble:.1f} %",
                f"{max(each.peak):.4g}",
                "none" if cap is None else fits,
            )
        )
    return rows


_NOTE = (
    "same chain for all, with neighbouring stages merged if a schedule has fewer; peak is live "
    "stage activations of the fullest device; bidirectional holds all weights twice"
)


def _backward(problem: ScheduleProblem) -> str:
    return "whole" if problem.weight_grad is None else "split"


def _comparison(result: ScheduleReport) -> list[str]:
    return [*table([_COLUMNS, *_rows(result)], left=(0, 1, 2)), _NOTE]


def write_drawing(result: ScheduleReport, path: Path) -> str:
    """Write a picture, a page or a trace, by the suffix of ``path``; return a line for the user."""
    return draw_timeline(
        path,
        result.problem,
        result.ours.timeline,
        result.title,
        partial(_page, result),
        lower_bound=result.found.certificate.lower_bound,
        unit=result.task.unit,
    )


def _page(result: ScheduleReport, drawing: str) -> str:
    parts = [html_page.lines(_figures(result)), html_page.picture(drawing)]
    if result.others:
        rows = html_page.table(_COLUMNS, _rows(result), left=(0, 1, 2), bold_first=True)
        parts.append(f"<h2>Classic schedules</h2>{rows}{html_page.lines([_NOTE])}")
    return html_page.page(result.title, *parts)
