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
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from tests.benchmarks.network import unavailable
from tests.chaos.faults import KINDS, LINKS
from tests.chaos.layouts import Undisturbed
from tests.chaos.trial import Outcome, Trial, draw_trial, run_trial


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    args = _parse(argv)
    kinds = tuple(args.kinds)
    if why := unavailable():
        kinds = tuple(kind for kind in kinds if kind not in LINKS)
        print(f"links are left alone: {why}")
    if os.geteuid():
        kinds = tuple(kind for kind in kinds if kind != "no room")
        print("disks are not filled: to mount a small one needs root")
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        for outcome in disturb(args, kinds, Path(folder)):
            outcomes.append(outcome)
            state = "; ".join(outcome.faults) or ("sound" if outcome.happened else "too late")
            print(f"{outcome.trial}: {state} ({outcome.seconds:.1f} s)", flush=True)
            if args.json:
                args.json.write_text(
                    json.dumps([one.to_dict() for one in outcomes], indent=1) + "\n"
                )
    print(table(outcomes))
    return int(any(outcome.faults for outcome in outcomes))


def disturb(args: argparse.Namespace, kinds: tuple[str, ...], folder: Path) -> Iterator[Outcome]:
    """Outcomes of trials, as they come, until there is no time for another."""
    undisturbed = Undisturbed(folder)
    deadline = time.monotonic() + args.seconds

    def run(trial: Trial) -> Outcome:
        return run_trial(args.seed, trial, undisturbed, folder / f"trial-{trial.number}")

    numbers = iter(range(args.trials) if args.only is None else [args.only])
    with ThreadPoolExecutor(args.jobs) as pool:
        running: set[Future[Outcome]] = set()
        while True:
            while len(running) < args.jobs and time.monotonic() < deadline:
                if (number := next(numbers, None)) is None:
                    break
                running.add(pool.submit(run, draw_trial(args.seed, number, kinds)))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)


def table(outcomes: Sequence[Outcome]) -> str:
    """Figures per kind of fault."""
    rows = ["", "| fault | trials | happened | sound | rank named | longest s | orphans |"]
    rows.append("|---|---|---|---|---|---|---|")
    by_kind: defaultdict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_kind[outcome.kind].append(outcome)
    for kind, group in [*sorted(by_kind.items()), ("all", list(outcomes))]:
        there = [one for one in group if one.happened]
        asked = [one.named for one in there if one.named is not None]
        rows.append(
            f"| {kind} | {len(group)} | {len(there)} | {sum(not one.faults for one in group)} | "
            f"{f'{sum(map(bool, asked))} of {len(asked)}' if asked else '-'} | "
            f"{max((one.seconds for one in there), default=0.0):.1f} | "
            f"{sum(one.orphans for one in group)} |"
        )
    return "\n".join(rows)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="no trial begins later (600)")
    parser.add_argument("--trials", type=int, default=10**9, help="at most so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="this trial alone")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, metavar="KIND",
                        help=f"of {', '.join(KINDS)}")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=1, help="trials side by side (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every outcome, as they come")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
