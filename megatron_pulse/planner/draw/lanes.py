"""Below the bars of a timeline's device: a lane of what it sends, or of what it waits for.

Sent activations are filled, gradients hatched, waiting dotted, so that no colour is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from xml.etree import ElementTree

from megatron_pulse.planner.draw.canvas import Canvas
from megatron_pulse.planner.observe.trace import TimedWait
from megatron_pulse.planner.schedule.operations import Kind
from megatron_pulse.planner.step.replay import Transfer

HEIGHT = 8.0
LINK = "#b3261e"


class Look(StrEnum):
    """What a mark in a lane is."""

    ACTIVATION = "sends activations"
    GRADIENT = "sends gradients"
    WAIT = "waits for a message"


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


def define(definitions: ElementTree.Element, looks: Collection[Look]) -> None:
    """The hatching of gradients and the dots of waiting, where they are used."""
    for look, size, shape in (
        (Look.GRADIENT, "4", "M-1 1L1 -1M0 4L4 0M3 5L5 3"),
        (Look.WAIT, "3", "M1 1h1v1h-1z"),
    ):
        if look not in looks:
            continue
        pattern = ElementTree.SubElement(definitions, "pattern", id=look.name.lower())
        pattern.set("patternUnits", "userSpaceOnUse")
        for name in ("width", "height"):
            pattern.set(name, size)
        ElementTree.SubElement(pattern, "rect", width=size, height=size, fill="white")
        colour = LINK if look is Look.GRADIENT else "#444444"
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
    for mark in marks:
        left, right = x(mark.start), x(mark.end)
        top = tops[mark.device] + bar + 1.5
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
    fill = "#e79a92" if look is Look.ACTIVATION else f"url(#{look.name.lower()})"
    shape = canvas.add("rect", within, x=left, y=top, width=width, height=HEIGHT, fill=fill)
    shape.set("class", "mark")
    if width > 2:
        shape.set("stroke", "#777777" if look is Look.WAIT else LINK)
        shape.set("stroke-width", "0.5")
    return shape
