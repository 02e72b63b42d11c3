"""An SVG picture to which shapes and texts are added."""

from __future__ import annotations

import math
from collections.abc import Iterable
from xml.etree import ElementTree

from megatron_pulse.fonts import printable

INK, GREY, FAINT = "#222222", "#555555", "#e4e4e4"

Colour = tuple[int, int, int]


def mixed(light: Colour, dark: Colour, share: float) -> str:
    """Colour between ``light`` and ``dark``, with this share of the second."""
    parts = (round(a + share * (b - a)) for a, b in zip(light, dark, strict=True))
    return "#" + "".join(f"{value:02x}" for value in parts)


def pattern(
    name: str, size: int, height: float, fill: str, marks: str, colour: str
) -> ElementTree.Element:
    """SVG pattern of a filled column, ``size`` wide and ``height`` high.

    The path ``marks`` repeats in each of its squares.
    """
    made = ElementTree.Element(
        "pattern", id=name, width=f"{size}", height=f"{height:g}", patternUnits="userSpaceOnUse"
    )
    ElementTree.SubElement(made, "rect", width=f"{size}", height=f"{height:g}", fill=fill)
    for top in range(0, math.ceil(height), size) if marks else ():
        path = ElementTree.SubElement(made, "path", d=marks, fill="none", stroke=colour)
        path.set("transform", f"translate(0 {top})")
    return made


class Canvas:
    """A white picture of this size; coordinates are pixels from the upper left corner."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self.svg = ElementTree.Element(
            "svg",
            xmlns="http://www.w3.org/2000/svg",
            width=f"{width:g}",
            height=f"{height:g}",
            viewBox=f"0 0 {width:g} {height:g}",
        )
        self.svg.set("font-family", "Helvetica, Arial, sans-serif")
        self.svg.set("font-size", "11")
        self.add("rect", x=0, y=0, width=width, height=height, fill="white")

    def define(self, elements: Iterable[ElementTree.Element]) -> None:
        """Add definitions, as of patterns."""
        self.add("defs").extend(elements)

    def heading(self, x: float, title: str, subtitle: str) -> None:
        """Add the title, and below it a line in grey."""
        self.text(x, 26, title, size=17, weight="bold")
        if subtitle:
            self.text(x, 45, subtitle, size=12, fill=GREY)

    def add(
        self, tag: str, within: ElementTree.Element | None = None, /, **attributes: str | float
    ) -> ElementTree.Element:
        """Add an element, to the group ``within`` if given; ``stroke_width`` becomes
        stroke-width."""
        written = {
            key.rstrip("_").replace("_", "-"): value
            if isinstance(value, str)
            else f"{value:.2f}".rstrip("0").rstrip(".")
            for key, value in attributes.items()
        }
        return ElementTree.SubElement(self.svg if within is None else within, tag, written)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: int = 11,
        fill: str = INK,
        weight: str = "normal",
        anchor: str = "start",
        halo: bool = False,
    ) -> None:
        """Add a line of text on the baseline ``y``; with ``halo`` lines below it fade."""
        element = self.add("text", x=x, y=y, fill=fill)
        if halo:
            element.set("stroke", "white")
            element.set("stroke-width", "4")
            element.set("stroke-opacity", "0.8")
            element.set("paint-order", "stroke")
        element.set("font-size", str(size))
        element.set("font-weight", weight)
        element.set("text-anchor", anchor)
        element.text = printable(text)

    def hint(self, element: ElementTree.Element, text: str) -> None:
        """Add a tooltip to ``element``."""
        ElementTree.SubElement(element, "title").text = printable(text)

    def __str__(self) -> str:
        return ElementTree.tostring(self.svg, encoding="unicode") + "\n"
