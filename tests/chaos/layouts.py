"""Runs to disturb: small ones of a few seconds, and their undisturbed results."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.chaos.records import Found, run_to_the_end
from tests.integration.runs import BASE, TINY

STEPS, INTERVAL = 6, 2
"""Steps of a run, and after how many it saves."""
LIMIT_S = 8.0
"""``--pulse-timeout-s``."""

_SHAPES = {
    "fold": ["--pulse-placement", "fold"],
    "sequential": ["--pulse-placement", "sequential"],
    "split": ["--pulse-schedule", "zb-v"],
    "split in a line": ["--pulse-schedule", "zb-h1", "--pulse-placement", "sequential"],
}


@dataclass(frozen=True)
class Layout:
    """Layout of a run over its ranks."""

    family: str
    pipeline: int
    data: int
    shape: str
    bf16: bool
    beside: bool = False
    """Whether checkpoints are written beside training."""

    @property
    def num_ranks(self) -> int:
        """Number of processes."""
        return self.pipeline * self.data

    def flags(self, save: Path) -> list[str]:
        """The command's flags, apart from the script's name."""
        shape = _SHAPES[self.shape] if self.pipeline > 1 else []
        spread = ["--use-distributed-optimizer"] if self.data > 1 else []
        spread += ["--async-save"] if self.beside else []
        return [
            *TINY[self.family], *BASE, *shape, *spread, *(["--bf16"] if self.bf16 else []),
            "--pipeline-model-parallel-size", str(self.pipeline),
            "--pulse-timeout-s", f"{LIMIT_S:g}", "--global-batch-size", "8",
            "--train-iters", str(STEPS), "--save", str(save), "--save-interval", str(INTERVAL),
        ]  # fmt: skip

    def __str__(self) -> str:
        kind = f", {self.shape}" if self.pipeline > 1 else ""
        more = f"{', bf16' if self.bf16 else ''}{', saved beside' if self.beside else ''}"
        return f"{self.family} P={self.pipeline} D={self.data}{kind}{more}"


def draw_layout(rng: random.Random) -> Layout:
    """One of some thirty layouts of 2 to 4 ranks."""
    pipeline, data = rng.choice([(2, 1), (2, 1), (1, 2), (2, 2), (3, 1), (4, 1)])
    shapes = ["fold", "sequential", "split", "split in a line"]
    shape = rng.choice(shapes) if pipeline > 1 else "fold"
    family, bf16 = rng.choice(["uvit", "unet"]), rng.random() < 0.3
    return Layout(family, pipeline, data, shape, bf16, beside=rng.random() < 0.5)


def draw_other(rng: random.Random, layout: Layout) -> Layout:
    """A layout on which ``layout``'s run goes on with the same numbers: any, of one replica."""
    if layout.data > 1:
        return layout
    pipeline = rng.choice([1, 2, 4])
    shape = rng.choice(["fold", "sequential"])
    return Layout(layout.family, pipeline, 1, shape, layout.bf16, layout.beside)


@dataclass
class Undisturbed:
    """Results of layouts without faults; each layout with other results runs once.

    With one replica, every layout computes the bits of one process.
    """

    folder: Path
    _found: dict[Layout, Found] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, layout: Layout) -> Found:
        """The numbers of a whole run of ``layout``."""
        layout = replace(layout, beside=False)
        if layout.data == 1:
            layout = Layout(layout.family, 1, 1, "fold", layout.bf16)
        with self._lock:
            if layout not in self._found:
                folder = self.folder / f"undisturbed-{len(self._found)}"
                self._found[layout] = run_to_the_end(
                    layout.num_ranks, layout.flags(folder / "checkpoints"), folder
                )
            return self._found[layout]
