"""Tables and verdicts of what ``headline`` measured; every figure is from results.json."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megatron_pulse.files import replacing
from megatron_pulse.planner.layout.placement import Placement, fold, interleaved, sequential
from megatron_pulse.planner.partition.find import Goal, PartitionError, find_partition
from megatron_pulse.planner.partition.volume import relayed, volume
from tests.benchmarks.contestant import REPLICAS, Engine
from tests.benchmarks.emulation import real_profile, setup_of
from tests.benchmarks.report import table

PLAIN = "sequential direct, 1F1B"
DEVICES = (2, 4, 8)
NAMES = ("sd-v2-4.6b", "uvit-2.7b", "hunyuan-dit-3b", "sdxl", "dit-xl-2")
PAPER = {
    "sd-v2-4.6b": (6.71, 61.05),
    "uvit-2.7b": (24.19, 102.80),
    "hunyuan-dit-3b": (95.29, 916.64),
}
"""MB a sample on V100s: PULSE, and 1F1B with relayed skips (the paper's table)."""

EXPLAINED = """\
Method: tests/benchmarks/README.md. `samples/s` and MB are those of the real backbone, `batch` the
samples of a step, `ours` what the tuner picked beforehand. `MB/sample` is what the kernel counted,
`own` the contestant's own count of its payload. `GB` is the memory of the fullest rank; `state` are
its parameters, gradients and optimizer. `simulated %` is the predicted step over the measured one,
less one. An optimizer step is not in it."""


class Row:
    """A contestant in a cell; seconds are emulated, bytes and rates of the real backbone."""

    def __init__(self, cell: Cell, record: Mapping[str, Any]) -> None:
        real = cell.record["byte_divisor"] / cell.samples / 1e6
        self.cell, self.name, self.engine = cell, record["contestant"], record["engine"]
        self.seconds, self.predicted_s = tuple(record["seconds"]), record["predicted_s"]
        self.wire_mb, self.counted_mb = record["wire_bytes"] * real, record["sent_bytes"] * real
        self.memory_gb, self.state_gb = record["memory_bytes"] / 1e9, record["state_bytes"] / 1e9
        self.bubble, self.solver, self.way = record["bubble"], record["solver"], record.get("way")
        self.median_s = median(self.seconds)
        self.samples_per_s = cell.samples * cell.record["time_scale"] / self.median_s
        self.error = self.predicted_s / self.median_s - 1

    def faster_than(self, other: Row) -> tuple[float, float, float]:
        """Ratio to the throughput of ``other``: median, least and most of repetitions."""
        ratios = sorted(b / a for a, b in zip(self.seconds, other.seconds, strict=True))
        return median(ratios), ratios[0], ratios[-1]


class Cell:
    """A backbone over links of ``rate`` GB/s, with its contestants' rows."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self.record, self.rate, self.backbone = record, record["rate_gbs"], record["backbone"]
        self.samples = record["microbatches"] * record["micro_batch_size"]
        self.memory_gb, self.pick = record.get("memory_gb"), record["pick"]
        self.rows = tuple(Row(self, each) for each in record["results"])
        self.own = [r for r in self.rows if r.engine == Engine.OURS.value]
        others = [r for r in self.rows if r.engine != Engine.OURS.value]
        self.wholes = [r for r in self.rows if r.engine in REPLICAS]
        self.rival = min(others, key=lambda r: r.median_s, default=None)

    def row(self, name: str) -> Row | None:
        """The contestant of that name."""
        return next((r for r in self.rows if r.name == name), None)

    def fastest(self, *engines: str) -> Row | None:
        """The fastest contestant of these engines."""
        found = (r for r in self.rows if r.engine in engines)
        return min(found, key=lambda r: r.median_s, default=None)

    @property
    def base(self) -> Row | None:
        """Megatron's 1F1B, the faster one where it runs with recomputation too."""
        return self.fastest(Engine.MEGATRON_1F1B.value)

    @property
    def ours(self) -> Row | None:
        """Pick of the tuner, without a look at measurements.

        Where nothing fits its devices' memory, ours that is predicted to be the fastest.
        """
        if self.pick:
            return self.row(self.pick["contestant"])
        return min(self.own, key=lambda r: r.predicted_s, default=None)

    @property
    def where(self) -> dict[str, str]:
        """First cells of its rows."""
        cap = f"{self.memory_gb:g}" if self.memory_gb else "-"
        rate = f"{self.rate:g}"
        return {"backbone": self.backbone, "batch": self.samples, "cap GB": cap, "GB/s": rate}

    def __str__(self) -> str:
        return f"{self.backbone}, batch {self.samples}, {self.rate:g} GB/s"


@dataclass(frozen=True)
class Moved:
    """MB of a sample, forward and gradients, over P devices; None where no cut is legal.

    Partitions balance the devices' computing alone (no link), as one who trains would cut.
    """

    backbone: str
    num_devices: int
    fold_exact: float | None
    fold_soft: float
    relay: float
    interleaved_relay: float
    direct: float

    @property
    def best(self) -> float:
        """The fold that moves less."""
        return min(self.fold_soft, self.fold_exact or self.fold_soft)

    @property
    def less(self) -> float:
        """Percentage of the relayed volume that the better fold saves."""
        return 100 * (1 - self.best / self.relay)

    def cells(self) -> dict[str, Any]:
        """Row of the table."""
        row = {"backbone": self.backbone, "P": self.num_devices}
        for name in ("fold_exact", "fold_soft", "relay", "less", "interleaved_relay", "direct"):
            row[name] = value if (value := getattr(self, name)) is None else f"{value:.1f}"
        if self.backbone in PAPER:
            ours, relay = PAPER[self.backbone]
            row["paper: PULSE, 1F1B"] = f"{ours}, {relay} ({100 * (1 - ours / relay):.1f} % less)"
        return row


def volumes() -> list[dict[str, Any]]:
    """Communication of a sample by each way, on the paper's backbones: exact, nothing is run."""
    return [asdict(moved(name, p)) for name in NAMES for p in DEVICES]


def moved(name: str, num_devices: int) -> Moved:
    """One backbone over ``num_devices``."""
    size = setup_of(name).micro_batch_size
    costs = real_profile(name).at(size)

    def total(placement: Placement, collocate: bool = False, relays: bool = False) -> float | None:
        travelling = relayed(costs) if relays else costs
        try:
            cut = find_partition(travelling, placement, Goal(collocate=collocate))
        except PartitionError:
            return None
        return volume(travelling, cut).total / size / 1e6

    row, folded = sequential(num_devices), fold(num_devices)
    return Moved(
        name,
        num_devices,
        total(folded, collocate=True),
        total(folded) or 0.0,
        total(row, relays=True) or 0.0,
        total(interleaved(num_devices), relays=True) or 0.0,
        total(row) or 0.0,
    )


def write_report(results: Mapping[str, Any], out: Path) -> str:
    """Write report.md and the plots into ``out``; returns the report."""
    from tests.benchmarks.headline_plots import draw

    names = list(dict.fromkeys(c["backbone"] for c in results["cells"]))
    order = sorted(map(Cell, results["cells"]), key=lambda c: -c.rate)
    cells = sorted(order, key=lambda c: (names.index(c.backbone), c.record["ranks"], c.samples))
    volumes = [Moved(**record) for record in results["volumes"]]
    rows = [row for cell in cells for row in cell.rows]
    least = min((len(row.seconds) for row in rows), default=0)
    measured = f"{len(rows)} measurements of {least} repetitions or more"
    lost = [*losses(cells), *ideal(cells)] or ["nowhere"]
    refused = [
        {**c.where, "contestant": r["contestant"], "how": r["way"],
         "GB needed": f"{r['needs_bytes'] / 1e9:.1f}"}
        for c in cells for r in c.record.get("refused", ())
    ]  # fmt: skip
    passed_over = [
        {**c.where, "contestant": name,
         "samples/s, predicted": f"{c.samples * c.record['time_scale'] / seconds:.1f}"}
        for c in cells for name, seconds in c.record.get("passed_over", {}).items()
    ]  # fmt: skip
    sections = {
        "The claim, measured": [EXPLAINED, "", f"{platform.machine()}, {measured}."],
        "Verdicts": [f"- {line}" for line in verdicts(cells, volumes)],
        "Throughput of ours against the others": table(map(_summary, cells)),
        "Where ours is not the fastest": [f"- {line}" for line in lost],
        "Communication of a sample (MB, exact, balanced stages)": table(m.cells() for m in volumes),
        "All contestants": table(map(_contestant, rows)),
        "What does not fit": table(refused),
        "What was not run": table(passed_over),
    }  # fmt: skip
    found = [f"## {title}\n\n" + "\n".join(lines) for title, lines in sections.items() if lines]
    text = "\n\n".join(found).removeprefix("#")
    with replacing(out / "report.md") as beside:
        beside.write_text(text + "\n")
    draw(cells, out)
    return text


def verdicts(cells: Sequence[Cell], volumes: Sequence[Moved]) -> Iterator[str]:
    """What the claim says, and what was found."""
    if paper := [m for m in volumes if m.backbone in PAPER]:
        best = max(paper, key=lambda m: m.less)
        each = [
            f"{name} " + " / ".join(f"{m.less:.1f}" for m in paper if m.backbone == name)
            for name in PAPER
        ]
        yield (
            f"communication per sample against relayed 1F1B, P = 2 / 4 / 8: {', '.join(each)} % "
            f"less. >= 89 %: {_reached(best.less >= 89)} ({best.backbone}, P = "
            f"{best.num_devices}: {best.best:.1f} against {best.relay:.1f} MB)"
        )
    skips = [c for c in cells if c.record["num_skips"] and c.ours is not None]
    ratios = [(c.ours.faster_than(c.base)[0], c) for c in skips if c.ours and c.base]
    if ratios:
        ratio, cell = max(ratios, key=lambda pair: pair[0])
        slowest = min(c.rate for c in skips)
        bound = [(r, f"{c.backbone} ({c.samples}) {r:.2f}") for r, c in ratios if c.rate == slowest]
        yield (
            f"throughput against Megatron's 1F1B with relayed skips: up to {ratio:.2f} times "
            f"({cell}); at {slowest:g} GB/s: {', '.join(said for _, said in bound)}. >= 2.3 times "
            f"somewhere: {_reached(ratio >= 2.3)}; on every skip backbone at that rate: "
            f"{_reached(min(r for r, _ in bound) >= 2.3)}"
        )
        ahead = [c for c in skips if c.ours and c.rival and c.ours.median_s <= c.rival.median_s]
        yield (
            "ahead of every other contestant, or the tuner picked it: "
            f"{len(ahead)} of {len(skips)} cells with skips"
        )
    rows = [row for cell in cells for row in cell.rows]
    if not rows:
        return
    errors = sorted(abs(r.error) for r in rows)
    own = [abs(r.error) for r in rows if r.engine == Engine.OURS.value]
    yield (
        f"simulator against measured step: median error {100 * median(errors):.1f} % over all "
        f"{len(rows)} ({100 * median(own):.1f} % over our {len(own)}), 90th percentile "
        f"{100 * errors[int(0.9 * (len(errors) - 1))]:.1f} %. <= 10 %: "
        f"{_reached(median(errors) <= 0.1)}"
    )
    plain = [(c.row(PLAIN), c.base, c) for c in cells if not c.record["num_skips"]]
    found = [(a.median_s / b.median_s, c) for a, b, c in plain if a and b]
    if found:
        ratio, cell = max(found, key=lambda pair: pair[1].rate)
        yield (
            f"our executor with 1F1B on {cell} (no skips): {ratio:.3f} of the time of Megatron's "
            f"own 1F1B. Within 3 %: {_reached(ratio <= 1.03)}"
        )
    shares = sorted(100 * (r.wire_mb / r.counted_mb - 1) for r in rows if r.counted_mb)
    yield (
        f"bytes by the kernel's counters over the executor's own count: {shares[0]:+.1f} to "
        f"{shares[-1]:+.1f} % (headers, acknowledgements, gloo's handshakes)"
    )


def losses(cells: Sequence[Cell]) -> Iterator[str]:
    """Cells in which another contestant, or another way of ours, was faster than the pick."""
    for cell in cells:
        if (ours := cell.ours) is None:
            yield f"{cell}: the tuner found nothing that fits"
            continue
        for row in cell.rows:
            if row.median_s < 0.99 * ours.median_s:
                yield (
                    f"{cell}: {row.name} takes {100 * (1 - row.median_s / ours.median_s):.0f} % "
                    f"less time than ours ({ours.name}); it moves {row.wire_mb:.1f} MB a sample "
                    f"against {ours.wire_mb:.1f}, bubble {row.bubble:.2f} against "
                    f"{ours.bubble:.2f}, {row.memory_gb:.1f} GB against {ours.memory_gb:.1f}"
                )


def ideal(cells: Sequence[Cell]) -> Iterator[str]:
    """Cells in which data parallelism would be faster if collectives were ideal."""
    for cell in cells:
        ours, ddp = cell.ours, min(cell.wholes, key=lambda r: r.predicted_s, default=None)
        if ours and ddp and ddp is not ours and ddp.predicted_s < ours.predicted_s:
            yield (
                f"{cell}: {ddp.name} with ideal collectives would take "
                f"{100 * (1 - ddp.predicted_s / ours.predicted_s):.0f} % less than ours is "
                f"predicted to; it needs {ddp.memory_gb:.1f} GB on each device, ours "
                f"{ours.memory_gb:.1f}"
            )


def _reached(holds: bool) -> str:
    return "reached" if holds else "NOT reached"


def _summary(cell: Cell) -> dict[str, str]:
    ours, rival, base, whole = cell.ours, cell.rival, cell.base, cell.fastest(*REPLICAS)
    if ours is None or rival is None or base is None:
        return cell.where
    config = cell.pick["config"].split(", ", 1)[-1] if cell.pick else f"{ours.name} (predicted)"
    return {
        **cell.where,
        "ours (tuner's pick)": config,
        "samples/s": f"{ours.samples_per_s:.1f}",
        "x Megatron 1F1B (spread)": _ratio(ours.faster_than(base)),
        "fastest other": rival.name,
        "x fastest other (spread)": _ratio(ours.faster_than(rival)),
        "DDP, FSDP2 or HSDP, samples/s": f"{whole.engine} {whole.samples_per_s:.1f}"
        if whole
        else "-",
        "MB/sample ours, 1F1B": f"{ours.wire_mb:.1f}, {base.wire_mb:.1f}",
        "GB ours, 1F1B": f"{ours.memory_gb:.1f}, {base.memory_gb:.1f}",
    }


def _ratio(values: tuple[float, float, float]) -> str:
    return "{:.2f} ({:.2f} to {:.2f})".format(*values)


def _contestant(row: Row) -> dict[str, str]:
    spread = (max(row.seconds) - min(row.seconds)) / row.median_s
    return {
        **row.cell.where,
        "contestant": row.name + (f" [{row.solver}]" if "ILP" in row.name else ""),
        "how": row.way or "-",
        "samples/s": f"{row.samples_per_s:.1f}",
        "spread %": f"{100 * spread:.1f}",
        "MB/sample": f"{row.wire_mb:.1f}",
        "own": f"{row.counted_mb:.1f}",
        "bubble": f"{row.bubble:.2f}",
        "GB": f"{row.memory_gb:.1f}",
        "state": f"{row.state_gb:.1f}",
        "simulated %": f"{100 * row.error:+.1f}",
    }
