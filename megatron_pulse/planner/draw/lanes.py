"""Below the bars of a timeline's device: a lane of what it sends, or of what it waits for, and one
of what travels between it and the host.

Sent activations are filled, gradients hatched, waiting dotted, so that no colour is needed; what
goes to the host is filled, what comes back hatched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from xml.etree import ElementTree

from megatron_pulse.planner.draw.canvas import Canvas
from megatron_pulse.planner.observe.trace import TimedWait
from megatron_pulse.planner.schedule.check.copies import copy_lines
from megatron_pulse.planner.schedule.check.simulate import Timeline
from megatron_pulse.planner.schedule.operations import Kind
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.step.replay import Transfer

HEIGHT = 8.0
APART = HEIGHT + 2.0
"""From the top of one lane to that of the next."""

LINK, HOST, WAITING = "#b3261e", "#2e6b34", "#777777"


class Look(StrEnum):
    """What a mark in a lane is."""

    ACTIVATION = "sends activations"
    GRADIENT = "sends gradients"
    WAIT = "waits for a message"
    TO_HOST = "activations to the host"
    BACK = "and back"

    @property
    def with_host(self) -> bool:
        """Whether it has the lane of what travels between a device and the host."""
        return self in (Look.TO_HOST, Look.BACK)


_COLOURS = {
    Look.ACTIVATION: LINK,
    Look.GRADIENT: LINK,
    Look.WAIT: WAITING,
    Look.TO_HOST: HOST,
    Look.BACK: HOST,
}
_FILLED = {Look.ACTIVATION: "#e79a92", Look.TO_HOST: "#9cc5a1"}


@dataclass(frozen=True)
class Mark:
    """Something in the lane of ``device``; a message arrives at device ``to``."""

    device: int
    start: float
    end: float
    look: Look
    text: str
    to: int | None = None


def sent(transfers: Iterable[Transfer]) -> tuple[Mark, ...]:
    """A mark for each message, in the sender's lane."""
    return tuple(
        Mark(
            t.source,
            t.start,
            t.end,
            Look.ACTIVATION if t.consumer.kind is Kind.FORWARD else Look.GRADIENT,
            f"for {t.consumer}, device {t.source} to {t.destination}",
            t.destination,
        )
        for t in transfers
    )


def waited(waits: Iterable[TimedWait]) -> tuple[Mark, ...]:
    """A mark for each time that a device waited, in its lane."""
    return tuple(
        Mark(
            w.message.destination,
            w.start_s,
            w.end_s,
            Look.WAIT,
            f"waits for {w.message.payload.value} of {w.message.producer} from device "
            f"{w.message.source}",
        )
        for w in waits
    )


def copied(problem: ScheduleProblem, timeline: Timeline) -> tuple[Mark, ...]:
    """A mark for each copy to the host and back, in the device's lane: one after the other, each
    from when what it copies is made, or called for."""
    free: dict[tuple[int, bool], float] = {}
    marks = []
    for line in copy_lines(timeline.schedule):
        for copy in line:
            op, leaves = copy.operation, copy.operation.kind is Kind.OFFLOAD
            begun_by = op._replace(kind=Kind.FORWARD) if leaves else op
            if begun_by not in timeline.end:
                continue
            device = problem.placement.device_of_stage[op.stage]
            start = max(timeline.end[begun_by], free.get((device, leaves), 0.0))
            end = start + problem.copying_of(op.stage)
            free[device, leaves] = end
            look, words = (Look.TO_HOST, "to the host") if leaves else (Look.BACK, "back")
            what = f"activations of stage {op.stage}, microbatch {op.microbatch}, {words}"
            marks.append(Mark(device, start, end, look, what))
    return tuple(marks)


def define(definitions: ElementTree.Element, looks: Collection[Look]) -> None:
    """The hatching of gradients and of what comes back, and the dots of waiting, where they are
    used."""
    hatching = "M-1 1L1 -1M0 4L4 0M3 5L5 3"
    for look, size, shape in (
        (Look.GRADIENT, "4", hatching),
        (Look.BACK, "4", hatching),
        (Look.WAIT, "3", "M1 1h1v1h-1z"),
    ):
        if look not in looks:
            continue
        pattern = ElementTree.SubElement(definitions, "pattern", id=look.name.lower())
        pattern.set("patternUnits", "userSpaceOnUse")
        for name in ("width", "height"):
            pattern.set(name, size)
        ElementTree.SubElement(pattern, "rect", width=size, height=size, fill="white")
        colour = _COLOURS[look]
        ElementTree.SubElement(pattern, "path", d=shape, stroke=colour, fill="none")


def draw_lanes(
    canvas: Canvas,
    marks: Sequence[Mark],
    x: Callable[[float], float],
    tops: Sequence[float],
    bar: float,
    arrows: bool,
) -> None:
    """The marks below bars that begin at ``tops`` and are ``bar`` high.

    With ``arrows`` there are lines to where messages arrive.
    """
    lanes = canvas.add("g", class_="lanes")
    below = APART if any(not mark.look.with_host for mark in marks) else 0.0
    for mark in marks:
        left, right = x(mark.start), x(mark.end)
        top = tops[mark.device] + bar + 1.5 + below * mark.look.with_host
        shape = draw_mark(canvas, mark.look, left, top, max(right - left, 1.0), lanes)
        canvas.hint(shape, mark.text)
        if arrows and mark.to is not None:
            below = mark.to > mark.device
            begin = top + HEIGHT if below else top
            end = tops[mark.to] + (0.0 if below else bar)
            line = canvas.add("line", lanes, x1=right, y1=begin, x2=right, y2=end, class_="arrival")
            line.set("stroke", LINK)
            line.set("stroke-width", "0.7")
            line.set("marker-end", "url(#arrow)")
            if mark.look is Look.GRADIENT:
                line.set("stroke-dasharray", "3 1.5")


def draw_mark(
    canvas: Canvas,
    look: Look,
    left: float,
    top: float,
    width: float,
    within: ElementTree.Element | None = None,
) -> ElementTree.Element:
    """One mark."""
    fill = _FILLED.get(look, f"url(#{look.name.lower()})")
    shape = canvas.add("rect", within, x=left, y=top, width=width, height=HEIGHT, fill=fill)
    shape.set("class", "mark")
    if width > 2:
        shape.set("stroke", _COLOURS[look])
        shape.set("stroke-width", "0.5")
    return shape
