"""``pulse checkpoint``: list, verify and prune the checkpoints in a folder."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_pulse.cli.flag_checks import (
    add_flag,
    add_parser,
    as_user_error,
    command_faults,
    require,
)
from megatron_pulse.cli.import_megatron import prepare_megatron
from megatron_pulse.cli.output import add_json, print_result, table
from megatron_pulse.errors import UserError
from megatron_pulse.progress import ProgressLine

if TYPE_CHECKING:
    from megatron_pulse.integration.checkpoint.selection.stored_checkpoints import StoredCheckpoint

_DESCRIPTION = """\
The folder is what training was given as --save.

'list' shows size and age of each step, and whether its files have the sizes that were saved.
'verify' reads every byte and compares hashes. It ends with status 1 if anything is damaged, or
moved to another step's name. A step that a live run is saving is no fault. A run that finds its
newest checkpoint damaged resumes from the newest whole one and renames the damaged one.
'prune' removes all steps but the --keep newest, those divisible by --every, the best one, and the
one that a run would resume from. What stays is read first; damaged steps do not count. --damaged
also removes damaged, half-written and renamed ones. A folder that a run writes into is refused.
Names of your own (iter_0000100.keep) are left alone.

examples:
  pulse checkpoint list runs/a
  pulse checkpoint verify runs/a
  pulse checkpoint verify runs/a --step 4000 --json
  pulse checkpoint prune runs/a --keep 3 --every 10000 --dry-run
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``checkpoint``."""
    parser = add_parser(
        commands, "checkpoint", "list, verify and prune a run's checkpoints", _DESCRIPTION, run
    )
    add_flag(parser, "action", "what to do", choices=["list", "verify", "prune"])
    add_flag(parser, "folder DIR", "folder given as --save", type=Path)
    add_flag(parser, "--step N", "verify: only these steps", type=int, nargs="+")
    add_flag(parser, "--keep N", "prune: keep the N newest", type=int)
    add_flag(parser, "--every K", "prune: also keep steps divisible by K", type=int)
    add_flag(parser, "--damaged", "prune: also remove damaged, half-written and renamed steps")
    add_flag(parser, "--dry-run", "prune: only list what would be removed")
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Run the action."""
    require([*_faults(args), *command_faults(args)])
    prepare_megatron()
    from megatron_pulse.integration.checkpoint.folders import CheckpointError
    from megatron_pulse.integration.checkpoint.lock import FolderInUse
    from megatron_pulse.integration.checkpoint.selection.stored_checkpoints import stored_in

    with as_user_error(FolderInUse, CheckpointError, OSError):
        match args.action:
            case "list":
                stored = stored_in(args.folder)
                print_result(args, _listed(stored), lambda: [_record(one) for one in stored])
            case "verify":
                _verify(args, stored_in(args.folder))
            case _:
                _prune(args)


def _faults(args: argparse.Namespace) -> list[str]:
    given = {
        "--keep": args.keep is not None,
        "--every": args.every is not None,
        "--damaged": args.damaged,
        "--dry-run": args.dry_run,
    }
    faults = []
    if args.action == "prune":
        if args.keep is None:
            faults.append("prune needs --keep, the number of newest steps that stay")
        elif args.keep < 1:
            faults.append(f"--keep {args.keep} must be at least 1")
        if args.every is not None and args.every < 1:
            faults.append(f"--every {args.every} must be at least 1")
    elif said := [flag for flag, is_given in given.items() if is_given]:
        faults.append(f"{', '.join(said)}: only for 'prune'")
    if args.step is not None and args.action != "verify":
        faults.append("--step: only for 'verify'")
    return faults


def _listed(stored: Sequence[StoredCheckpoint]) -> list[str]:
    rows = [["step", "size", "age", "state"]]
    rows += [[_name(one), _size(one.num_bytes), _age(one.written), _state(one)] for one in stored]
    return table(rows, left=[-1])


def _name(one: StoredCheckpoint) -> str:
    return str(one.step) if one.step is not None else one.folder.name


def _state(one: StoredCheckpoint) -> str:
    said = (
        ["being saved"] * one.is_begun
        or list(one.faults[:1])
        or ["sizes as saved" if one.is_hashed else "saved without hashes"]
    )
    said += [f"and {len(one.faults) - 1} more"] * (len(one.faults) > 1)
    said += ["the newest"] * one.is_newest + ["the best"] * one.is_best + ["a link"] * one.is_link
    return ", ".join(said)


def _size(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def _age(written: float) -> str:
    seconds = max(0.0, time.time() - written)
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _record(one: StoredCheckpoint) -> dict[str, Any]:
    return {
        "folder": str(one.folder),
        "step": one.step,
        "bytes": one.num_bytes,
        "written": one.written,
        "newest": one.is_newest,
        "best": one.is_best,
        "faults": list(one.faults),
    }


def _verify(args: argparse.Namespace, stored: Sequence[StoredCheckpoint]) -> None:
    from megatron_pulse.integration.checkpoint.selection.stored_checkpoints import (
        is_being_saved,
        require_newest,
    )

    chosen = [one for one in stored if not one.is_aside]
    if args.step is not None:
        chosen = [one for one in stored if one.step in args.step]
        there = {one.step for one in chosen}
        require(
            [f"--step {n}: {args.folder} has no such step" for n in args.step if n not in there]
        )
    found: dict[str, list[str]] = {}
    with _reading(sum(one.num_bytes for one in chosen)) as read:
        for one in chosen:
            found[_name(one)] = [] if one.is_begun else list(one.read(read).faults)
    whole = {one: "whole" if one.is_hashed else "saved without hashes" for one in chosen}
    for one in chosen:
        if one.is_begun or (found[_name(one)] and is_being_saved(one)):
            found[_name(one)], whole[one] = [], "being saved"
    lines = [f"step {_name(one)}: {'; '.join(found[_name(one)]) or whole[one]}" for one in chosen]
    record = [{**_record(one), "faults": found[_name(one)]} for one in chosen]
    if (frozen := _frozen_weights(args.folder)) is not None:
        place, found["frozen weights"] = frozen
        lines.append(f"frozen weights in {place}: {'; '.join(found['frozen weights']) or 'whole'}")
    print_result(args, lines, lambda: record)
    if args.step is None:
        require_newest(args.folder, stored)
    if any(found.values()):
        raise SystemExit(1)


def _frozen_weights(folder: Path) -> tuple[str, list[str]] | None:
    """Place and faults of the frozen weights that the newest checkpoint leaves out, if any."""
    from megatron_pulse.integration.checkpoint.integrity.verify import find_damage
    from megatron_pulse.integration.checkpoint.saved_run import read_saved_run

    frozen = None
    with suppress(UserError):  # the faults of that checkpoint are told already
        frozen = read_saved_run(folder).frozen_weights
    if frozen is None:
        return None
    try:
        place = frozen.located()
    except UserError as error:
        return frozen.folder, [str(error)]
    return frozen.folder, find_damage(place) if frozen.imported else []


@contextmanager
def _reading(num_bytes: int) -> Iterator[Callable[[int], object]]:
    """Progress line of reading ``num_bytes`` bytes; yields the function that counts them."""
    with ProgressLine("verifying", num_bytes / 1e6, "MB") as line:
        yield lambda num_bytes: line.advance(num_bytes / 1e6)


def _prune(args: argparse.Namespace) -> None:
    from megatron_pulse.integration.checkpoint.selection import pruning
    from megatron_pulse.integration.checkpoint.selection.stored_checkpoints import stored_in

    with nullcontext() if args.dry_run else pruning.locked(args.folder):
        stored = stored_in(args.folder, is_held=not args.dry_run)
        with _reading(sum(one.num_bytes for one in stored[-args.keep :])) as read:
            known, staying = pruning.read_checkpoints_to_keep(stored, args.keep, read)
        chosen = pruning.to_remove(known, staying, args.every, args.damaged)
        gone = chosen if args.dry_run else list(pruning.remove(chosen))
    verb = "would be removed" if args.dry_run else "removed"
    lines = [f"{verb}: {one.folder.name} ({_size(one.num_bytes)})" for one in gone]
    left = len(stored) - len(gone)
    freed = _size(sum(one.num_bytes for one in gone))
    lines.append(f"{len(gone)} {verb}, {freed}; {left} {'would stay' if args.dry_run else 'stay'}")
    spared = [one for one in known if one.faults and one not in chosen]
    if others := [one for one in spared if not one.is_moved and not args.damaged]:
        lines.append(f"{len(others)} damaged or half-written stay: --damaged removes them too")
    lines += [f"stays: {one.faults[0]}" for one in spared if one.is_moved]
    record = {"removed": [_record(one) for one in gone], "dry_run": args.dry_run}
    print_result(args, lines, lambda: record)
