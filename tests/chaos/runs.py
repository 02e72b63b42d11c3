"""Runs to disturb: small ones of a few seconds, their processes, output and numbers."""

from __future__ import annotations

import os
import pickle
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.integration.runs import BASE, TINY, train
from tests.ranks import start_ranks

STEPS, INTERVAL = 6, 2
"""Steps of a run, and after how many it saves."""
LIMIT_S = 8.0
"""``--pulse-timeout-s``."""
END_S = 120.0
"""How long a run that nothing disturbs may take."""

_SHAPES = {
    "fold": ["--pulse-placement", "fold"],
    "sequential": ["--pulse-placement", "sequential"],
    "split": ["--pulse-schedule", "zb-v"],
    "split in a line": ["--pulse-schedule", "zb-h1", "--pulse-placement", "sequential"],
}


@dataclass(frozen=True)
class Layout:
    """Layout of a run over its ranks; ``beside``: checkpoints are written beside training."""

    family: str
    pipeline: int
    data: int
    shape: str
    bf16: bool
    beside: bool = False

    @property
    def num_ranks(self) -> int:
        """Number of processes."""
        return self.pipeline * self.data

    def flags(self, save: Path) -> list[str]:
        """The command's flags, apart from the script's name."""
        return [
            *TINY[self.family], *BASE, *_SHAPES[self.shape] * (self.pipeline > 1),
            *["--use-distributed-optimizer"] * (self.data > 1),
            *["--async-save"] * self.beside, *["--bf16"] * self.bf16,
            "--pipeline-model-parallel-size", str(self.pipeline),
            "--pulse-timeout-s", f"{LIMIT_S:g}", "--global-batch-size", "8",
            "--train-iters", str(STEPS), "--save", str(save), "--save-interval", str(INTERVAL),
        ]  # fmt: skip

    def __str__(self) -> str:
        kind = f", {self.shape}" * (self.pipeline > 1)
        more = ", bf16" * self.bf16 + ", saved beside" * self.beside
        return f"{self.family} P={self.pipeline} D={self.data}{kind}{more}"


def draw_layout(rng: random.Random) -> Layout:
    """One of some thirty layouts of 2 to 4 ranks."""
    pipeline, data = rng.choice([(2, 1), (2, 1), (1, 2), (2, 2), (3, 1), (4, 1)])
    shape = rng.choice(list(_SHAPES)) if pipeline > 1 else "fold"
    family, bf16 = rng.choice(["uvit", "unet"]), rng.random() < 0.3
    return Layout(family, pipeline, data, shape, bf16, beside=rng.random() < 0.5)


def draw_other(rng: random.Random, layout: Layout) -> Layout:
    """A layout on which ``layout``'s run goes on with the same numbers: any, of one replica."""
    if layout.data > 1:
        return layout
    pipeline, shape = rng.choice([1, 2, 4]), rng.choice(["fold", "sequential"])
    return Layout(layout.family, pipeline, 1, shape, layout.bf16, layout.beside)


@dataclass
class Found:
    """Numbers of a run: losses of its steps by number, and all weights and masters at its end."""

    losses: dict[int, float]
    tensors: dict[str, list[tuple[str, int, bytes]]]


class Ranks:
    """Ranks of a run: their processes, what they say, whether they have ended."""

    def __init__(
        self,
        layout: Layout,
        save: Path,
        folder: Path,
        sabotage: Callable[[int], None] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, given = folder, (disturbed, layout.flags(save), sabotage)
        self.processes = start_ranks(layout.num_ranks, *given, folder=str(folder))

    def said(self) -> str:
        """Output of all ranks until now."""
        logs = [self._folder / f"log.{r}" for r in range(len(self.processes))]
        return "".join(log.read_text(errors="replace") for log in logs if log.exists())

    def running(self) -> list[int]:
        """The ranks that have not ended."""
        return [r for r, process in enumerate(self.processes) if process.is_alive()]

    def wait(self, until: Callable[[], bool], limit_s: float) -> None:
        """Wait until the run has reached ``until``, all ranks have ended, or so long."""
        deadline = time.monotonic() + limit_s
        while not until() and time.monotonic() < deadline and self.running():
            time.sleep(0.01)

    def saved(self) -> int:
        """The last step that was said to be saved."""
        said = re.findall(r"successfully saved checkpoint from iteration +(\d+)", self.said())
        return max(map(int, said), default=0)

    def orphans(self) -> int:
        """Processes that ended ranks have left running; they and all ranks are killed."""
        own = {process.pid for process in self.processes}
        left = [pid for pid, session in sessions() if session in own and pid not in own]
        for pid in (*left, *(self.processes[r].pid for r in self.running())):
            os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.join()
        return len(left)

    def statuses(self) -> list[int | None]:
        """The exit statuses of ranks that have ended; one that left a result has ended well, though
        the server that forked it may not know (255)."""
        return [
            0 if p.exitcode == 255 and (self._folder / f"result.{r}").exists() else p.exitcode
            for r, p in enumerate(self.processes)
        ]

    def found(self) -> Found:
        """The numbers of a run that came to its end."""
        files = [self._folder / f"result.{r}" for r in range(len(self.processes))]
        results = [pickle.loads(file.read_bytes()) for file in files]
        steps, losses = (results[-1][name] for name in ("steps", "losses"))
        tensors = {
            kind: sorted(
                {
                    (name, first, values.numpy().tobytes())
                    for result in results
                    for name, _, first, values in result[kind]
                }
            )
            for kind in ("weights", "main_params")
        }
        numbers = [step["iteration"] + 1 for step in steps]
        return Found(dict(zip(numbers, losses, strict=True)), tensors)


def disturbed(flags: list[str], sabotage: Callable[[int], None] | None) -> Any:
    """One rank of a run, in a session of its own, by which what it starts can be found."""
    os.setsid()
    if sabotage is not None:
        sabotage(int(os.environ["RANK"]))
    return train(flags)


def sessions() -> Iterator[tuple[int, int]]:
    """All processes but zombies, with their sessions."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:  # ended meanwhile
            continue
        if state not in "ZX":
            yield int(entry.name), int(session)


@dataclass
class Undisturbed:
    """Results of layouts without faults; each layout with other results runs once.

    With one replica, every layout computes the bits of one process.
    """

    folder: Path
    _found: dict[Layout, Found] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, layout: Layout) -> Found:
        """The numbers of a whole run of ``layout``; AssertionError with its output if it fails."""
        layout = replace(layout, beside=False)
        if layout.data == 1:
            layout = Layout(layout.family, 1, 1, "fold", layout.bf16)
        with self._lock:
            if layout not in self._found:
                folder = self.folder / f"undisturbed-{len(self._found)}"
                ranks = Ranks(layout, folder / "checkpoints", folder)
                ranks.wait(lambda: not ranks.running(), END_S)
                ranks.orphans()
                assert not any(ranks.statuses()), ranks.said()
                self._found[layout] = ranks.found()
            return self._found[layout]
