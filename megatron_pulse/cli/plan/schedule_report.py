"""What ``pulse schedule`` found: tables, JSON, and pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_pulse.cli import page
from megatron_pulse.cli.plan.schedule_input import Task
from megatron_pulse.files import replacing
from megatron_pulse.planner.draw.schedule import draw_schedule
from megatron_pulse.planner.draw.trace_events import trace_events
from megatron_pulse.planner.schedule.check.simulate import Timeline, grid, run
from megatron_pulse.planner.schedule.check.validate import peak_activations
from megatron_pulse.planner.schedule.compare import Rival
from megatron_pulse.planner.schedule.operations import Kind
from megatron_pulse.planner.schedule.problem import ScheduleProblem, Synthesis

_GRID_WIDTH = 180


@dataclass(frozen=True)
class Result:
    """A schedule for ``problem``, which is one of the task's, and others, if asked for."""

    task: Task
    problem: ScheduleProblem
    found: Synthesis
    others: Sequence[Rival]

    @cached_property
    def timeline(self) -> Timeline:
        """When everything runs."""
        return run(self.problem, self.found.schedule)

    @cached_property
    def peak(self) -> tuple[float, ...]:
        """Most live stage activations of each device."""
        return peak_activations(self.found.schedule, self.problem.activation)

    @property
    def bubble(self) -> float:
        """The idle share of all devices' time."""
        devices = len(self.timeline.bubble)
        return sum(self.timeline.bubble) / (devices * self.timeline.makespan)

    @property
    def title(self) -> str:
        """What was scheduled, in a line."""
        placement = self.problem.placement
        splits = Kind.WEIGHT_GRAD in self.problem.kinds
        return (
            f"{self.task.name}: {self.found.schedule.name}, {placement.kind.name} of "
            f"{placement.num_stages} stages on P = {placement.num_devices}, M = "
            f"{self.problem.num_microbatches}{', split backwards' * splits}"
        )

    def time(self, value: float) -> str:
        """A time in the unit of the task."""
        return f"{value * self.task.scale:.5g}{f' {self.task.unit}' * bool(self.task.unit)}"


def as_json(result: Result) -> dict[str, Any]:
    """The figures, and the order of every device; ``comparison`` only where it was asked for."""
    made = result.found.certificate
    record: dict[str, Any] = {
        "makespan": made.makespan,
        "lower_bound": made.lower_bound,
        "gap": made.gap,
        "proved": made.proved,
        "solver": made.solver,
        "seconds": made.seconds,
        "peak": list(result.peak),
        "order": [[str(op) for op in order] for order in result.found.schedule.order],
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


def report(result: Result) -> list[str]:
    """Lines for people: figures, devices, the grid where it is small, and the comparison."""
    made, problem = result.found.certificate, result.problem
    caps = "no cap" if problem.cap is None else f"cap {max(problem.cap):.4g}"
    lines = [result.title, *_figures(result), ""]
    lines += [f"{'device':>6s}{'busy':>14s}{'idle':>9s}{'peak':>8s}  ({caps})"]
    for device, (busy, idle) in enumerate(
        zip(result.timeline.busy, result.timeline.bubble, strict=True)
    ):
        share = 100 * idle / made.makespan
        lines.append(f"{device:6d}{result.time(busy):>14s}{share:7.1f} %{result.peak[device]:8.4g}")
    if picture := _grid(result):
        lines += ["", *picture]
    if result.others:
        lines += ["", *_comparison(result)]
    return lines


def _figures(result: Result) -> list[str]:
    made = result.found.certificate
    known = "proved: none is shorter" if made.proved else f"gap {100 * made.gap:.2f} %, not proved"
    lines = [
        f"makespan {result.time(made.makespan)}, lower bound {result.time(made.lower_bound)} "
        f"({known}); {made.solver}, {made.seconds:.3g} s",
        f"bubble {100 * result.bubble:.1f} %, peak {max(result.peak):.4g} live stage activations",
    ]
    if result.task.samples is not None:
        samples = result.task.samples * result.problem.num_microbatches / made.makespan
        lines[-1] += f", {samples:.4g} samples/s on each pipeline"
    return lines


def _grid(result: Result) -> list[str]:
    """A column for each unit of time where times are whole, else the orders; nothing if wide."""
    line = result.timeline
    whole = line.makespan <= _GRID_WIDTH and all(t == round(t) for t in line.end.values())
    for shown in [line] * whole + [result.found.schedule]:
        text = grid(shown)
        if max(map(len, text.splitlines())) <= _GRID_WIDTH:
            return text.splitlines()
    return []


_COLUMNS = ("schedule", "placement", "backward", "makespan", "to ours", "bubble", "peak", "cap")


def _rows(result: Result) -> list[tuple[str, ...]]:
    """Ours, then the classic ones, as text."""
    ours = result.found.certificate.makespan
    rows = [
        (
            f"{result.found.schedule.name} (ours)",
            result.problem.placement.kind.name,
            _backward(result.problem),
            result.time(ours),
            "1.000",
            f"{100 * result.bubble:.1f} %",
            f"{max(result.peak):.4g}",
            "kept" if result.problem.cap is not None else "none",
        )
    ]
    for other in result.others:
        fits = "fits" if other.fits(result.problem.cap) else "exceeds"
        rows.append(
            (
                other.name,
                other.placement,
                _backward(other.problem),
                result.time(other.timeline.makespan),
                f"{other.timeline.makespan / ours:.3f}",
                f"{100 * other.bubble:.1f} %",
                f"{max(other.peak):.4g}",
                fits if result.problem.cap is not None else "none",
            )
        )
    return rows


_NOTE = (
    "the same chain for all: neighbouring stages as one where a schedule has fewer; peak in live "
    "stage activations of the fullest device; bidirectional holds all weights twice"
)


def _backward(problem: ScheduleProblem) -> str:
    return "whole" if problem.weight_grad is None else "split"


def _comparison(result: Result) -> list[str]:
    rows = [_COLUMNS, *_rows(result)]
    widths = [max(len(row[k]) for row in rows) for k in range(len(_COLUMNS))]
    lines = [
        "  ".join(
            cell.ljust(width) if k < 3 else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return [*lines, _NOTE]


def write_drawing(result: Result, path: Path) -> None:
    """A picture, a page or a trace, by the ending of ``path``."""
    picture = draw_schedule(
        result.problem,
        result.timeline,
        result.title,
        lower_bound=result.found.certificate.lower_bound,
        unit=result.task.unit,
        scale=result.task.scale,
    )
    match path.suffix.lower():
        case ".json":
            scale = 1e6 if result.task.unit else 1e3  # seconds, or one unit as a millisecond
            text = json.dumps(trace_events(result.problem, result.timeline, scale))
        case ".html":
            text = _page(result, picture)
        case _:
            text = picture
    with replacing(path) as beside:
        beside.write_text(text, encoding="utf-8")


def _page(result: Result, drawing: str) -> str:
    parts = [page.lines(_figures(result)), page.picture(drawing)]
    if result.others:
        rows = page.table(_COLUMNS, _rows(result), left=(0, 1, 2), bold_first=True)
        parts.append(f"<h2>Classic schedules</h2>{rows}{page.lines([_NOTE])}")
    return page.page(result.title, *parts)
