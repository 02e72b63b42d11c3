"""How long checkpoints hold up a step, and what hashing them takes, in real runs of two ranks.

    .venv/bin/python -m tests.benchmarks.saving
    .venv/bin/python -m tests.benchmarks.saving --hashes       # saves with and without, in turn
    .venv/bin/python -m tests.benchmarks.saving --width 512 --runs 5 --folder /scratch

A U-ViT in Megatron's loop saves every few steps: weights, their average and Adam's state in fp32.
*Held up* is what the loop waits, in saving and in ending what was written beside it; *slower* is
what the steps made while a thread writes take beyond the median of the others. Runs at once and
beside training are in turn; medians over all saves but the first of each run, on rank 0. With
``--hashes`` runs save at once, after every step, and every other save is not hashed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from megatron_pulse.cli.import_megatron import prepare_megatron
from tests.benchmarks.report import Flags, Report
from tests.integration.runs import BASE, pipeline, train
from tests.ranks import run_ranks

INTERVAL, SAVES = 8, 4
"""Steps between saves, and saves of a run."""


@dataclass
class Seen:
    """Of one run, in seconds: steps beside which nothing was written, and for each save what
    beginning it took, what ending it, each step beside it, and the rank's CPU time to begin it."""

    quiet: list[float] = field(default_factory=list)
    begun: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    beside: list[list[float]] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)
    num_bytes: int = 0

    def held(self) -> list[float]:
        """What the loop waited for each save; not of the first, nor of the run's last."""
        held = [begun + ended for begun, ended in zip(self.begun, self.ended, strict=True)]
        return held[1:SAVES]

    def slower(self) -> list[float]:
        """What the steps beside each of these took more."""
        usual = median(self.quiet)
        return [sum(step - usual for step in steps) for steps in self.beside[1:SAVES]]


@contextmanager
def unhashed() -> Iterator[None]:
    """Within, what is written is not hashed."""
    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem

    from megatron_pulse.integration.checkpoint import saving

    originals = filesystem.open, saving.gather_hashes
    filesystem.open = open
    saving.gather_hashes = lambda folder, mine: {}
    yield
    filesystem.open, saving.gather_hashes = originals


def watched(flags: list[str], folder: str, in_turn: bool = False) -> Seen:
    """One rank's part of a run; with ``in_turn`` the second save is not hashed, the fourth..."""
    import megatron.training.training as training
    from megatron.training.async_utils import is_empty_async_queue

    from megatron_pulse.integration.checkpoint.saving import Saving

    seen = Seen()
    save, finish, step = Saving.save, Saving.finish, training.train_step

    def timed_save(self: Saving, *args: Any, **kwargs: Any) -> None:
        begin, computed = time.perf_counter(), time.process_time()
        with unhashed() if in_turn and len(seen.begun) % 2 else nullcontext():
            save(self, *args, **kwargs)
        seen.computed.append(time.process_time() - computed)
        seen.begun.append(time.perf_counter() - begin)
        seen.ended.append(0.0)
        seen.beside.append([])

    def timed_finish(self: Saving, *args: Any, **kwargs: Any) -> None:
        begin, writes = time.perf_counter(), not is_empty_async_queue()
        finish(self, *args, **kwargs)
        if writes:
            seen.ended[-1] += time.perf_counter() - begin

    def timed_step(*args: Any, **kwargs: Any) -> Any:
        begin, writes = time.perf_counter(), not is_empty_async_queue()
        result = step(*args, **kwargs)
        (seen.beside[-1] if writes else seen.quiet).append(time.perf_counter() - begin)
        return result

    Saving.save, Saving.finish = timed_save, timed_finish  # type: ignore[method-assign]
    training.train_step = timed_step
    train([*flags, "--save", folder])
    newest = max(Path(folder).glob("iter_*"))
    seen.num_bytes = sum(file.stat().st_size for file in newest.iterdir())
    return seen


def flags_of(width: int, steps: int, interval: int) -> list[str]:
    """A run of a U-ViT of that width on two devices."""
    options = {"in_channels": 1, "depth": 8, "embed_dim": width}
    return [
        "--pulse-backbone", "uvit-tiny", *BASE, *pipeline(2), "--global-batch-size", "8",
        *(word for key, value in options.items() for word in ("--pulse-option", f"{key}={value}")),
        "--train-iters", str(steps), "--save-interval", str(interval),
    ]  # fmt: skip


def main() -> None:
    """Run in turn, and print."""
    flags = Flags(__doc__)
    flags.add("--width", 256, "of the U-ViT (256: 100 MB)")
    flags.add("--runs", 3, "of each kind")
    flags.add("--folder", help="where checkpoints are written (a new one)", type=Path)
    flags.add("--hashes", False, "what hashing adds to a save")
    args = flags.parse_args()
    prepare_megatron()
    (hashing if args.hashes else holding_up)(args, Report(args.json))


def holding_up(args: argparse.Namespace, report: Report) -> None:
    """At once and beside training."""
    # The last save that counts is not waited for.
    flags = flags_of(args.width, INTERVAL * SAVES + INTERVAL - 1, INTERVAL)
    ways = {"at once": [], "beside": ["--async-save"]}
    ways["beside, planned once"] = [*ways["beside"], "--ckpt-assume-constant-structure"]
    found: dict[str, list[Seen]] = {name: [] for name in ways}
    for _ in range(args.runs):
        for name, more in ways.items():
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                found[name].append(run_ranks(2, watched, [*flags, *more], folder)[0])
    print(f"{found['at once'][0].num_bytes / 1e6:.0f} MB a checkpoint, {args.runs} runs of each")
    for name, runs in found.items():
        held = [1e3 * one for seen in runs for one in seen.held()]
        beside = [steps for seen in runs for steps in seen.beside[1:SAVES]]
        row = {"saved": name, "held up, ms": median(held), "all": (min(held), max(held))}
        row["steps beside"] = median(map(len, beside))
        row["slower, ms"] = 1e3 * median(one for seen in runs for one in seen.slower())
        row["a step, ms"] = 1e3 * median(one for seen in runs for one in seen.quiet)
        report.add(row)
    once, beside, _ = (row["held up, ms"] for row in report.rows)
    print(f"\nbeside training, {beside / once:.2f} of the time at once")


def hashing(args: argparse.Namespace, report: Report) -> None:
    """With hashes and without: even saves are hashed, odd ones are not."""
    saves = 2 * SAVES * 2
    flags, runs = flags_of(args.width, saves, 1), []
    for _ in range(args.runs):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            runs.append(run_ranks(2, watched, flags, folder, True)[0])
    print(f"{runs[0].num_bytes / 1e6:.0f} MB a checkpoint, {args.runs} runs, saves in turn")
    for name, first in (("hashed", 2), ("not hashed", 3)):
        wall, cpu = (
            1e3 * median(one for seen in runs for one in getattr(seen, times)[first::2])
            for times in ("begun", "computed")
        )
        report.add({"saves": name, "a save, ms": wall, "CPU of a rank, ms": cpu})
    hashed, bare = (row["a save, ms"] for row in report.rows)
    ratios = [median(seen.computed[2::2]) / median(seen.computed[3::2]) for seen in runs]
    print(
        f"\nhashing: {hashed / bare:.3f} of a save's time, {median(ratios):.3f} of its CPU time ("
        f"{', '.join(f'{one:.3f}' for one in ratios)})"
    )


if __name__ == "__main__":
    main()
