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
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_pulse.cli.import_megatron import prepare_megatron
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
        usual = statistics.median(self.quiet)
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


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.saving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--width", type=int, default=256, help="of the U-ViT (256: 100 MB)")
    parser.add_argument("--runs", type=int, default=3, help="of each kind (3)")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written (a new one)")
    parser.add_argument("--hashes", action="store_true", help="what hashing adds to a save")
    args = parser.parse_args(argv)
    prepare_megatron()
    if args.hashes:
        hashing(args)
    else:
        holding_up(args)
    return 0


def holding_up(args: argparse.Namespace) -> None:
    """At once and beside training."""
    # The last save that counts is not waited for.
    steps = INTERVAL * SAVES + INTERVAL - 1
    ways = {"at once": [], "beside": ["--async-save"]}
    ways["beside, planned once"] = [*ways["beside"], "--ckpt-assume-constant-structure"]
    found: dict[str, list[Seen]] = {name: [] for name in ways}
    for _ in range(args.runs):
        for name, more in ways.items():
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                flags = [*flags_of(args.width, steps, INTERVAL), *more]
                found[name].append(run_ranks(2, watched, flags, folder)[0])
    print(f"{found['at once'][0].num_bytes / 1e6:.0f} MB a checkpoint, {args.runs} runs of each")
    print(
        "\n| | held up, ms (all) | steps beside | slower, ms | a step, ms |\n|---|---|---|---|---|"
    )
    medians = {}
    for name, runs in found.items():
        held = [1e3 * one for seen in runs for one in seen.held()]
        slower = statistics.median(1e3 * one for seen in runs for one in seen.slower())
        beside = statistics.median(len(one) for seen in runs for one in seen.beside[1:SAVES])
        usual = 1e3 * statistics.median(one for seen in runs for one in seen.quiet)
        medians[name] = statistics.median(held)
        print(
            f"| {name} | {medians[name]:.0f} ({min(held):.0f} to {max(held):.0f}) "
            f"| {beside:g} | {slower:.0f} | {usual:.0f} |"
        )
    print(f"\nbeside training, {medians['beside'] / medians['at once']:.2f} of the time at once")


def hashing(args: argparse.Namespace) -> None:
    """With hashes and without."""
    saves = 2 * SAVES * 2
    wall: dict[bool, list[float]] = {True: [], False: []}
    cpu: dict[bool, list[float]] = {True: [], False: []}
    ratios = []
    for _ in range(args.runs):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            seen = run_ranks(2, watched, flags_of(args.width, saves, 1), folder, True)[0]
        own: dict[bool, list[float]] = {True: [], False: []}
        for number in range(2, saves):
            wall[number % 2 == 0].append(1e3 * seen.begun[number])
            cpu[number % 2 == 0].append(1e3 * seen.computed[number])
            own[number % 2 == 0].append(seen.computed[number])
        ratios.append(statistics.median(own[True]) / statistics.median(own[False]))
    print(f"{seen.num_bytes / 1e6:.0f} MB a checkpoint, {args.runs} runs, saves in turn")
    print("\n| | a save, ms | CPU of a rank, ms |\n|---|---|---|")
    for with_hashes, name in ((True, "hashed"), (False, "not hashed")):
        medians = (statistics.median(times[with_hashes]) for times in (wall, cpu))
        print(f"| {name} | {' | '.join(f'{one:.0f}' for one in medians)} |")
    print(
        f"\nhashing: {statistics.median(wall[True]) / statistics.median(wall[False]):.3f} of a "
        f"save's time, {statistics.median(ratios):.3f} of its CPU time ("
        f"{', '.join(f'{one:.3f}' for one in ratios)})"
    )


if __name__ == "__main__":
    sys.exit(main())
