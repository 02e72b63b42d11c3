"""``pulse flags``: table of Megatron's flags, supported or not, with reasons."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import asdict

from megatron_pulse.cli.flag_checks import add_flag, add_parser
from megatron_pulse.cli.output import add_json, print_result, table
from megatron_pulse.errors import UserError, unknown_name
from megatron_pulse.integration.flags.megatron_flags import Flag, Support, load_table

_DESCRIPTION = """\
A flag of Megatron works as described, is refused, or is meaningless (for other models). A run
with one of the last two does not start. Our own flags are in launch/pretrain_diffusion.py --help.

examples:
  pulse flags                                 all, by Megatron's groups
  pulse flags optimizer                       those whose name or line has the word
  pulse flags --standing refused --group checkpointing
  pulse flags --json
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``flags``."""
    parser = add_parser(commands, "flags", "list Megatron's flags", _DESCRIPTION, run)
    add_flag(
        parser,
        "word WORD",
        "only flags with this word in name or description",
        nargs="?",
        default="",
    )
    add_flag(parser, "--standing", "only these", choices=list(Support))
    add_flag(parser, "--group NAME", "only this group of Megatron's")
    add_json(parser, to_file=False)


def run(args: argparse.Namespace) -> None:
    """Print the flags asked for."""
    known = load_table().values()
    groups = list(dict.fromkeys(flag.group for flag in known))
    if args.group is not None and args.group not in groups:
        raise UserError(unknown_name("group", args.group, groups))
    flags = [
        flag
        for flag in known
        if args.standing in (None, flag.standing)
        and args.group in (None, flag.group)
        and args.word.lower() in f"{flag.name} {flag.note}".lower()
    ]
    if not flags:
        raise UserError(
            "no flag of Megatron matches: 'pulse flags' lists all; 'pulse recipe --keys' finds ours"
        )
    lines = []
    for group in groups:
        if chosen := [_row(flag) for flag in flags if flag.group == group]:
            lines += ["", group, *table(chosen, left=(0, 1, 2), titles=False, indent=2)]
    counts = Counter(flag.standing for flag in flags)
    lines += ["", ", ".join(f"{counts[standing]} {standing}" for standing in Support)]
    print_result(args, lines, lambda: [asdict(flag) for flag in flags])


def _row(flag: Flag) -> tuple[str, ...]:
    values = f" {'|'.join(flag.values)}" if flag.values else ""
    return (flag.standing, flag.name + values, flag.note)
