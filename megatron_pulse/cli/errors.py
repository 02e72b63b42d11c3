"""What the user can mend, said in one message."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_pulse.faults import all_of


class UserError(Exception):
    """A command that cannot do what it was asked to; the message says why and what to do."""


def require(faults: Sequence[str]) -> None:
    """Raise UserError with every fault, if there is any."""
    if faults:
        raise UserError(all_of(faults))


def warn(*cautions: str) -> None:
    """Say each that is not empty, beside what the command prints."""
    for caution in cautions:
        if caution:
            print(f"warning: {caution}", file=sys.stderr)


@contextmanager
def mending(*kinds: type[Exception]) -> Iterator[None]:
    """Turn exceptions of these kinds, whose messages are meant for users, into UserError."""
    try:
        yield
    except kinds as error:
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise UserError(str(text)) from error


def check_file(path: Path, flag: str, suffix: str) -> list[str]:
    """Why no file of that kind can be written at ``path``; creates nothing."""
    if path.suffix.lower() != suffix:
        return [f"{flag} {path}: the file name must end in {suffix}"]
    if path.is_dir():
        return [f"{flag} {path} is a folder; name a file in it"]
    return check_folder(path.parent, flag)


def check_folder(folder: Path, flag: str) -> list[str]:
    """Why nothing can be written below ``folder``; creates nothing."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        return [f"{flag}: {existing} is a file, not a folder"]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [f"{flag}: folder {existing} is not writable"]
    return []


def at_least(least: int, **values: int | None) -> list[str]:
    """A fault for each flag whose value is given and below ``least``."""
    return [
        f"--{name.replace('_', '-')} is {value}; it must be {least} or more"
        for name, value in values.items()
        if value is not None and value < least
    ]


def add_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    description: str,
) -> argparse.ArgumentParser:
    """A command's parser; ``description`` (with its examples) is shown as it is written."""
    return commands.add_parser(
        name.split()[-1],
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.\n\n{description}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
