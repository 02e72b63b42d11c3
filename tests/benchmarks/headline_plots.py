"""Plot of ``headline``: throughput against bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_pulse.files import replacing
from tests.benchmarks.contestant import Engine
from tests.benchmarks.headline_report import Cell, Row

PICK = "ours, tuned"
LINES = {
    PICK: ("#c1272d", "o"),
    "fold exact": ("#e8743b", "v"),
    "sequential direct, 1F1B": ("#b58900", "s"),
    Engine.MEGATRON_1F1B.value: ("#222222", "x"),
    Engine.MEGATRON_INTERLEAVED.value: ("#777777", "+"),
    Engine.TORCH_INTERLEAVED.value: ("#1f78b4", "d"),
    Engine.TORCH_ZBV.value: ("#6a3d9a", "^"),
    Engine.DATA_PARALLEL.value: ("#2a9d5c", "p"),
    Engine.FSDP2.value: ("#00a6c8", "*"),
    Engine.HSDP.value: ("#8c510a", "h"),
}
"""What is drawn, by name without details, or the fastest of an engine; colour and marker."""


def draw(cells: Sequence[Cell], out: Path) -> None:
    """Draw a panel for each backbone, as PNG and SVG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels: dict[str, list[Cell]] = {}
    for cell in sorted(cells, key=lambda c: c.rate):
        cap = f", {cell.memory_gb:g} GB" if cell.memory_gb else ""
        panels.setdefault(f"{cell.backbone}, batch {cell.samples}{cap}", []).append(cell)
    if not panels:
        return
    size = 3.4 * len(panels) + 0.6, 4.4
    figure, axes = plt.subplots(
        1, len(panels), figsize=size, squeeze=False, layout="constrained"
    )  # fmt: skip
    for axis, (title, mine) in zip(axes[0], sorted(panels.items()), strict=True):
        for label, (colour, marker) in LINES.items():
            points = [
                (cell.rate, row.faster_than(cell.base))
                for cell in mine
                if (row := _find(cell, label)) and cell.base
            ]
            if points:
                middle, low, high = zip(*(ratios for _, ratios in points), strict=True)
                below = [m - least for m, least in zip(middle, low, strict=True)]
                above = [most - m for m, most in zip(middle, high, strict=True)]
                axis.errorbar(
                    [rate for rate, _ in points], middle, [below, above],
                    color=colour, marker=marker, markersize=5, capsize=2, label=label,
                    linewidth=2 if label == PICK else 1, zorder=3 if label == PICK else 2,
                )  # fmt: skip
        axis.set_xscale("log")
        axis.set_xticks([c.rate for c in mine], [f"{c.rate:g}" for c in mine])
        axis.minorticks_off()
        axis.invert_xaxis()
        axis.set_ylim(bottom=0)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("GB/s of a device's link")
        axis.grid(alpha=0.25)
    axes[0][0].set_ylabel("throughput over Megatron 1F1B, skips relayed")
    columns = 2 * min(2, len(panels))
    figure.legend(
        *axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=columns,
        fontsize=9, frameon=False,
    )  # fmt: skip
    figure.suptitle("from compute-bound to communication-bound", fontsize=12)
    for suffix in ("png", "svg"):
        with replacing(out / f"throughput.{suffix}") as beside:
            figure.savefig(beside, dpi=120)
    plt.close(figure)


def _find(cell: Cell, label: str) -> Row | None:
    if label == PICK:
        return cell.ours
    found = [r for r in cell.rows if label in (r.name, r.engine)]
    return min(found, key=lambda r: r.median_s, default=None)
