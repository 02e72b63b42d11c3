"""Table, verdicts and plots of what ``claim`` measured; every figure is from results.json."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from megatron_pulse.files import replacing
from tests.benchmarks.contestant import Engine
from tests.benchmarks.headline_data import Cell, Row, all_rows, cells_of
from tests.benchmarks.headline_volumes import PAPER, Moved

PLAIN = "sequential direct, 1F1B"

EXPLAINED = """\
Ranks are processes in network namespaces; every operation sleeps its V100 profile's time (analytic,
half precision), and tensors travel over links limited by tbf. Both are scaled so that communication
over computing is as on V100s with links of the given GB/s for each device: 10 is what the paper
gives between nodes, 2.5 and 1.25 are that shared by 4 and by all 8 devices of a node. `samples/s`
and MB are those of the real backbone on P devices; `batch` is the samples of a step. `ours` is what
the tuner picked beforehand. `MB/sample` is what the kernel counted on all interfaces, `own` the
contestant's own count of its payload. `GB` is the memory of the fullest rank: activations, with
skips that only pass through, gathered parameters, and parameters, gradients and optimizer
(`state`). `simulated %` is the predicted step over the measured one, less one. An optimizer step is
not in it. Megatron and torch relay skips in one tensor with the boundary, each with the partition
that is best for that and for the link."""

UNCAPPED = """\
Without a cap what does not fit is run all the same. The tuner picked for V100s of 32 GB, of which
28.8 (90 %) count as usable, or of as much as Megatron's 1F1B needs where nothing fits that."""

CAPPED = """\
Every device has as much memory as `cap` says, of which 90 % count as usable: what needs more, by
the profile's figures, does not run. Of the rest each runs at its best by its prediction: pipelines
with the usual microbatch, half or twice that, all recomputed, what is cheap of it, or nothing (what
relays skips each of these that is near); DDP, FSDP2 and HSDP with a quarter of the usual microbatch
to all that a device has of the batch, as few layers recomputed as fit, or what is cheap of them,
and parameters gathered and gradients reduced as often as is best. The batch is the same for all."""


def write_report(results: Mapping[str, Any], out: Path) -> str:
    """Write report.md and the plots into ``out``; returns the report."""
    from tests.benchmarks.headline_plots import draw

    cells = cells_of(results)
    moved = [Moved(**record) for record in results["volumes"]]
    text = "\n\n".join(
        [
            "# The claim, measured",
            EXPLAINED,
            *([CAPPED] if any(c.memory_gb for c in cells) else []),
            *([UNCAPPED] if not all(c.memory_gb for c in cells) else []),
            f"{platform.machine()}, {len(all_rows(cells))} measurements of "
            f"{min((len(r.seconds) for r in all_rows(cells)), default=0)} repetitions or more.",
            "## Verdicts",
            "\n".join(f"- {line}" for line in verdicts(cells, moved)),
            "## Throughput of ours against the others",
            table(_SUMMARY, map(_summary, cells)),
            "## Where ours is not the fastest",
            "\n".join(f"- {line}" for line in (*losses(cells), *ideal(cells))) or "Nowhere.",
            "## Communication of a sample (MB, exact, balanced stages)",
            table(_VOLUMES, map(_volume, moved)),
            "## All contestants",
            table(_ALL, map(_contestant, all_rows(cells))),
            *_refusals(cells),
            *_passed_over(cells),
        ]
    )
    with replacing(out / "report.md") as beside:
        beside.write_text(text + "\n")
    draw(cells, out)
    return text


def _refusals(cells: Sequence[Cell]) -> list[str]:
    """The section of what does not fit."""
    rows = [
        (*_where(c), r["contestant"], r["way"], f"{r['needs_bytes'] / 1e9:.1f}")
        for c in cells
        for r in c.refused
    ]
    return ["## What does not fit", table(_REFUSED, rows)] if rows else []


def _passed_over(cells: Sequence[Cell]) -> list[str]:
    """The section of what was predicted to be too slow to be run (``--within``)."""
    rows = [
        (*_where(c), name, f"{c.samples * c.time_scale / seconds:.1f}")
        for c in cells
        for name, seconds in c.passed_over.items()
    ]
    return ["## What was not run", table(_PASSED_OVER, rows)] if rows else []


def verdicts(cells: Sequence[Cell], moved: Sequence[Moved]) -> Iterator[str]:
    """What the claim says, and what was found."""
    paper = [m for m in moved if m.backbone in PAPER]
    if paper:
        best = max(paper, key=lambda m: m.reduction)
        each = ", ".join(
            f"{name} " + " / ".join(f"{100 * m.reduction:.1f}" for m in paper if m.backbone == name)
            for name in PAPER
        )
        yield (
            f"communication per sample against relayed 1F1B, P = 2 / 4 / 8: {each} % less. "
            f">= 89 %: {_reached(best.reduction >= 0.89)} ({best.backbone}, P = "
            f"{best.num_devices}: {best.best:.1f} against {best.relay:.1f} MB)"
        )
    skips = [c for c in cells if c.num_skips and c.ours is not None]
    ratios = [
        (c.ours.faster_than(base)[0], c)
        for c in skips
        if c.ours is not None and (base := c.base) is not None
    ]
    if ratios:
        ratio, cell = max(ratios, key=lambda pair: pair[0])
        slowest = min(c.rate for c in skips)
        bound = ", ".join(
            f"{c.backbone} ({c.samples}) {r:.2f}" for r, c in ratios if c.rate == slowest
        )
        yield (
            f"throughput against Megatron's 1F1B with relayed skips: up to {ratio:.2f} times "
            f"({_words(cell)}); at {slowest:g} GB/s: {bound}. >= 2.3 times "
            f"somewhere: {_reached(ratio >= 2.3)}; on every skip backbone at that rate: "
            f"{_reached(min(r for r, c in ratios if c.rate == slowest) >= 2.3)}"
        )
        ahead = [c for c in skips if _ahead(c)]
        yield (
            "ahead of every other contestant, or the tuner picked it: "
            f"{len(ahead)} of {len(skips)} cells with skips"
        )
    rows = all_rows(cells)
    if rows:
        errors = sorted(abs(r.error) for r in rows)
        own = sorted(abs(r.error) for r in rows if r.engine == Engine.OURS.value)
        yield (
            f"simulator against measured step: median error {100 * median(errors):.1f} % over all "
            f"{len(rows)} ({100 * median(own):.1f} % over our {len(own)}), 90th percentile "
            f"{100 * errors[int(0.9 * (len(errors) - 1))]:.1f} %. <= 10 %: "
            f"{_reached(median(errors) <= 0.1)}"
        )
        plain = [
            (own.median_s / base.median_s, c)
            for c in cells
            if not c.num_skips
            and (own := c.row(PLAIN)) is not None
            and (base := c.base) is not None
        ]
        if plain:
            ratio, cell = max(plain, key=lambda pair: pair[1].rate)
            yield (
                f"our executor with 1F1B on {_words(cell)} (no skips): "
                f"{ratio:.3f} of the time of Megatron's own 1F1B. Within 3 %: "
                f"{_reached(ratio <= 1.03)}"
            )
        shares = sorted(r.wire_mb / r.counted_mb - 1 for r in rows if r.counted_mb)
        yield (
            "bytes by the kernel's counters over the executor's own count: "
            f"{100 * shares[0]:+.1f} to {100 * shares[-1]:+.1f} % (headers, acknowledgements, "
            "gloo's handshakes)"
        )


def losses(cells: Sequence[Cell]) -> Iterator[str]:
    """Cells in which another contestant, or another way of ours, was faster than the pick."""
    for cell in cells:
        ours = cell.ours
        if ours is None:
            yield f"{_words(cell)}: the tuner found nothing that fits"
            continue
        for row in cell.rows:
            if row.median_s < 0.99 * ours.median_s:
                yield (
                    f"{_words(cell)}: {row.name} takes "
                    f"{100 * (1 - row.median_s / ours.median_s):.0f} % less time than ours "
                    f"({ours.name}); it moves {row.wire_mb:.1f} MB a sample against "
                    f"{ours.wire_mb:.1f}, bubble {row.bubble:.2f} against {ours.bubble:.2f}, "
                    f"{row.memory_gb:.1f} GB against {ours.memory_gb:.1f}"
                )


def ideal(cells: Sequence[Cell]) -> Iterator[str]:
    """Cells in which data parallelism would be faster if collectives were ideal."""
    for cell in cells:
        ours = cell.ours
        ddp = min(cell.wholes, key=lambda r: r.predicted_s, default=None)
        if ours is None or ddp is None or ddp is ours or ddp.predicted_s >= ours.predicted_s:
            continue
        yield (
            f"{_words(cell)}: {ddp.name} with ideal collectives would take "
            f"{100 * (1 - ddp.predicted_s / ours.predicted_s):.0f} % less than ours is predicted "
            f"to; it needs {ddp.memory_gb:.1f} GB on each device, ours {ours.memory_gb:.1f}"
        )


def _ahead(cell: Cell) -> bool:
    ours, rival = cell.ours, cell.rival
    return ours is not None and rival is not None and ours.median_s <= rival.median_s


def _reached(holds: bool) -> str:
    return "reached" if holds else "NOT reached"


_WHERE = ("backbone", "batch", "cap GB", "GB/s")


def _where(cell: Cell) -> Sequence[str]:
    cap = f"{cell.memory_gb:g}" if cell.memory_gb else "-"
    return cell.backbone, str(cell.samples), cap, f"{cell.rate:g}"


def _words(cell: Cell) -> str:
    return ", ".join([cell.backbone, f"batch {cell.samples}", f"{cell.rate:g} GB/s"])


_SUMMARY = (
    *_WHERE,
    "ours (tuner's pick)",
    "samples/s",
    "x Megatron 1F1B (spread)",
    "fastest other",
    "x fastest other (spread)",
    "DDP, FSDP2 or HSDP, samples/s",
    "MB/sample ours, 1F1B",
    "GB ours, 1F1B",
)


def _summary(cell: Cell) -> Sequence[str]:
    ours, rival, base = cell.ours, cell.rival, cell.base
    if ours is None or rival is None or base is None:
        return (*_where(cell), *["-"] * (len(_SUMMARY) - len(_WHERE)))
    config = cell.pick["config"].split(", ", 1)[-1] if cell.pick else f"{ours.name} (predicted)"
    whole = cell.whole
    return (
        *_where(cell),
        config,
        f"{ours.samples_per_s:.1f}",
        _ratio(ours.faster_than(base)),
        rival.name,
        _ratio(ours.faster_than(rival)),
        f"{whole.engine} {whole.samples_per_s:.1f}" if whole is not None else "-",
        f"{ours.wire_mb:.1f}, {base.wire_mb:.1f}",
        f"{ours.memory_gb:.1f}, {base.memory_gb:.1f}",
    )


def _ratio(values: tuple[float, float, float]) -> str:
    middle, low, high = values
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


_REFUSED = (*_WHERE, "contestant", "how", "GB needed")

_PASSED_OVER = (*_WHERE, "contestant", "samples/s, predicted")

_ALL = (
    *_WHERE,
    "contestant",
    "how",
    "samples/s",
    "spread %",
    "MB/sample",
    "own",
    "bubble",
    "GB",
    "state",
    "simulated %",
)


def _contestant(row: Row) -> Sequence[str]:
    spread = (max(row.seconds) - min(row.seconds)) / row.median_s
    return (
        *_where(row.cell),
        row.name + (f" [{row.solver}]" if "ILP" in row.name else ""),
        row.way or "-",
        f"{row.samples_per_s:.1f}",
        f"{100 * spread:.1f}",
        f"{row.wire_mb:.1f}",
        f"{row.counted_mb:.1f}",
        f"{row.bubble:.2f}",
        f"{row.memory_gb:.1f}",
        f"{row.state_gb:.1f}",
        f"{100 * row.error:+.1f}",
    )


_VOLUMES = (
    "backbone",
    "P",
    "fold exact",
    "fold soft",
    "relayed 1F1B",
    "less %",
    "relayed interleaved",
    "direct",
    "paper: PULSE, 1F1B (its P)",
)


def _volume(m: Moved) -> Sequence[str]:
    paper = PAPER.get(m.backbone)
    return (
        m.backbone,
        str(m.num_devices),
        f"{m.fold_exact:.1f}" if m.fold_exact is not None else "-",
        f"{m.fold_soft:.1f}",
        f"{m.relay:.1f}",
        f"{100 * m.reduction:.1f}",
        f"{m.interleaved_relay:.1f}",
        f"{m.direct:.1f}",
        f"{paper[0]}, {paper[1]} ({100 * (1 - paper[0] / paper[1]):.1f} % less)" if paper else "",
    )


def table(head: Sequence[str], rows: Any) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
