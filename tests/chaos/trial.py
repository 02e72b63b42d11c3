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
from dataclasses import dataclass, field
from pathlib import Path

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
from tests.chaos.runs import (
    END_S,
    INTERVAL,
    LIMIT_S,
    Layout,
    Ranks,
    Undisturbed,
    draw_layout,
    draw_other,
)

LATE_S = LIMIT_S + 12.0
"""When all others have ended after a fault: the limit, answers, stacks, a busy machine."""
MOMENTS = ("starting", "a step", "saving")


@dataclass(frozen=True)
class Trial:
    """Trial ``number`` of a seed; it depends on these two and ``kinds`` alone.

    ``fraction`` is where between two looks at the run the moment is, of a second.
    """

    number: int
    kind: str
    layout: Layout
    other: Layout
    rank: int
    moment: str
    step: int
    fraction: float
    count: int

    def __str__(self) -> str:
        when = f"{self.moment}{f' {self.step}' if self.moment == 'a step' else ''}"
        where = f"operation {self.count}" if self.kind in ("raises", "never ends") else when
        return f"{self.number:4d} {self.kind:12s} {self.layout}, rank {self.rank}, {where}"


@dataclass
class Outcome:
    """Outcome of a trial; sound if there are no ``faults``.

    ``seconds`` are from the fault to the end of all ranks that can end; it ``happened`` if the run
    had not ended; ``named`` is whether the right rank was named, None where none is to be; ``said``
    is what the ranks said, of trials with faults.
    """

    number: int
    kind: str
    trial: str
    seconds: float = 0.0
    happened: bool = False
    named: bool | None = None
    orphans: int = 0
    faults: list[str] = field(default_factory=list)
    said: str = ""


def draw_trial(seed: int, number: int, kinds: tuple[str, ...]) -> Trial:
    """Trial ``number`` of ``seed``: kinds take turns."""
    rng, kind = random.Random(f"{seed}/{number}"), kinds[number % len(kinds)]
    layout = draw_layout(rng)
    other, rank = draw_other(rng, layout), rng.randrange(layout.num_ranks)
    moment = rng.choice(MOMENTS) if kind in SIGNALS else "a step"
    when = rng.randint(1, 5), rng.random(), rng.randint(1, 40)
    return Trial(number, kind, layout, other, rank, moment, *when)


def run_trial(seed: int, trial: Trial, undisturbed: Undisturbed, folder: Path) -> Outcome:
    """Disturb a run, look at its end, and let it go on to the end."""
    outcome = Outcome(trial.number, trial.kind, str(trial))
    save = folder / "checkpoints"
    save.mkdir(parents=True)
    with _surroundings(trial, save) as nodes:
        sabotage = Sabotage(trial.kind, trial.rank, trial.count, str(save), nodes)
        ranks = Ranks(trial.layout, save, folder / "disturbed", sabotage)
        began = _disturb(trial, ranks, nodes)
        _watch_end(trial, ranks, outcome, began)
        (save / "filler").unlink(missing_ok=True)
        if trial.kind in FILES:
            rng = random.Random(f"{seed}/{trial.number}/damage")
            what = damage(rng, trial.kind, save)
            outcome.trial += f", {what}"
            outcome.happened = bool(what)
        again = Ranks(trial.other, save, folder / "again")
        _go_on(trial, outcome, again, ranks.saved(), undisturbed)
    if outcome.faults:
        outcome.said = ranks.said()[-20_000:]
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


@contextlib.contextmanager
def _surroundings(trial: Trial, save: Path) -> Iterator[tuple[Node, ...]]:
    """The small disk or the nodes that a fault needs."""
    if trial.kind in LINKS:
        with namespaces(trial.layout.num_ranks, rate_mbit=2000) as nodes:
            yield tuple(nodes)
    elif trial.kind == "no room":
        mount = ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(save)]
        subprocess.run(mount, check=True, capture_output=True)
        try:
            yield ()
        finally:
            subprocess.run(["umount", "--lazy", str(save)], check=True)
    else:
        yield ()


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
        number = SIGNALS.get(trial.kind, SIGNALS["killed"])
        for rank, process in enumerate(ranks.processes):
            if rank == trial.rank or trial.kind == "all killed":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)
    return time.monotonic()


def _watch_end(trial: Trial, ranks: Ranks, outcome: Outcome, began: float) -> None:
    """Wait until all ranks that can have ended; whether they did, with the right words."""
    kind, rank, faults = trial.kind, trial.rank, outcome.faults
    stays = {rank} if kind == "stopped" else set()
    limit_s = LATE_S + (END_S if kind in INSIDE or kind in ENDS_WELL else 0.0)
    ranks.wait(lambda: set(ranks.running()) <= stays, limit_s)
    outcome.seconds = time.monotonic() - began
    late = sorted(set(ranks.running()) - stays)
    outcome.orphans = ranks.orphans()
    if late:
        faults.append(f"ranks {late} had not ended {outcome.seconds:.0f} s later")
    if outcome.orphans:
        faults.append(f"{outcome.orphans} processes were left running")
    statuses, said = ranks.statuses(), ranks.said()
    told = kind == "told to end" and re.search(r"stop(ped| request) \(", said) is not None
    outcome.happened = any(statuses) or told or kind in ENDS_WELL
    if kind in ENDS_WELL:
        if any(statuses):
            faults.append(f"it ended with {statuses}")
    elif outcome.happened and kind not in NAMES_NOBODY:
        outcome.named = _names(kind, rank, said)
        if not outcome.named:
            faults.append(f"rank {rank} was not named")
    elif kind == "no room" and outcome.happened and "No space left on device" not in said:
        faults.append("it was not said that there is no room")
    if "Traceback" in said and kind != "raises":
        faults.append("a traceback was shown")


def _names(kind: str, rank: int, said: str) -> bool:
    """Whether the rank that is to blame was named."""
    if kind == "raises":  # it speaks for itself
        return f"rank {rank}: in " in said and WORDS in said
    if kind in ("never ends", "never joins"):
        return f"; rank {rank}: step " in said
    blamed = re.findall(r"first failure in this job: (?:rank \d+: )?(.*)", said)
    return any(re.search(rf"\brank {rank}\b", blame) for blame in blamed)


def _go_on(
    trial: Trial, outcome: Outcome, ranks: Ranks, saved: int, undisturbed: Undisturbed
) -> None:
    """Wait for the run that was started again, perhaps in another layout; compare its numbers."""
    ranks.wait(lambda: not ranks.running(), END_S)
    late, faults = ranks.running(), outcome.faults
    outcome.orphans += ranks.orphans()
    if late or any(ranks.statuses()):
        faults.append(f"it did not go on: {ranks.statuses()}\n{ranks.said()[-3000:]}")
        return
    found, expected = ranks.found(), undisturbed.of(trial.layout)
    if not found.losses:
        return
    if (lost := saved + 1 - min(found.losses)) > 0 and trial.kind not in FILES:
        faults.append(f"{lost} steps were lost: step {saved} was saved")
    different = [n for n, loss in found.losses.items() if loss != expected.losses[n]]
    if different:
        faults.append(f"steps {different} have other losses")
    if found.tensors != expected.tensors:
        faults.append("other weights")
