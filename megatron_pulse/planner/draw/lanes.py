"""Lanes below the bars of a timeline's device: messages or waits, and copies to and from the host.

Sent activations are filled, gradients hatched, and waits dotted, so that no colour is needed.
Copies to the host are filled, copies back hatched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from xml.etree import ElementTree

from megatron_pulse.planner.draw.canvas import Canvas, pattern
from megatron_pulse.planner.program.simulate import Transfer
from megatron_pulse.planner.schedule.check.offload_copies import copy_lines
from megatron_pulse.planner.schedule.check.simulate import Timeline
from megatron_pulse.planner.schedule.operations import OpType
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.trace.trace import TimedWait

HEIGHT = 8.0
APART = HEIGHT + 2.0
"""Distance between the tops of two lanes."""

LINK, HOST, WAITING = "#b3261e", "#2e6b34", "#777777"


class MarkStyle(StrEnum):
    """Kind of a mark in a lane."""

    ACTIVATION = "sends activations"
    GRADIENT = "sends gradients"
    WAIT = "waits for a message"
    TO_HOST = "activations to the host"
    BACK = "and back"

    @property
    def with_host(self) -> bool:
        """True if the mark is in the lane of copies between device and host."""
        return self in (MarkStyle.TO_HOST, MarkStyle.BACK)


_COLOURS = {
    MarkStyle.ACTIVATION: LINK,
    MarkStyle.GRADIENT: LINK,
    MarkStyle.WAIT: WAITING,
    MarkStyle.TO_HOST: HOST,
    MarkStyle.BACK: HOST,
}
_FILLED = {MarkStyle.ACTIVATION: "#e79a92", MarkStyle.TO_HOST: "#9cc5a1"}


@dataclass(frozen=True)
class Mark:
    """A mark in the lane of ``device``; a message arrives at device ``to``."""

    device: int
    start: float
    end: float
    look: MarkStyle
    text: str
    to: int | None = None


def sent(transfers: Iterable[Transfer]) -> tuple[Mark, ...]:
    """Marks of messages, in the sender's lane."""
    return tuple(
        Mark(
            t.source,
            t.start,
            t.end,
            MarkStyle.ACTIVATION if t.consumer.kind is OpType.FORWARD else MarkStyle.GRADIENT,
            f"for {t.consumer}, device {t.source} to {t.destination}",
            t.destination,
        )
        for t in transfers
    )


def waited(waits: Iterable[TimedWait]) -> tuple[Mark, ...]:
    """Marks of waits, in the lane of the waiting device."""
    return tuple(
        Mark(
            w.message.destination,
            w.start_s,
            w.end_s,
            MarkStyle.WAIT,
            f"waits for {w.message.payload.value} of {w.message.producer} from device "
            f"{w.message.source}",
        )
        for w in waits
    )


def copied(problem: ScheduleProblem, timeline: Timeline) -> tuple[Mark, ...]:
    """Marks of copies to the host and back, in the device's lane.

    Copies in one direction follow each other; each begins after its forward or its L.
    """
    free: dict[tuple[int, bool], float] = {}
    marks = []
    for line in copy_lines(timeline.schedule):
        for begun_by, awaited_by in line:
            op, leaves = begun_by, awaited_by.kind is OpType.OFFLOAD
            if begun_by not in timeline.end:
                continue
            device = problem.placement.device_of_stage[op.stage]
            start = max(timeline.end[begun_by], free.get((device, leaves), 0.0))
            end = start + problem.offload_s_of(op.stage)
            free[device, leaves] = end
            look, words = (MarkStyle.TO_HOST, "to the host") if leaves else (MarkStyle.BACK, "back")
            what = f"activations of stage {op.stage}, microbatch {op.microbatch}, {words}"
            marks.append(Mark(device, start, end, look, what))
    return tuple(marks)


def patterns(looks: Collection[MarkStyle]) -> list[ElementTree.Element]:
    """Patterns of gradients, copies back, and waits, if ``looks`` contains them."""
    hatching = 4, "M-1 1L1 -1M0 4L4 0M3 5L5 3"
    shapes = {
        MarkStyle.GRADIENT: hatching,
        MarkStyle.BACK: hatching,
        MarkStyle.WAIT: (3, "M1 1h1v1h-1z"),
    }
    return [
        pattern(look.name.lower(), size, size, "white", marks, _COLOURS[look])
        for look, (size, marks) in shapes.items()
        if look in looks
    ]


def draw_lanes(
    canvas: Canvas,
    marks: Sequence[Mark],
    x: Callable[[float], float],
    tops: Sequence[float],
    bar: float,
    arrows: bool,
) -> None:
    """Draw the marks below bars that begin at ``tops`` and are ``bar`` high.

    With ``arrows`` lines lead to the devices where messages arrive.
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
            if mark.look is MarkStyle.GRADIENT:
                line.set("stroke-dasharray", "3 1.5")


def draw_mark(
    canvas: Canvas,
    look: MarkStyle,
    left: float,
    top: float,
    width: float,
    within: ElementTree.Element | None = None,
) -> ElementTree.Element:
    """Draw one mark."""
    fill = _FILLED.get(look, f"url(#{look.name.lower()})")
    shape = canvas.add("rect", within, x=left, y=top, width=width, height=HEIGHT, fill=fill)
    shape.set("class", "mark")
    if width > 2:
        shape.set("stroke", _COLOURS[look])
        shape.set("stroke-width", "0.5")
    return shape
