"""``pulse flags``: which of Megatron's flags work in training, and why the others do not."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict

from megatron_pulse.cli.errors import UserError, add_parser
from megatron_pulse.faults import unknown
from megatron_pulse.integration.flags.table import Flag, Standing, load_table

_DESCRIPTION = """\
Of Megatron's flags, those that work do here what is said; those that are refused cannot be used;
those that are meaningless are for other models. A run that is given one of the last two does not
start. Our own flags are in launch/pretrain_diffusion.py --help.

examples:
  pulse flags                                 all, by Megatron's groups
  pulse flags optimizer                       those whose name or line has the word
  pulse flags --standing refused --group checkpointing
  pulse flags --json
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``flags``."""
    parser = add_parser(commands, "flags", "list Megatron's flags", _DESCRIPTION)
    parser.add_argument("word", metavar="WORD", nargs="?", default="", help="only with this word")
    parser.add_argument("--standing", choices=list(Standing), help="only these")
    parser.add_argument("--group", metavar="NAME", help="only of this group of Megatron's")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run, command="flags")


def run(args: argparse.Namespace) -> None:
    """Print the flags that are asked for."""
    table = load_table()
    groups = list(dict.fromkeys(flag.group for flag in table.values()))
    if args.group is not None and args.group not in groups:
        raise UserError(unknown("group", args.group, groups))
    flags = [
        flag
        for flag in table.values()
        if args.standing in (None, flag.standing)
        and args.group in (None, flag.group)
        and args.word.lower() in f"{flag.name} {flag.note}".lower()
    ]
    if not flags:
        raise UserError("no flag is like that: 'pulse flags' lists all")
    if args.json:
        print(json.dumps([asdict(flag) for flag in flags], indent=1))
        return
    for group in groups:
        chosen = [flag for flag in flags if flag.group == group]
        if chosen:
            print(f"\n{group}")
            print("\n".join(map(_line, chosen)))
    counts = Counter(flag.standing for flag in flags)
    print("\n" + ", ".join(f"{counts[standing]} {standing}" for standing in Standing))


def _line(flag: Flag) -> str:
    values = f" {'|'.join(flag.values)}" if flag.values else ""
    return f"  {flag.standing:<12s}{flag.name + values:<46s}  {flag.note}"
