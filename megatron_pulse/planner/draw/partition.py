"""Picture of a partition (SVG): devices as rows, units as bars, skips as arcs.

The chain runs from left to right through the rows of the devices that host it. A fold therefore
goes down to the turn and up again, and a collocated skip is an arc within its row. Shades go from
light (first unit) to dark (last), and routed skips are thick, so the picture is readable in grey.
"""

from __future__ import annotations

import itertools

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.format import in_mb, in_ms
from megatron_pulse.planner.draw.canvas import FAINT, GREY, INK, Canvas, mixed
from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.partition.evaluate import Evaluation

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 1200.0, 82.0, 210.0, 62.0, 52.0
_CHAIN = _WIDTH - _LEFT - _RIGHT
_BAR = 22.0
_LABELS = 30.0  # two lines of text below the bars of a row
_SHADES = ((0xF9, 0xE2, 0x8A), (0x5C, 0xB5, 0x8C), (0x1F, 0x3B, 0x73))
_CHAIN_LINE = {"stroke": GREY, "stroke_dasharray": "3 2"}
_HOME = {"fill": "none", "stroke": "#8c8c8c", "stroke_width": "0.8"}
_TRAVEL = {"fill": "none", "stroke": "#d1193e", "stroke_width": "1.8"}


def draw_partition(
    costs: ChainCosts, partition: Partition, found: Evaluation, title: str, subtitle: str = ""
) -> str:
    """Draw ``partition`` as SVG text; ``found`` is its evaluation.

    A unit's bar is as wide as its forward and backward time, plus a margin that keeps it visible.
    Tooltips of bars and arcs show names and figures.
    """
    return _Drawing(costs, partition, found).draw(title, subtitle)


class _Drawing:
    def __init__(self, costs: ChainCosts, partition: Partition, found: Evaluation) -> None:
        self.costs, self.partition, self.found = costs, partition, found
        self.devices = partition.placement.num_devices
        self.row = max(74.0, min(124.0, 760.0 / self.devices))
        self.height = _TOP + self.row * self.devices + _BOTTOM
        times = [f + b for f, b in zip(costs.forward_s, costs.backward_s, strict=True)]
        self.times = times
        whole, least = sum(times), min(1.0, _CHAIN / (2 * len(times)))
        even = _CHAIN / len(times)
        scale = (_CHAIN - least * len(times)) / whole if whole else 0.0
        widths = [least + scale * time if whole else even for time in times]
        self.edges = list(itertools.accumulate(widths, initial=_LEFT))
        self.home = [partition.device_of_layer(i) for i in range(len(times))]
        self.canvas = Canvas(_WIDTH, self.height)

    def draw(self, title: str, subtitle: str) -> str:
        self.canvas.heading(_LEFT, title, subtitle)
        self._rows()
        self._handovers()
        self._units()
        self._skips()
        self._stages()
        self._loads()
        self._legend()
        return str(self.canvas)

    def _bar_top(self, device: int) -> float:
        return _TOP + self.row * (device + 1) - _LABELS - _BAR

    def _centre(self, layer: int) -> float:
        return (self.edges[layer] + self.edges[layer + 1]) / 2

    def _rows(self) -> None:
        for device in range(self.devices):
            top = _TOP + self.row * device
            if device % 2 == 0:
                self.canvas.add("rect", x=0, y=top, width=_WIDTH, height=self.row, fill="#f6f6f6")
            middle = self._bar_top(device) + _BAR / 2
            self.canvas.text(12, middle + 4, f"device {device}", size=13, weight="bold")
            end = _LEFT + _CHAIN
            self.canvas.add("line", x1=_LEFT, y1=middle, x2=end, y2=middle, stroke=FAINT)

    def _handovers(self) -> None:
        """Lines where the chain continues in another row."""
        placed, cuts = self.partition.placement.device_of_stage, self.partition.cuts
        for stage, (one, other) in enumerate(itertools.pairwise(placed), start=1):
            if one == other:
                continue
            x = self.edges[cuts[stage]]
            y1, y2 = (self._bar_top(d) + _BAR / 2 for d in (one, other))
            size = self.costs.boundary_bytes[cuts[stage]]
            line = self.canvas.add("line", x1=x, y1=y1, x2=x, y2=y2, **_CHAIN_LINE)
            self.canvas.hint(line, f"stage {stage - 1} to {stage}: {in_mb(size)} each way")

    def _units(self) -> None:
        for i, name in enumerate(self.costs.names):
            bar = self.canvas.add(
                "rect",
                x=self.edges[i],
                y=self._bar_top(self.home[i]),
                width=self.edges[i + 1] - self.edges[i],
                height=_BAR,
                fill=_shade(i / max(1, len(self.home) - 1)),
                stroke="white",
                stroke_width=0.4,
                class_="unit",
            )
            self.canvas.hint(
                bar,
                f"{name}: forward {in_ms(self.costs.forward_s[i], 3)}, backward "
                f"{in_ms(self.costs.backward_s[i], 3)}, {self.costs.parameters[i] / 1e6:.3g} M "
                "parameters",
            )

    def _skips(self) -> None:
        """Arcs of skips, collocated ones first, so that routed ones lie over them."""
        span = max((s.destination - s.source for s in self.costs.skips), default=1)
        for skip in sorted(self.costs.skips, key=lambda s: self._travels(s.source, s.destination)):
            one, other = self.home[skip.source], self.home[skip.destination]
            x1, x2 = self._centre(skip.source), self._centre(skip.destination)
            y1, y2 = self._bar_top(one), self._bar_top(other)
            travels = one != other
            room = self.row - _LABELS - _BAR - 4
            lift = room * (0.3 + 0.7 * (skip.destination - skip.source) / span) / 0.75
            top, bend = min(y1, y2) - lift, 0.12 * (x2 - x1)
            arc = self.canvas.add(
                "path",
                d=f"M{x1:.1f} {y1:.1f}C{x1 + bend:.1f} {top:.1f} {x2 - bend:.1f} {top:.1f} "
                f"{x2:.1f} {y2:.1f}",
                **(_TRAVEL if travels else _HOME),
                class_="skip travels" if travels else "skip home",
            )
            self.canvas.hint(
                arc,
                f"{self.costs.names[skip.source]} to {self.costs.names[skip.destination]}: "
                f"{in_mb(skip.num_bytes)}, "
                + (f"device {one} to {other}" if travels else f"stays on device {one}"),
            )

    def _travels(self, source: int, destination: int) -> bool:
        return self.home[source] != self.home[destination]

    def _stages(self) -> None:
        """A frame for each stage, and below it the text that fits, clear of other lines."""
        placed, cuts = self.partition.placement.device_of_stage, self.partition.cuts
        crossed = [
            (self.edges[cuts[s]], *sorted((placed[s - 1], placed[s])))
            for s in range(1, len(placed))
        ]
        for device in range(self.devices):
            stages = self.partition.placement.stages_of_device(device)
            spans = [(self.edges[cuts[s]], self.edges[cuts[s + 1]]) for s in stages]
            borders = [(a[1] + b[0]) / 2 for a, b in itertools.pairwise(spans)]
            lines = [x for x, upper, lower in crossed if upper <= device < lower]
            top = self._bar_top(device)
            for k, (stage, (left, right)) in enumerate(zip(stages, spans, strict=True)):
                self.canvas.add(
                    "rect",
                    x=left,
                    y=top,
                    width=right - left,
                    height=_BAR,
                    fill="none",
                    stroke=INK,
                )
                low, high = [_LEFT, *borders, _LEFT + _CHAIN][k : k + 2]
                stops = sorted([low, high, *(x for x in lines if low < x < high)])
                self._label(stage, (left + right) / 2, list(itertools.pairwise(stops)), top + _BAR)

    def _label(
        self, stage: int, centre: float, rooms: list[tuple[float, float]], below: float
    ) -> None:
        """The longest text that fits into one of ``rooms``, as near ``centre`` as possible."""
        layers = self.partition.layers_of_stage(stage)
        names = [self.costs.names[i] for i in layers]
        ends = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        units = f"{len(names)} unit{'s' * (len(names) > 1)}"
        took = in_ms(sum(self.times[i] for i in layers), 3)
        for texts in (
            (f"stage {stage}: {units}, {took}", ends),
            (f"stage {stage}", took),
            (str(stage), ""),
        ):
            half = max(0.28 * 11 * len(texts[0]), 0.28 * 10 * len(texts[1])) + 3
            places = [
                min(max(centre, low + half), high - half)
                for low, high in rooms
                if 2 * half <= high - low
            ]
            if places:
                x = min(places, key=lambda place: abs(place - centre))
                self.canvas.text(x, below + 12, texts[0], size=11, anchor="middle", halo=True)
                self.canvas.text(x, below + 24, texts[1], 10, "#666666", anchor="middle", halo=True)
                return

    def _loads(self) -> None:
        """Computing and communication time of each device at the right, with the mean."""
        begin, room = _LEFT + _CHAIN + 20, _RIGHT - 110
        loads, compute = self.found.load_s, self.found.compute_s
        largest = max(loads) or 1.0
        mean = sum(compute) / len(compute)
        self.canvas.text(begin, _TOP - 6, "load: compute and send", size=11, fill=GREY)
        for device, (load, part) in enumerate(zip(loads, compute, strict=True)):
            top, full = self._bar_top(device), room * load / largest
            width = room * part / largest
            self.canvas.add("rect", x=begin, y=top, width=width, height=_BAR, fill="#666666")
            self.canvas.add(
                "rect", x=begin + width, y=top, width=full - width, height=_BAR, fill="#c4c4c4"
            )
            self.canvas.text(begin + room + 8, top + _BAR / 2 + 4, in_ms(load, 3), size=12)
            x = begin + room * mean / largest
            mark = self.canvas.add("line", x1=x, y1=top - 5, x2=x, y2=top + _BAR, stroke=INK)
            self.canvas.hint(mark, f"mean compute time {in_ms(mean, 3)}")
            share = f"computes {part / mean:.2f} of the mean" if mean else ""
            self.canvas.text(begin, top + _BAR + 12, share, size=10, fill="#666666")

    def _legend(self) -> None:
        y, x = self.height - 26, _LEFT
        self.canvas.text(x, y + 4, "first unit", size=11)
        for k in range(40):
            self.canvas.add(
                "rect", x=x + 56 + 3 * k, y=y - 6, width=3.2, height=12, fill=_shade(k / 39)
            )
        self.canvas.text(x + 182, y + 4, "last unit", size=11)
        travelling = sum(self._travels(s.source, s.destination) for s in self.costs.skips)
        at_home = len(self.costs.skips) - travelling
        for offset, style, text in (
            (270, _HOME, f"collocated skip ({at_home})"),
            (520, _TRAVEL, f"routed skip ({travelling})"),
        ):
            self.canvas.add("path", d=f"M{x + offset} {y + 5}q18 -16 36 0", **style)
            self.canvas.text(x + offset + 44, y + 4, text, size=11)
        self.canvas.add("line", x1=x + 720, y1=y, x2=x + 756, y2=y, **_CHAIN_LINE)
        self.canvas.text(x + 764, y + 4, "the chain continues", size=11)


def _shade(depth: float) -> str:
    """Colour at ``depth`` of the chain, 0 to 1; darker with depth."""
    at = depth * (len(_SHADES) - 1)
    k = min(int(at), len(_SHADES) - 2)
    return mixed(_SHADES[k], _SHADES[k + 1], at - k)
