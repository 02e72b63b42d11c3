"""Traces of a run: processes, output, numbers."""

from __future__ import annotations

import os
import pickle
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.runs import train
from tests.ranks import start_ranks

_SAVED = re.compile(r"successfully saved checkpoint from iteration +(\d+)")
END_S = 120.0
"""How long a run that nothing disturbs may take."""


@dataclass
class Found:
    """Numbers of a run: losses of its steps by number, and all weights and masters at its end."""

    losses: dict[int, float]
    tensors: dict[str, list[tuple[str, int, bytes]]]


class Ranks:
    """Ranks of a run: their processes, what they say, whether they have ended."""

    def __init__(
        self,
        num_ranks: int,
        flags: list[str],
        folder: Path,
        sabotage: Callable[[int], None] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.processes = start_ranks(num_ranks, disturbed, flags, sabotage, folder=str(folder))
        self.began = time.monotonic()

    def said(self, rank: int | None = None) -> str:
        """Output of a rank until now; of all ranks without a number."""
        ranks = range(len(self.processes)) if rank is None else [rank]
        logs = [self._folder / f"log.{r}" for r in ranks]
        return "".join(log.read_text(errors="replace") for log in logs if log.exists())

    def running(self) -> list[int]:
        """The ranks that have not ended."""
        return [r for r, process in enumerate(self.processes) if process.is_alive()]

    def wait(self, until: Callable[[], bool], limit_s: float) -> bool:
        """True if the run reached ``until`` within the limit, before all ranks exited."""
        deadline = time.monotonic() + limit_s
        while not until():
            if time.monotonic() > deadline or not self.running():
                return until()
            time.sleep(0.01)
        return True

    def saved(self) -> int:
        """The last step that was said to be saved."""
        return max((int(step) for step in _SAVED.findall(self.said())), default=0)

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
        results = [self._folder / f"result.{r}" for r in range(len(self.processes))]
        return [
            0 if process.exitcode == 255 and result.exists() else process.exitcode
            for process, result in zip(self.processes, results, strict=True)
        ]

    def found(self) -> Found:
        """The numbers of a run that came to its end."""
        results = [
            pickle.loads((self._folder / f"result.{r}").read_bytes())
            for r in range(len(self.processes))
        ]
        last = results[-1]
        losses = {
            step["iteration"] + 1: loss
            for step, loss in zip(last["steps"], last["losses"], strict=True)
        }
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
        return Found(losses, tensors)


def disturbed(flags: list[str], sabotage: Callable[[int], None] | None) -> Any:
    """One rank of a run, in a session of its own, by which what it starts can be found."""
    os.setsid()
    if sabotage is not None:
        sabotage(int(os.environ["RANK"]))
    return train(flags)


def run_to_the_end(num_ranks: int, flags: list[str], folder: Path) -> Found:
    """An undisturbed run; raises AssertionError with all that was said if it fails."""
    ranks = Ranks(num_ranks, flags, folder)
    ranks.wait(lambda: not ranks.running(), END_S)
    ranks.orphans()
    assert not any(ranks.statuses()), ranks.said()
    return ranks.found()


def sessions() -> Iterator[tuple[int, int]]:
    """All processes but zombies, with their sessions."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:  # ended meanwhile
            continue
        if state not in "ZX":
            yield int(entry.name), int(session)
