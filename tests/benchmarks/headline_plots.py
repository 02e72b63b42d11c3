"""Plots of ``claim``: throughput against bandwidth, and what else each contestant costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from megatron_pulse.files import replacing
from tests.benchmarks.contestant import Engine
from tests.benchmarks.headline_data import Cell, Row

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
    """throughput and costs, as PNG and SVG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(map(_title, cells)))
    if not names:
        return
    drawn = [label for label in LINES if any(_find(cell, label) for cell in cells)]
    for file, figure in (
        ("throughput", _throughput(plt, names, cells, drawn)),
        ("costs", _costs(plt, names, cells, drawn)),
    ):
        for suffix in ("png", "svg"):
            with replacing(out / f"{file}.{suffix}") as beside:
                figure.savefig(beside, dpi=120)
        plt.close(figure)


def _title(cell: Cell) -> str:
    """What a column of plots is of."""
    cap = f", {cell.memory_gb:g} GB" if cell.memory_gb else ""
    return f"{cell.backbone}, batch {cell.samples}{cap}"


def _find(cell: Cell, label: str) -> Row | None:
    if label == PICK:
        return cell.ours
    found = [r for r in cell.rows if label in (r.name, r.engine)]
    return min(found, key=lambda r: r.median_s, default=None)


def _throughput(
    plt: object, names: Sequence[str], cells: Sequence[Cell], drawn: Sequence[str]
) -> object:
    figure, axes = plt.subplots(  # type: ignore[attr-defined]
        1, len(names), figsize=(3.4 * len(names) + 0.6, 4.4), squeeze=False, layout="constrained"
    )
    for axis, name in zip(axes[0], names, strict=True):
        mine = sorted((c for c in cells if _title(c) == name), key=lambda c: c.rate)
        for label in drawn:
            colour, marker = LINES[label]
            points = [
                (c.rate, row.faster_than(base))
                for c in mine
                if (row := _find(c, label)) and (base := c.base)
            ]
            if not points:
                continue
            rates = [rate for rate, _ in points]
            middle = [ratio[0] for _, ratio in points]
            spread = [
                [ratio[0] - ratio[1] for _, ratio in points],
                [ratio[2] - ratio[0] for _, ratio in points],
            ]
            axis.errorbar(
                rates,
                middle,
                spread,
                color=colour,
                marker=marker,
                markersize=5,
                linewidth=2 if label == PICK else 1,
                capsize=2,
                label=label,
                zorder=3 if label == PICK else 2,
            )
        axis.set_xscale("log")
        ticks = [c.rate for c in mine]
        axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
        axis.minorticks_off()
        axis.invert_xaxis()
        axis.set_ylim(bottom=0)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("GB/s of a device's link")
        axis.grid(alpha=0.25)
    axes[0][0].set_ylabel("throughput over Megatron 1F1B, skips relayed")
    handles, labels = axes[0][0].get_legend_handles_labels()
    columns = 2 * min(2, len(names))
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, fontsize=9, frameon=False
    )
    figure.suptitle("from compute-bound to communication-bound", fontsize=12)
    return figure


def _costs(
    plt: object, names: Sequence[str], cells: Sequence[Cell], drawn: Sequence[str]
) -> object:
    measures: tuple[tuple[str, Callable[[Row], float]], ...] = (
        ("MB per sample", lambda r: r.wire_mb),
        ("bubble", lambda r: r.bubble),
        ("GB of memory", lambda r: r.memory_gb),
    )
    figure, axes = plt.subplots(  # type: ignore[attr-defined]
        3, len(names), figsize=(2.7 * len(names) + 2.6, 7), squeeze=False, layout="constrained"
    )
    labels = list(drawn)
    for column, name in enumerate(names):
        mine = [c for c in cells if _title(c) == name]
        rate = median(sorted(c.rate for c in mine)[: (len(mine) + 1) // 2 * 2 - 1])
        cell = next(c for c in mine if c.rate == rate)
        for line, (title, value) in enumerate(measures):
            axis = axes[line][column]
            rows = [_find(cell, label) for label in labels]
            axis.barh(
                range(len(labels)),
                [value(row) if row else 0.0 for row in rows],
                color=[LINES[label][0] for label in labels],
            )
            for y, row in enumerate(rows):
                if row:
                    axis.text(value(row), y, f" {value(row):.3g}", va="center", fontsize=7)
            axis.invert_yaxis()
            axis.margins(x=0.22)
            axis.set_yticks(range(len(labels)), labels if column == 0 else [], fontsize=8)
            axis.tick_params(axis="x", labelsize=8)
            axis.set_xlabel(title, fontsize=9)
            if line == 0:
                axis.set_title(f"{name}, {rate:g} GB/s", fontsize=8)
    return figure
