"""Faults of runs, from outside (signals, links, files) and from inside (code, disks, clocks).

A fault inside a rank is an instance of ``Sabotage``, sent to the rank before the run begins. A
fault from outside is a function that is called at a random moment.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.network import INTERFACE, Node

SIGNALS = {
    "killed": signal.SIGKILL,
    "all killed": signal.SIGKILL,
    "stopped": signal.SIGSTOP,
    "told to end": signal.SIGTERM,
}
"""Faults that are a signal, to one rank but where all are killed."""
LINKS = ("link cut", "link slow")
INSIDE = ("raises", "never ends", "never joins", "no room", "slow disk", "clock steps")
FILES = ("bits flipped", "file cut")
"""Faults that a checkpoint suffers after the run was killed."""
KINDS = (*SIGNALS, *INSIDE, *FILES, *LINKS)

ENDS_WELL = {"slow disk", "clock steps", "link slow"}
"""After which a run ends as if nothing had been."""
NAMES_NOBODY = {"all killed", "told to end", "no room", *FILES}
"""Of which no rank is to be named."""
WORDS = "the chaos test raised this"


@dataclass(frozen=True)
class Sabotage:
    """Fault inside ``rank`` of a run: ``kind``, at the ``count``-th opportunity.

    ``nodes`` are the nodes of the ranks if links are disturbed.
    """

    kind: str
    rank: int
    count: int
    folder: str
    nodes: tuple[Node, ...] = ()

    def __call__(self, rank: int) -> None:
        if self.nodes:
            self.nodes[rank].enter()
            os.environ["MASTER_ADDR"] = self.nodes[0].address
        if rank != self.rank or self.kind not in INSIDE:
            return
        if self.kind == "slow disk":
            return self._slow_down()
        import megatron.training.training as training

        from megatron_pulse.runtime.executor import Executor

        operation = Executor, "_run", self.count
        step = training, "train_step", self.count % 4 + 1
        owner, name, count, act = {
            "raises": (*operation, self._raise),
            "never ends": (*operation, self._sleep),
            "never joins": (*step, self._sleep),
            "no room": (*step, self._fill),
            "clock steps": (*step, self._step_clock),
        }[self.kind]
        original, calls = getattr(owner, name), 0

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == count:
                act()
            return original(*args, **kwargs)

        setattr(owner, name, wrapper)

    def _raise(self) -> None:
        raise RuntimeError(WORDS)

    def _sleep(self) -> None:
        time.sleep(3600)

    def _fill(self) -> None:
        """Leave room for less than a checkpoint on the small disk of the run's folder."""
        left = (os.statvfs(self.folder).f_bavail * os.statvfs(self.folder).f_frsize) % (1 << 16)
        with open(Path(self.folder) / "filler", "wb", buffering=0) as file:
            with suppress(OSError):
                while file.write(bytes(1 << 20)):
                    pass
            if self.count % 2:
                file.truncate(max(0, file.tell() - left))

    def _slow_down(self) -> None:
        """Each flush of a file to disk takes up to half a second."""
        rng, sync = random.Random(self.count), os.fsync

        def fsync(file: Any) -> None:
            time.sleep(rng.random() / 2)
            sync(file)

        os.fsync = fsync  # type: ignore[assignment]

    def _step_clock(self) -> None:
        """The wall's clock goes wrong by hours."""
        step, clock = (1 - 2 * (self.count % 2)) * 3600.0 * (1 + self.count), time.time
        time.time = lambda: clock() + step


def disturb_link(kind: str, node: Node) -> None:
    """Cut the link of ``node``, or leave it 2 Mbit/s."""
    where = ["ip", "-n", node.name, "link", "set", INTERFACE, "down"]
    if kind == "link slow":
        where = ["tc", "-n", node.name, "qdisc", "replace", "dev", INTERFACE, "root", "tbf"]
        where += ["rate", "2mbit", "burst", "20kb", "limit", "64mb"]
    subprocess.run(where, check=True, capture_output=True, timeout=30)


def damage(rng: random.Random, kind: str, folder: Path) -> str:
    """Damage a file of the newest checkpoint in ``folder``, or the one that names it; which, and
    how ("": there is none)."""
    steps = sorted(path for path in folder.glob("iter_*") if path.is_dir())
    files = [*sorted(steps[-1].iterdir()), *folder.glob("latest_*")] if steps else []
    files = [path for path in files if path.stat().st_size]
    if not files:
        return ""
    file = rng.choice(files)
    content = bytearray(file.read_bytes())
    at, size = rng.randrange(len(content)), len(content)
    if kind == "file cut":
        del content[at:]
    else:
        content[at] ^= 1 << rng.randrange(8)
    file.write_bytes(content)
    return f"{file.relative_to(folder)} at byte {at:,} of {size:,}"
