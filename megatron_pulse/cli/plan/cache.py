"""``pulse cache``: schedules that were found before, and are taken up again."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

from megatron_pulse.cli.errors import add_parser

if TYPE_CHECKING:
    from megatron_pulse.planner.schedule.cache import Stored

_DESCRIPTION = """\
Schedules are kept in $PULSE_CACHE_DIR, or else in megatron_pulse below $XDG_CACHE_HOME or ~/.cache.
One is taken up again for the same placement, microbatches, cap and solver, and the same ratios of
times to 1 %, if the search had as much time as is offered now or nothing can be shorter. It is
always checked and timed anew. The least used go when all take more than 64 MB; clearing loses
nothing but time.

examples:
  pulse cache
  pulse cache --clear
  PULSE_CACHE_DIR=/shared/schedules pulse schedule --times times.json -p 8 -m 32
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``cache``."""
    parser = add_parser(commands, "cache", "list or clear kept schedules", _DESCRIPTION)
    parser.add_argument("--clear", action="store_true", help="remove all of them")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run, command="cache")


def run(args: argparse.Namespace) -> None:
    """List, or clear."""
    from megatron_pulse.planner.schedule.cache import clear, directory, stored

    if args.clear:
        gone = clear()
        if args.json:
            print(json.dumps({"directory": str(directory()), "removed": gone}))
        else:
            print(f"removed {gone} schedule(s) from {directory()}")
        return
    items = stored()
    if args.json:
        record = {"directory": str(directory()), "entries": [_record(item) for item in items]}
        print(json.dumps(record, indent=1))
    else:
        print("\n".join([f"kept schedules: {directory()}", *_table(items)]))


def _record(item: Stored) -> dict[str, Any]:
    entry = item.entry
    placement, made = entry.schedule.placement, entry.certificate
    return {
        "key": item.path.stem,
        "placement": placement.kind.value,
        "num_devices": placement.num_devices,
        "num_stages": placement.num_stages,
        "num_microbatches": entry.schedule.num_microbatches,
        "split": len(entry.schedule.kinds) == 3,
        "cap": None if entry.cap is None else max(entry.cap),
        "asked": entry.solver,
        "solver": made.solver,
        "offered_s": entry.offered_s,
        "makespan": made.makespan,
        "lower_bound": made.lower_bound,
        "gap": made.gap,
        "proved": made.proved,
        "num_bytes": item.num_bytes,
        "age_s": max(0.0, time.time() - item.used),
    }


def _table(items: list[Stored]) -> list[str]:
    if not items:
        return ["none"]
    lines = [
        f"{'placement':12s}{'P':>4s}{'stages':>8s}{'M':>6s}{'backward':>10s}{'cap':>8s}"
        f"{'asked':>8s}{'offered':>9s}{'gap':>11s}{'size':>10s}{'used':>10s}  found by"
    ]
    for record in map(_record, items):
        gap = "proved" if record["proved"] else f"{100 * record['gap']:.2f} %"
        cap = "none" if record["cap"] is None else f"{record['cap']:.4g}"
        lines.append(
            f"{record['placement']:12s}{record['num_devices']:4d}{record['num_stages']:8d}"
            f"{record['num_microbatches']:6d}{'split' if record['split'] else 'whole':>10s}"
            f"{cap:>8s}{record['asked']:>8s}{record['offered_s']:7.3g} s{gap:>11s}"
            f"{record['num_bytes'] / 1e3:7.1f} kB{_ago(record['age_s']):>10s}  {record['solver']}"
        )
    total = sum(item.num_bytes for item in items)
    return [*lines, f"{len(items)} schedule(s), {total / 1e6:.2f} MB; used: how long ago"]


def _ago(seconds: float) -> str:
    for name, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {name}"
    return f"{seconds:.0f} s"
