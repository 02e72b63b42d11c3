"""The results of ``claim`` as the report reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from tests.benchmarks.contestant import REPLICAS, Engine


@dataclass(frozen=True)
class Row:
    """A contestant in a cell; seconds are emulated, bytes and rates of the real backbone."""

    cell: Cell
    name: str
    engine: str
    seconds: tuple[float, ...]
    predicted_s: float
    wire_mb: float
    counted_mb: float
    bubble: float
    memory_gb: float
    state_gb: float
    solver: str
    way: str = ""

    @property
    def median_s(self) -> float:
        """Of the repetitions."""
        return median(self.seconds)

    @property
    def samples_per_s(self) -> float:
        """Of the real devices that are emulated."""
        return self.cell.samples * self.cell.time_scale / self.median_s

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.median_s - 1

    def faster_than(self, other: Row) -> tuple[float, float, float]:
        """How many times the throughput of ``other``: median, least and most of repetitions."""
        ratios = sorted(b / a for a, b in zip(self.seconds, other.seconds, strict=True))
        return median(ratios), ratios[0], ratios[-1]


@dataclass(frozen=True)
class Cell:
    """A backbone over links of ``rate`` GB/s, and how it was scaled; ``memory_gb`` is the cap of
    every device, where there is one, and ``refused`` what would need more than 0.9 of it;
    ``passed_over`` are the predicted seconds of those that were not run for them."""

    backbone: str
    rate: float
    ranks: int
    ranks_per_node: int
    microbatches: int
    micro_batch_size: int
    time_scale: float
    byte_divisor: float
    rate_mbit: float
    num_skips: int
    pick: Mapping[str, Any] | None
    records: tuple[Mapping[str, Any], ...]
    memory_gb: float | None = None
    refused: tuple[Mapping[str, Any], ...] = ()
    passed_over: Mapping[str, float] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Of a step: the global batch."""
        return self.microbatches * self.micro_batch_size

    @property
    def rows(self) -> tuple[Row, ...]:
        """All contestants, in order."""
        real = self.byte_divisor / self.samples / 1e6
        return tuple(
            Row(
                self,
                r["contestant"],
                r["engine"],
                tuple(r["seconds"]),
                r["predicted_s"],
                r["wire_bytes"] * real,
                r["sent_bytes"] * real,
                r["bubble"],
                r["memory_bytes"] / 1e9,
                r["state_bytes"] / 1e9,
                r["solver"],
                r.get("way", ""),
            )
            for r in self.records
        )

    def row(self, name: str) -> Row | None:
        """The contestant of that name."""
        return next((r for r in self.rows if r.name == name), None)

    @property
    def base(self) -> Row | None:
        """Megatron's 1F1B, the faster one where it runs with recomputation too."""
        found = (r for r in self.rows if r.engine == Engine.MEGATRON_1F1B.value)
        return min(found, key=lambda r: r.median_s, default=None)

    @property
    def ours(self) -> Row | None:
        """What the tuner picked, without looking at what was measured.

        Where nothing fits its devices' memory, ours that is predicted to be the fastest.
        """
        if self.pick:
            return self.row(self.pick["contestant"])
        own = (r for r in self.rows if r.engine == Engine.OURS.value)
        return min(own, key=lambda r: r.predicted_s, default=None)

    @property
    def others(self) -> tuple[Row, ...]:
        """What other projects run."""
        return tuple(r for r in self.rows if r.engine != Engine.OURS.value)

    @property
    def wholes(self) -> tuple[Row, ...]:
        """Those whose devices run the whole backbone each."""
        return tuple(r for r in self.rows if r.engine in REPLICAS)

    @property
    def whole(self) -> Row | None:
        """The fastest of those."""
        return min(self.wholes, key=lambda r: r.median_s, default=None)

    @property
    def rival(self) -> Row | None:
        """The fastest of the others."""
        return min(self.others, key=lambda r: r.median_s, default=None)


def cells_of(results: Mapping[str, Any]) -> tuple[Cell, ...]:
    """The cells of results.json, backbones in their order and rates falling."""
    names = list(dict.fromkeys(c["backbone"] for c in results["cells"]))
    cells = [
        Cell(
            c["backbone"],
            c["rate_gbs"],
            c["ranks"],
            c["ranks_per_node"],
            c["microbatches"],
            c["micro_batch_size"],
            c["time_scale"],
            c["byte_divisor"],
            c["rate_mbit"],
            c["num_skips"],
            c["pick"],
            tuple(c["results"]),
            c.get("memory_gb"),
            tuple(c.get("refused", ())),
            c.get("passed_over", {}),
        )
        for c in results["cells"]
    ]
    return tuple(
        sorted(cells, key=lambda c: (names.index(c.backbone), c.ranks, c.samples, -c.rate))
    )


def all_rows(cells: Iterable[Cell]) -> list[Row]:
    """Of all cells."""
    return [row for cell in cells for row in cell.rows]
