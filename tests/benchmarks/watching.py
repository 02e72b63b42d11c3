"""What the watchdog costs a step, in real runs of two ranks with it and without, in turn.

    .venv/bin/python -m tests.benchmarks.watching
    .venv/bin/python -m tests.benchmarks.watching --runs 9 --timeout-s 20   # it looks every second

Medians over the steps of a run, of rank 0: time, and CPU time of all threads but the watchdog's.
Its own thread is told apart: its CPU time while steps ran, of their time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_pulse.cli.import_megatron import prepare_megatron
from tests.integration.runs import BASE, TINY, pipeline, train
from tests.ranks import run_ranks

STEPS = 40


@dataclass
class Seen:
    """Of one run, in seconds: its steps, their CPU time, and that of the watchdog's thread."""

    steps: list[float] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)
    watched: float = 0.0


def timed(flags: list[str], watches: bool) -> Seen:
    """One rank's part of a run."""
    import megatron.training.training as training

    from megatron_pulse.integration import pretrain

    if not watches:
        pretrain.start_watchdog = lambda job, args, options: None
    seen, step = Seen(), training.train_step

    def watchdog() -> float:
        threads = [thread for thread in threading.enumerate() if thread.name == "watch"]
        clocks = [time.pthread_getcpuclockid(thread.ident) for thread in threads if thread.ident]
        return sum(map(time.clock_gettime, clocks))

    def timed_step(*args: Any, **kwargs: Any) -> Any:
        begin, computed, watched = time.perf_counter(), time.process_time(), watchdog()
        result = step(*args, **kwargs)
        watched = watchdog() - watched
        seen.computed.append(time.process_time() - computed - watched)
        seen.steps.append(time.perf_counter() - begin)
        seen.watched += watched
        return result

    training.train_step = timed_step
    train(flags)
    return seen


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.watching",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=5, help="of each kind (5)")
    parser.add_argument("--timeout-s", type=float, default=300, help="of the watchdog (300)")
    args = parser.parse_args(argv)
    prepare_megatron()
    flags = [*TINY["uvit"], *BASE, *pipeline(2), "--global-batch-size", "8"]
    flags += ["--train-iters", str(STEPS), "--pulse-timeout-s", f"{args.timeout_s:g}"]
    print("| step without, ms | with | ratio | of CPU time | its own thread, of a step |")
    print("|---|---|---|---|---|")
    ratios = []
    for _ in range(args.runs):
        without, within = (run_ranks(2, timed, flags, watches)[0] for watches in (False, True))
        steps = [statistics.median(seen.steps[5:]) for seen in (without, within)]
        computed = [statistics.median(seen.computed[5:]) for seen in (without, within)]
        own = within.watched / sum(within.steps)
        ratios.append((steps[1] / steps[0], computed[1] / computed[0], own))
        print(
            f"| {1e3 * steps[0]:.1f} | {1e3 * steps[1]:.1f} | {ratios[-1][0]:.3f} | "
            f"{ratios[-1][1]:.3f} | {100 * own:.2f} % |",
            flush=True,
        )
    time_ratio, cpu_ratio, own = (statistics.median(column) for column in zip(*ratios, strict=True))
    print(f"\nmedians: {time_ratio:.3f} of the time, {cpu_ratio:.3f} of the CPU time, and "
          f"{100 * own:.2f} % of a step in its own thread")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
