"""Picture of a timeline (SVG): devices as rows, operations as bars, time from left to right.

Forwards are light, backwards dark, weight gradients hatched, bubble tasks dotted, and idle time is
blank. The stages of a device go from lighter to darker along the chain. Every second stage, on the
way back up, has a stripe along the top. So the picture is readable without colour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from xml.etree import ElementTree

from megatron_pulse.planner.draw.canvas import FAINT, GREY, INK, Canvas
from megatron_pulse.planner.draw.lanes import (
    APART,
    HEIGHT,
    LINK,
    Mark,
    MarkStyle,
    copied,
    draw_lanes,
    draw_mark,
    patterns,
)
from megatron_pulse.planner.draw.style import MARKS, NAMES, tile
from megatron_pulse.planner.schedule.check.simulate import Timeline, dependency
from megatron_pulse.planner.schedule.check.validate import peak_memory
from megatron_pulse.planner.schedule.operations import BACKWARDS, Operation, OpType
from megatron_pulse.planner.schedule.problem import ScheduleProblem

_LEFT, _RIGHT, _TOP, _HEADING, _AXIS, _LEGEND = 156.0, 150.0, 62.0, 24.0, 40.0, 40.0
_LANES = 22.0  # second line of the legend
_NARROW, _WIDE = 1400.0, 2600.0
_MOMENT = 2.0  # width of an operation that takes no time
_LEGIBLE, _SEEN, _POINTED = 12.0, 5.0, 16.0
# Pixels of a bar with a number, of a bar with its links, and of a bar with arrows


@dataclass(frozen=True)
class Panel:
    """A named timeline among others on one time axis; ``lanes`` are drawn below its bars.

    ``kinds`` are the names of each device's kind, if devices differ.
    """

    name: str
    timeline: Timeline
    lanes: tuple[Mark, ...] = ()
    kinds: tuple[str, ...] = ()


def draw_schedule(
    problem: ScheduleProblem,
    timeline: Timeline | Sequence[Panel],
    title: str,
    *,
    lower_bound: float | None = None,
    unit: str = "",
    scale: float = 1.0,
    in_bytes: bool = False,
) -> str:
    """Draw one timeline, or several below each other on one time axis, as SVG text.

    A timeline may be measured: only its starts and ends count, and it may contain bubble tasks.
    Times are shown in ``unit`` after multiplication by ``scale`` (1e3 and "ms" for seconds). Bars
    that are wide enough carry their microbatch. Links that take time are lines from the end of an
    operation to the arrival at the other. If a panel has lanes, the lanes show messages instead.
    Tooltips of bars show names and times. ``in_bytes`` means that activations are counted in bytes.
    """
    panels = [Panel("", timeline)] if isinstance(timeline, Timeline) else list(timeline)
    return _Drawing(problem, panels, lower_bound, unit, scale, in_bytes).draw(title)


def describe(
    problem: ScheduleProblem,
    timeline: Timeline,
    lower_bound: float | None = None,
    unit: str = "",
    scale: float = 1.0,
    in_bytes: bool = False,
) -> str:
    """Figures of a timeline in one line: makespan, bubble, bound, and peak of a device."""
    peak = max(peak_memory(problem, timeline.schedule))
    idle = sum(timeline.bubble) / (len(timeline.bubble) * timeline.makespan or 1.0)
    parts = [f"makespan {_figure(timeline.makespan, unit, scale)}", f"bubble {100 * idle:.1f} %"]
    if lower_bound:
        over = timeline.makespan / lower_bound - 1
        near = "attained" if abs(over) < 1e-9 else f"{100 * over:+.1f} %"
        parts.append(f"lower bound {_figure(lower_bound, unit, scale)} ({near})")
    held = f"{peak / 1e9:.3g} GB of" if in_bytes else f"{peak:.4g} live stage"
    return ", ".join([*parts, f"peak {held} activations"])


def with_copies(problem: ScheduleProblem, panels: Sequence[Panel]) -> list[Panel]:
    """``panels`` with copies to and from the host in their lanes."""
    return [replace(p, lanes=p.lanes + copied(problem, p.timeline)) for p in panels]


class _Drawing:
    def __init__(
        self,
        problem: ScheduleProblem,
        panels: Sequence[Panel],
        lower_bound: float | None,
        unit: str,
        scale: float,
        in_bytes: bool,
    ) -> None:
        self.problem, self.bound = problem, lower_bound
        self.panels = with_copies(problem, panels)
        self.unit, self.scale, self.in_bytes = unit, scale, in_bytes
        self.devices = problem.placement.num_devices
        self.chunk = {
            (device, stage): (k, len(stages))
            for device in range(self.devices)
            for stages in [problem.placement.stages_of_device(device)]
            for k, stage in enumerate(stages)
        }
        spans = sorted(
            p.timeline.end[o] - p.timeline.start[o]
            for p in panels
            for o in p.timeline.end
            if not o.kind.copies
        )
        self.span = max((p.timeline.makespan for p in panels), default=0.0) or 1.0
        typical = spans[len(spans) // 4] if spans else 1.0
        wanted = 4.0 * self.span / typical if typical > 0 else _WIDE
        self.width = min(max(_NARROW, _LEFT + _RIGHT + wanted), _WIDE)
        self.chart = self.width - _LEFT - _RIGHT
        self.typical = self.chart * typical / self.span
        self.bar = 26.0 if self.devices <= 8 else 20.0
        self.looks = [
            x for x in MarkStyle if any(m.look is x for p in self.panels for m in p.lanes)
        ]
        num_lanes = len({look.with_host for look in self.looks})
        below = 10.0 + APART * num_lanes - 2.0 if num_lanes else 5.0
        self.row = self.bar + (max(below, 12.0) if self._has_links() else below)
        self.kinds = [k for k in OpType if any(o.kind is k for p in panels for o in p.timeline.end)]
        self.head = _HEADING if len(panels) > 1 else 0.0
        self.panel = self.head + self.row * self.devices + 10.0
        self.height = _TOP + self.panel * len(panels) + _AXIS + _LEGEND
        self.height += _LANES * bool(self.looks)
        self.canvas = Canvas(self.width, self.height)

    def draw(self, title: str) -> str:
        self._definitions()
        alone = len(self.panels) == 1
        figures = self._figures(self.panels[0].timeline, self.bound) if alone else ""
        self.canvas.heading(12, title, figures)
        self._axis()
        for index, panel in enumerate(self.panels):
            self._panel(panel, _TOP + self.panel * index)
        self._bound_line()
        self._legend()
        return str(self.canvas)

    def _figures(self, timeline: Timeline, bound: float | None) -> str:
        return describe(self.problem, timeline, bound, self.unit, self.scale, self.in_bytes)

    def _has_links(self) -> bool:
        stages = self.problem.placement.num_stages
        if any(not look.with_host for look in self.looks):
            return False
        lags = (self.problem.lag(s, s + 1) for s in range(stages - 1))
        return self.typical >= _SEEN and any(lag > 0 for lag in lags)

    def _x(self, time: float) -> float:
        return _LEFT + self.chart * time / self.span

    def _fill(self, device: int, operation: Operation) -> str:
        is_task = operation.kind is OpType.BUBBLE_TASK
        chunk = 0 if is_task else self.chunk[device, operation.stage][0]
        return f"url(#{operation.kind.value}{chunk})"

    def _definitions(self) -> None:
        """The arrow's head, and the pattern of every operation type on every stage of a device."""
        arrow = ElementTree.Element("marker", id="arrow", viewBox="0 0 6 6")
        for name, value in (("refX", "5.5"), ("refY", "3"), ("orient", "auto")):
            arrow.set(name, value)
        ElementTree.SubElement(arrow, "path", d="M0 .5L6 3L0 5.5z", fill=LINK)
        most = max(count for _, count in self.chunk.values())
        tiles = [
            tile(kind, chunk, most, self.bar)
            for kind in self.kinds
            for chunk in range(1 if kind is OpType.BUBBLE_TASK else most)
        ]
        self.canvas.define([arrow, *tiles, *patterns(self.looks)])

    def _axis(self) -> None:
        bottom = _TOP + self.panel * len(self.panels)
        step = _step(self.span * self.scale / 12)
        count = int(self.span * self.scale / step + 1e-9)
        for k in range(count + 1):
            x = self._x(k * step / self.scale)
            self.canvas.add("line", x1=x, y1=_TOP - 4, x2=x, y2=bottom + 4, stroke=FAINT)
            self.canvas.text(x, bottom + 17, f"{k * step:.6g}", fill=GREY, anchor="middle")
        end = _LEFT + self.chart
        self.canvas.add("line", x1=_LEFT, y1=bottom + 4, x2=end, y2=bottom + 4, stroke=GREY)
        self.canvas.text(
            end + 14, bottom + 17, f"time{f' ({self.unit})' * bool(self.unit)}", fill=GREY
        )

    def _panel(self, panel: Panel, top: float) -> None:
        if self.head:
            note = f"{panel.name}: {self._figures(panel.timeline, None)}"
            self.canvas.text(12, top + 15, note, size=12, weight="bold")
        peaks = peak_memory(self.problem, panel.timeline.schedule)
        self.canvas.text(_LEFT + self.chart + 14, top - 6 + self.head * 0.9, "idle", fill=GREY)
        self.canvas.text(
            _LEFT + self.chart + 78,
            top - 6 + self.head * 0.9,
            "peak" + " GB" * self.in_bytes,
            fill=GREY,
        )
        if self._has_links():
            self._links(panel.timeline, top + self.head)
        if panel.lanes:
            begin = top + self.head
            arrows = self.typical >= _POINTED
            tops = [begin + self.row * device for device in range(self.devices)]
            draw_lanes(self.canvas, panel.lanes, self._x, tops, self.bar, arrows)
        for device, operations in enumerate(panel.timeline.schedule.order):
            y = top + self.head + self.row * device
            stages = self.problem.placement.stages_of_device(device)
            middle = y + self.bar / 2 + 4
            self.canvas.text(12, middle, f"device {device}", size=12, weight="bold")
            if panel.kinds and panel.kinds[device]:
                self.canvas.text(12, middle + 10, f"{panel.kinds[device]:.24}", size=9)
            shown = (
                ", ".join(map(str, stages)) if len(stages) < 5 else f"{stages[0]} … {stages[-1]}"
            )
            self.canvas.text(_LEFT - 8, middle, shown, size=10, fill=GREY, anchor="end")
            self.canvas.add(
                "rect", x=_LEFT, y=y, width=self.chart, height=self.bar, fill="none", stroke=FAINT
            )
            idle = panel.timeline.bubble[device] / (panel.timeline.makespan or 1.0)
            self.canvas.text(_LEFT + self.chart + 14, middle, f"{100 * idle:.1f} %", size=12)
            self.canvas.text(
                _LEFT + self.chart + 78,
                middle,
                f"{peaks[device] / (1e9 if self.in_bytes else 1):.4g}",
                size=12,
            )
            row = self.canvas.add("g", transform=f"translate(0 {y:g})", class_="device")
            row.set("stroke", "white" if self.typical >= _SEEN else "none")
            row.set("stroke-width", "0.6")
            for operation in operations:
                self._bar(row, panel.timeline, device, operation)

    def _bar(
        self, row: ElementTree.Element, timeline: Timeline, device: int, operation: Operation
    ) -> None:
        begin, end = timeline.start[operation], timeline.end[operation]
        x, width = self._x(begin), self._x(end) - self._x(begin)
        if operation.kind.copies:
            width = _MOMENT
        bar = self.canvas.add(
            "rect",
            row,
            x=x,
            width=width,
            height=self.bar,
            fill=self._fill(device, operation),
            class_="op",
        )
        what = f"stage {operation.stage}, microbatch {operation.microbatch}"
        if operation.kind is OpType.BUBBLE_TASK:
            bubble_tasks = timeline.schedule.bubble_tasks
            known = operation.stage < len(bubble_tasks)
            name = bubble_tasks[operation.stage].name if known else str(operation.stage)
            what = f"{name}, slice {operation.microbatch}"
        when = f"{self._at(begin)} to {self._at(end)}"
        self.canvas.hint(bar, f"{operation}: {NAMES[operation.kind]}, {what}; {when}")
        text = str(operation.microbatch)
        if width >= max(_LEGIBLE, 6.4 * len(text) + 3):
            dark = operation.kind in BACKWARDS
            number = self.canvas.add("text", row, x=x + width / 2, y=self.bar / 2 + 5)
            number.set("fill", "white" if dark else INK)
            number.set("text-anchor", "middle")
            if operation.kind in MARKS:  # a halo keeps the number clear of the marks
                number.set("stroke-width", "3")
                number.set("paint-order", "stroke")
            else:
                number.set("stroke", "none")
            number.text = text

    def _at(self, time: float) -> str:
        return f"{time * self.scale:.6g}"

    def _links(self, timeline: Timeline, top: float) -> None:
        """Lines from the ends of sending operations to the arrivals; those of gradients are
        dashed."""
        group = self.canvas.add("g", fill="none", stroke=LINK, class_="links")
        placement = self.problem.placement
        arrows = self.typical >= _POINTED
        for operation in timeline.end:
            source = dependency(operation, placement)
            if source is None:
                continue
            one, other = (placement.device_of_stage[o.stage] for o in (source, operation))
            if one == other:
                continue
            sent = timeline.end[source]
            lag = self.problem.lag(source.stage, operation.stage)
            arrival = max(sent, min(sent + lag, timeline.start[operation]))
            y1, y2 = (
                top + self.row * a + (self.bar if a < b else 0.0)
                for a, b in ((one, other), (other, one))
            )
            line = self.canvas.add(
                "line", group, x1=self._x(sent), y1=y1, x2=self._x(arrival), y2=y2, class_="link"
            )
            if operation.kind is not OpType.FORWARD:
                line.set("stroke-dasharray", "3 1.5")
            if arrows:
                line.set("marker-end", "url(#arrow)")

    def _bound_line(self) -> None:
        if self.bound is None or not 0 < self.bound <= self.span:
            return
        x, bottom = self._x(self.bound), _TOP + self.panel * len(self.panels) + 4
        line = self.canvas.add("line", x1=x, y1=_TOP - 10, x2=x, y2=bottom, stroke=INK)
        line.set("stroke-dasharray", "6 3")
        self.canvas.hint(line, f"lower bound {self._at(self.bound)}")
        self.canvas.text(x - 4, _TOP - 6, "lower bound", size=10, fill=GREY, anchor="end")

    def _legend(self) -> None:
        x, y = _LEFT, self.height - 30 - _LANES * bool(self.looks)
        most = max(count for _, count in self.chunk.values())
        for kind in self.kinds:
            chunks = 1 if kind is OpType.BUBBLE_TASK else most
            wide = 26.0 if chunks > 1 else 34.0
            for chunk in range(chunks):
                moved = f"translate({x:g} {y:g})"
                group = self.canvas.add("g", transform=moved, stroke=GREY)
                group.set("stroke-width", "0.6")
                fill = f"url(#{kind.value}{chunk})"
                self.canvas.add("rect", group, x=0, y=0, width=wide, height=self.bar, fill=fill)
                x += wide
            self.canvas.text(x + 6, y + self.bar / 2 + 4, NAMES[kind], size=12)
            x += 24 + 6.6 * len(NAMES[kind])
        if most > 1:
            text = "a device's stages: lighter to darker, every second one striped"
            self.canvas.text(x, y + self.bar / 2 + 4, text, size=12, fill=GREY)
            x += 24 + 5.9 * len(text)
        if self._has_links():
            middle = y + self.bar / 2
            self.canvas.add("line", x1=x, y1=middle, x2=x + 28, y2=middle, stroke=LINK)
            self.canvas.text(x + 34, middle + 4, "link (dashed: of gradients)", size=12)
        x, y = _LEFT, y + self.bar + 14
        for look in self.looks:
            draw_mark(self.canvas, look, x, y - HEIGHT, 34)
            self.canvas.text(x + 40, y, look.value, size=12)
            x += 64 + 6.6 * len(look.value)


def _step(least: float) -> float:
    """Smallest of 1, 2, 5 times a power of ten that is not below ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= least * (1 - 1e-9))


def _figure(time: float, unit: str, scale: float) -> str:
    return f"{time * scale:.4g}{f' {unit}' * bool(unit)}"
