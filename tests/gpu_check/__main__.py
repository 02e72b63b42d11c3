"""``bash launch/gpu_check.sh``: runs checks and writes one report."""

from __future__ import annotations

import argparse
import math
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_pulse.errors import format_faults
from megatron_pulse.files import unwritable
from tests.gpu_check.check import Check, Result, Verdict
from tests.gpu_check.checks import CHECKS
from tests.gpu_check.machine import ask
from tests.gpu_check.report import in_words, read_earlier, write_report
from tests.gpu_check.runner import foreign, run_checks
from tests.launch.sessions import ROOT

_DESCRIPTION = """\
Checks a GPU with everything here: whether it runs, gives the right numbers, and how fast.

Every check is a process of its own, which is ended with all that it started when its time limit is
over, and has one of four verdicts: passed, FAILED, skipped (with the reason), timed out. After each
the report is written anew, so that what was found stays if this is stopped:

  report.md     for people: a table of verdicts, what was found, the end of the output of failures
  report.json   the same for programs
  NAME/         what a check wrote; its whole output is in NAME/output.txt

What a report there says of other checks, on the same GPUs, stays in it, as of an earlier run.
Without a GPU what needs none is run on CPU over gloo, at tiny sizes. What needs two ranks runs on
two GPUs, or on one where NCCL is 2.30 or newer and NCCL_MULTI_RANK_GPU_ENABLE=1 is set.
The exit status is 0 if all passed or were skipped, 1 if any failed or timed out, 2 for options that
cannot be.

examples:
  bash launch/gpu_check.sh --list
  bash launch/gpu_check.sh --out report-h200
  bash launch/gpu_check.sh --only profiles memory --seconds-scale 3
"""


def main(argv: Sequence[str] | None = None, checks: Sequence[Check] = CHECKS) -> int:
    """Run the command; returns its exit status."""
    args = _parse(argv, checks)
    chosen = [c for c in checks if not args.only or c.name in args.only]
    if args.list:
        for check in chosen:
            limit = f"{args.seconds_scale * check.limit_s:.0f} s"
            print(f"{check.name:18s} {check.need:18s} {limit:>7s}  {check.why}")
        return 0
    machine = ask()
    print(f"On {', '.join(machine.gpus) or 'CPU'}; report: {args.out / 'report.md'}", flush=True)
    results: list[Result] = []
    names = [check.name for check in chosen]
    earlier = read_earlier(args.out, machine, names)
    write_report(args.out, machine, earlier, names)
    _announce(names, 0)
    for result in run_checks(chosen, machine, args.out, args.seconds_scale):
        results.append(result)
        write_report(args.out, machine, [*earlier, *results], names[len(results) :])
        said = f" ({result.reason})" if result.reason else ""
        print(f"{result.verdict}, {result.seconds:.0f} s{said}", flush=True)
        _announce(names, len(results))
    print(f"{in_words(results)}; report: {args.out / 'report.md'}", flush=True)
    return int(any(r.verdict in (Verdict.FAILED, Verdict.TIMED_OUT) for r in results))


def _announce(names: Sequence[str], done: int) -> None:
    if done < len(names):
        print(f"[{done + 1}/{len(names)}] {names[done]} ... ", end="", flush=True)


def _parse(argv: Sequence[str] | None, checks: Sequence[Check]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bash launch/gpu_check.sh",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu_check"), metavar="FOLDER",
        help="where the report goes (default: runs/gpu_check)",
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these checks, in their order")
    parser.add_argument("--list", action="store_true", help="list the checks, and run none")
    parser.add_argument(
        "--seconds-scale", type=float, default=1.0, metavar="X", help="all time limits times X"
    )
    args = parser.parse_args(argv)
    names = {check.name for check in checks}
    there = f"there are: {', '.join(check.name for check in checks)}"
    unknown = [name for name in args.only or () if name not in names]
    faults = [f"no check is called {name!r}; {there}" for name in unknown]
    if not (math.isfinite(args.seconds_scale) and args.seconds_scale > 0):
        faults.append(f"--seconds-scale must be a number above 0, is {args.seconds_scale:g}")
    if args.out.resolve() == ROOT:
        faults.append("--out: the report has many folders; give it one of its own")
    if why := unwritable(args.out, "--out "):
        faults.append(why)
    if not args.list:
        faults += foreign([c for c in checks if not args.only or c.name in args.only], args.out)
    if faults:
        parser.exit(2, f"error: {format_faults('gpu check', faults)}\n")
    args.out = args.out.resolve()
    return args


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):  # what runs is ended on the way out
        signal.signal(number, lambda received, frame: sys.exit(128 + received))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nstopped; what was found until now is in the report", flush=True)
        sys.exit(128 + signal.SIGINT)
