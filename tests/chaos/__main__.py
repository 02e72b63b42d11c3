"""Disturb runs at random for a stated time, and look at what becomes of them.

    .venv/bin/python -m tests.chaos --seconds 3600 --seed 1 --json chaos.json
    .venv/bin/python -m tests.chaos --seed 1 --only 17               # that trial again
    .venv/bin/python -m tests.chaos --kinds killed stopped --trials 20

Every trial is a run of two to four ranks in a random layout, something that happens to it (see
--kinds) at a random moment, and the same command again, perhaps in another layout. Checked is that
nothing hangs past the limit, that the message names the right rank, that no process is left, that
no step beyond the last save is lost, and that losses, weights and masters at the end equal those
of a run that nothing disturbed, to the last bit. A trial depends on the seed, its number and the
kinds alone, but for the moment, which is the clock's. The exit status is 1 if any check fails.
Links are disturbed in network namespaces and small disks are mounted, as root; without those
rights their kinds are left out, which is said.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from tests.benchmarks.network import unavailable
from tests.benchmarks.report import Flags, record, table, write_json
from tests.chaos.faults import KINDS, LINKS
from tests.chaos.runs import Undisturbed
from tests.chaos.trial import Outcome, draw_trial, run_trial


def main() -> int:
    """The command; its exit status."""
    flags = Flags(__doc__)
    flags.add("--seconds", 600.0, "no trial begins later")
    flags.add("--trials", 10**9, "at most so many")
    flags.add("--seed", 0, type=int)
    flags.add("--only", type=int, metavar="NUMBER", help="this trial alone")
    flags.add("--kinds", KINDS, "of faults", nargs="+", choices=KINDS, metavar="KIND")
    flags.add("--jobs", 1, "trials side by side")
    args = flags.parse_args()
    if why := unavailable():
        args.kinds = [kind for kind in args.kinds if kind not in LINKS]
        print(f"links are left alone: {why}")
    if os.geteuid():
        args.kinds = [kind for kind in args.kinds if kind != "no room"]
        print("disks are not filled: to mount a small one needs root")
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        for outcome in disturb(args, Path(folder)):
            outcomes.append(outcome)
            state = "; ".join(outcome.faults) or ("sound" if outcome.happened else "too late")
            print(f"{outcome.trial}: {state} ({outcome.seconds:.1f} s)", flush=True)
            if args.json:
                write_json(args.json, list(map(record, outcomes)))
    print("\n".join(["", *figures(outcomes)]))
    return int(any(outcome.faults for outcome in outcomes))


def disturb(args: argparse.Namespace, folder: Path) -> Iterator[Outcome]:
    """Outcomes of trials, as they come, until there is no time for another."""
    undisturbed, deadline = Undisturbed(folder), time.monotonic() + args.seconds

    def run(number: int) -> Outcome:
        trial = draw_trial(args.seed, number, tuple(args.kinds))
        return run_trial(args.seed, trial, undisturbed, folder / f"trial-{number}")

    numbers = iter(range(args.trials) if args.only is None else [args.only])
    with ThreadPoolExecutor(args.jobs) as pool:
        running: set[Future[Outcome]] = set()
        while True:
            while len(running) < args.jobs and time.monotonic() < deadline:
                if (number := next(numbers, None)) is None:
                    break
                running.add(pool.submit(run, number))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)


def figures(outcomes: Sequence[Outcome]) -> list[str]:
    """Table of figures per kind of fault."""
    rows = []
    for kind in (*sorted({outcome.kind for outcome in outcomes}), "all"):
        group = [one for one in outcomes if kind in (one.kind, "all")]
        there = [one for one in group if one.happened]
        asked = [one.named for one in there if one.named is not None]
        row = {"fault": kind, "trials": len(group), "happened": len(there)}
        row["sound"] = sum(not one.faults for one in group)
        row["rank named"] = f"{sum(asked)} of {len(asked)}" if asked else "-"
        row["longest s"] = f"{max((one.seconds for one in there), default=0.0):.1f}"
        rows.append(row | {"orphans": sum(one.orphans for one in group)})
    return table(rows)


if __name__ == "__main__":
    sys.exit(main())
