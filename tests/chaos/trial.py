"""One disturbed run: a layout, a fault, a moment; what became of it, and whether it goes on."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.network import Node, namespaces
from tests.chaos.faults import (
    ENDS_WELL,
    FILES,
    INSIDE,
    LINKS,
    NAMES_NOBODY,
    SIGNALS,
    WORDS,
    Sabotage,
    damage,
    disturb_link,
)
from tests.chaos.layouts import INTERVAL, LIMIT_S, Layout, Undisturbed, draw_layout, draw_other
from tests.chaos.records import END_S, Found, Ranks

LATE_S = LIMIT_S + 12.0
"""When all others have ended after a fault: the limit, answers, stacks, a busy machine."""
MOMENTS = ("starting", "a step", "saving")


@dataclass(frozen=True)
class Trial:
    """Trial ``number`` of a seed; it depends on these two and ``kinds`` alone."""

    number: int
    kind: str
    layout: Layout
    other: Layout
    rank: int
    moment: str
    step: int
    fraction: float
    """Where between two looks at the run the moment is, of a second."""
    count: int

    def __str__(self) -> str:
        when = f"{self.moment}{f' {self.step}' if self.moment == 'a step' else ''}"
        where = f"operation {self.count}" if self.kind in ("raises", "never ends") else when
        return f"{self.number:4d} {self.kind:12s} {self.layout}, rank {self.rank}, {where}"


@dataclass
class Outcome:
    """Outcome of a trial; sound if there are no ``faults``."""

    number: int
    kind: str
    trial: str
    seconds: float = 0.0
    """From the fault to the end of all ranks that can end."""
    happened: bool = False
    """Whether the fault came before the run had ended."""
    named: bool | None = None
    """Whether the right rank was named; None where none is to be."""
    orphans: int = 0
    faults: list[str] = field(default_factory=list)
    said: str = ""
    """What the ranks said, of trials with faults."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def draw_trial(seed: int, number: int, kinds: tuple[str, ...]) -> Trial:
    """Trial ``number`` of ``seed``: kinds take turns."""
    rng = random.Random(f"{seed}/{number}")
    kind = kinds[number % len(kinds)]
    layout = draw_layout(rng)
    return Trial(
        number,
        kind,
        layout,
        draw_other(rng, layout),
        rng.randrange(layout.num_ranks),
        rng.choice(MOMENTS) if kind in SIGNALS else "a step",
        rng.randint(1, 5),
        rng.random(),
        rng.randint(1, 40),
    )


def run_trial(seed: int, trial: Trial, undisturbed: Undisturbed, folder: Path) -> Outcome:
    """Disturb a run, look at its end, and let it go on to the end."""
    outcome = Outcome(trial.number, trial.kind, str(trial))
    save = folder / "checkpoints"
    save.mkdir(parents=True)
    with _surroundings(trial, save) as nodes:
        ranks = Ranks(
            trial.layout.num_ranks,
            trial.layout.flags(save),
            folder / "disturbed",
            Sabotage(trial.kind, trial.rank, trial.count, str(save), nodes),
        )
        began = _disturb(trial, ranks, nodes)
        _watch_end(trial, ranks, outcome, began)
        (save / "filler").unlink(missing_ok=True)
        saved = ranks.saved()
        if trial.kind in FILES:
            what = damage(_rng(seed, trial), trial.kind, save)
            outcome.trial += f", {what}"
            outcome.happened = bool(what)
        _go_on(trial, outcome, save, folder, saved, undisturbed.of(trial.layout))
    if outcome.faults:
        outcome.said = ranks.said()[-20_000:]
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _rng(seed: int, trial: Trial) -> random.Random:
    return random.Random(f"{seed}/{trial.number}/damage")


@contextlib.contextmanager
def _surroundings(trial: Trial, save: Path) -> Iterator[tuple[Node, ...]]:
    """The small disk or the nodes that a fault needs."""
    with contextlib.ExitStack() as stack:
        nodes: tuple[Node, ...] = ()
        if trial.kind in LINKS:
            nodes = tuple(stack.enter_context(namespaces(trial.layout.num_ranks, rate_mbit=2000)))
        elif trial.kind == "no room":
            mount = ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(save)]
            subprocess.run(mount, check=True, capture_output=True)
            stack.callback(subprocess.run, ["umount", "--lazy", str(save)], check=True)
        yield nodes


def _disturb(trial: Trial, ranks: Ranks, nodes: tuple[Node, ...]) -> float:
    """Do what is done from outside, at its moment; when the fault was."""
    if trial.kind in INSIDE:
        return time.monotonic()
    if trial.kind not in FILES and trial.moment == "starting":
        time.sleep(4 * trial.fraction)
    elif trial.moment == "saving":
        ranks.wait(lambda: "saving checkpoint at iteration" in ranks.said(), END_S)
        time.sleep(0.5 * trial.fraction)
    else:
        step = max(trial.step, 2 * INTERVAL + 1) if trial.kind in FILES else trial.step
        ranks.wait(lambda: f"iteration        {step}/" in ranks.said(), END_S)
        time.sleep(0.3 * trial.fraction)
    if trial.kind in LINKS:
        disturb_link(trial.kind, nodes[trial.rank])
    else:
        kinds = SIGNALS if trial.kind in SIGNALS else {trial.kind: SIGNALS["killed"]}
        for rank, process in enumerate(ranks.processes):
            if rank == trial.rank or trial.kind == "all killed":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, kinds[trial.kind])
    return time.monotonic()


def _watch_end(trial: Trial, ranks: Ranks, outcome: Outcome, began: float) -> None:
    """Wait until all ranks that can have ended; whether they did, with the right words."""
    kind, rank = trial.kind, trial.rank
    stays = {rank} if kind == "stopped" else set()
    limit_s = LATE_S + (END_S if kind in INSIDE or kind in ENDS_WELL else 0.0)
    ranks.wait(lambda: set(ranks.running()) <= stays, limit_s)
    outcome.seconds = time.monotonic() - began
    late = sorted(set(ranks.running()) - stays)
    outcome.orphans = ranks.orphans()
    if late:
        outcome.faults.append(f"ranks {late} had not ended {outcome.seconds:.0f} s later")
    if outcome.orphans:
        outcome.faults.append(f"{outcome.orphans} processes were left running")
    statuses, said = ranks.statuses(), ranks.said()
    outcome.happened = any(statuses) or (
        kind == "told to end" and re.search(r"stop(ped| request) \(", said) is not None
    )
    if kind in ENDS_WELL:
        outcome.happened = True
        if any(statuses):
            outcome.faults.append(f"it ended with {statuses}")
    elif outcome.happened and kind not in NAMES_NOBODY:
        outcome.named = re.search(rf"\brank {rank}\b", _blame(said)) is not None
        if kind == "raises":  # it speaks for itself
            outcome.named = f"rank {rank}: in " in said and WORDS in said
        elif kind in ("never ends", "never joins"):
            outcome.named = f"; rank {rank}: step " in said
        if not outcome.named:
            outcome.faults.append(f"rank {rank} was not named")
    elif kind == "no room" and outcome.happened and "No space left on device" not in said:
        outcome.faults.append("it was not said that there is no room")
    if "Traceback" in said and kind != "raises":
        outcome.faults.append("a traceback was shown")


def _blame(said: str) -> str:
    """Text on the first failure, without the rank that reports it."""
    return "\n".join(
        re.sub(r"^rank \d+: ", "", line.partition("first failure in this job: ")[2])
        for line in said.splitlines()
        if "first failure in this job: " in line
    )


def _go_on(
    trial: Trial, outcome: Outcome, save: Path, folder: Path, saved: int, expected: Found
) -> None:
    """Start the run again, perhaps in another layout, and compare its numbers."""
    layout = trial.other
    ranks = Ranks(layout.num_ranks, layout.flags(save), folder / "again")
    ranks.wait(lambda: not ranks.running(), END_S)
    late = ranks.running()
    outcome.orphans += ranks.orphans()
    if late or any(ranks.statuses()):
        outcome.faults.append(f"it did not go on: {ranks.statuses()}\n{ranks.said()[-3000:]}")
        return
    found = ranks.found()
    first = min(found.losses, default=0)
    lost = saved + 1 - first if found.losses else 0
    if lost > 0 and trial.kind not in FILES:
        outcome.faults.append(f"{lost} steps were lost: step {saved} was saved")
    different = [n for n, loss in found.losses.items() if loss != expected.losses[n]]
    if different:
        outcome.faults.append(f"steps {different} have other losses")
    if found.losses and found.tensors != expected.tensors:
        outcome.faults.append("other weights")
