"""An SVG picture to which shapes and texts are added."""

from __future__ import annotations

from xml.etree import ElementTree

from megatron_pulse.fonts import printable

INK, GREY, FAINT = "#222222", "#555555", "#e4e4e4"


class Canvas:
    """A picture of this size; coordinates are pixels from the upper left corner."""

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

    def add(
        self, tag: str, within: ElementTree.Element | None = None, **attributes: str | float
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
    ) -> None:
        """Add a line of text on the baseline ``y``."""
        element = self.add("text", x=x, y=y, fill=fill)
        element.set("font-size", str(size))
        element.set("font-weight", weight)
        element.set("text-anchor", anchor)
        element.text = printable(text)

    def hint(self, element: ElementTree.Element, text: str) -> None:
        """Add a tooltip to ``element``."""
        ElementTree.SubElement(element, "title").text = printable(text)

    def __str__(self) -> str:
        return ElementTree.tostring(self.svg, encoding="unicode") + "\n"
