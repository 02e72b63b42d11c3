"""What the watchdog costs a step, in real runs of two ranks with it and without, in turn.

    .venv/bin/python -m tests.benchmarks.watching
    .venv/bin/python -m tests.benchmarks.watching --runs 9 --timeout-s 20   # it looks every second

Medians over the steps of a run, of rank 0: time, and CPU time of all threads but the watchdog's.
Its own thread is told apart: its CPU time while steps ran, of their time.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from megatron_pulse.cli.import_megatron import prepare_megatron
from tests.benchmarks.report import Flags, Report
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


def main() -> None:
    """Run in turn, and print."""
    flags = Flags(__doc__)
    flags.add("--runs", 5, "of each kind")
    flags.add("--timeout-s", 300.0, "of the watchdog")
    args = flags.parse_args()
    prepare_megatron()
    run = [*TINY["uvit"], *BASE, *pipeline(2), "--global-batch-size", "8"]
    run += ["--train-iters", str(STEPS), "--pulse-timeout-s", f"{args.timeout_s:g}"]
    report = Report(args.json)
    for _ in range(args.runs):
        both = [run_ranks(2, timed, run, watches)[0] for watches in (False, True)]
        without, within = (1e3 * median(seen.steps[5:]) for seen in both)
        own = both[1].watched / sum(both[1].steps)
        computed = [median(seen.computed[5:]) for seen in both]
        row = {"step without, ms": without, "with": within, "ratio": within / without}
        row |= {"of CPU time": computed[1] / computed[0], "its own thread, % of a step": 100 * own}
        report.add(row)
    _, _, *medians = (median(row[name] for row in report.rows) for name in report.rows[0])
    time_ratio, cpu_ratio, own = medians
    print(f"\nmedians: {time_ratio:.3f} of the time, {cpu_ratio:.3f} of the CPU time")
    print(f"its own thread: {own:.2f} % of a step")


if __name__ == "__main__":
    main()
