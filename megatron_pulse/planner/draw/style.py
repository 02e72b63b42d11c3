"""Style of operations in pictures: shade, pattern and stripe, so that no colour is needed."""

from __future__ import annotations

from xml.etree import ElementTree

from megatron_pulse.planner.draw.canvas import mixed, pattern
from megatron_pulse.planner.schedule.operations import BACKWARDS, OpType

NAMES = {
    OpType.FORWARD: "forward",
    OpType.BACKWARD: "backward",
    OpType.INPUT_GRAD: "input gradient",
    OpType.WEIGHT_GRAD: "weight gradient",
    OpType.RECOMPUTE: "recomputation",
    OpType.OFFLOAD: "offload complete",
    OpType.RELOAD: "reload begins",
    OpType.BUBBLE_TASK: "bubble task",
}
"""Names for people."""

MARKS = {
    OpType.WEIGHT_GRAD: (6, "M-1 1L1 -1M0 6L6 0M5 7L7 5", "#7a6420"),
    OpType.RECOMPUTE: (6, "M0 0L6 6M-1 5L1 7M5 -1L7 1", "#5d7d99"),
    OpType.BUBBLE_TASK: (4, "M1 1h1v1h-1z", "#666666"),
}
"""Hatching and dots: size of a square, path in the square, and colour."""

_SHADES = {  # first and last stage of a device
    OpType.FORWARD: ((0xD3, 0xE4, 0xF4), (0xA3, 0xC6, 0xE8)),
    OpType.BACKWARD: ((0x4F, 0x86, 0xB8), (0x1D, 0x4A, 0x7A)),
    OpType.INPUT_GRAD: ((0x4F, 0x86, 0xB8), (0x1D, 0x4A, 0x7A)),
    OpType.WEIGHT_GRAD: ((0xF7, 0xEE, 0xD2), (0xE4, 0xD0, 0x95)),
    OpType.RECOMPUTE: ((0xE6, 0xEF, 0xF7), (0xC2, 0xD6, 0xE8)),
    OpType.OFFLOAD: ((0xDD, 0xEB, 0xDD), (0xBB, 0xD6, 0xBB)),
    OpType.RELOAD: ((0xDD, 0xEB, 0xDD), (0xBB, 0xD6, 0xBB)),
    OpType.BUBBLE_TASK: ((0xEE, 0xEE, 0xEE), (0xDD, 0xDD, 0xDD)),
}
_STRIPE = 4


def tile(kind: OpType, chunk: int, num_chunks: int, height: float) -> ElementTree.Element:
    """SVG pattern of a device's ``chunk``-th stage, called for example ``F0``.

    The pattern is as high as a bar, so that the stripe lies along the bar's top.
    """
    shade = mixed(*_SHADES[kind], chunk / (num_chunks - 1) if num_chunks > 1 else 0.5)
    size, marks, colour = MARKS.get(kind, (6, "", ""))
    made = pattern(f"{kind.value}{chunk}", size, height, shade, marks, colour)
    if chunk % 2:
        stripe = "#f2b84b" if kind in BACKWARDS else "#c4571b"
        ElementTree.SubElement(made, "rect", width=f"{size}", height=f"{_STRIPE}", fill=stripe)
    return made
