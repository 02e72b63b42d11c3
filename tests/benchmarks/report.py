"""Form that all benchmarks share: flags, and a report of rows that come one by one.

args = Flags(__doc__).parse_args(argv)      # every command has --json FILE
report = Report(args.json)
report.add(row)       # a dataclass or a mapping: one line of the table, one record of the file
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_pulse.files import replacing
from megatron_pulse.progress import write_above


class _Format(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str:
        default = action.default
        if default in (None, False, argparse.SUPPRESS) or "default" in (action.help or ""):
            return action.help or ""
        if isinstance(default, list | tuple):
            default = " ".join(map(str, default))
        return f"{action.help or ''} (default: {default})".replace("%", "%%")


class Flags(argparse.ArgumentParser):
    """Flags of a command, which its module describes."""

    def __init__(self, doc: str | None) -> None:
        super().__init__(description=doc, formatter_class=_Format)
        self.add_argument(
            "--json", type=Path, metavar="FILE", help="write rows there, as they come"
        )

    def add(self, name: str, default: Any = None, help: str = "", **more: Any) -> None:
        """Add a flag; its type is that of a default that is a number."""
        if type(default) in (int, float):
            more.setdefault("type", count if type(default) is int else positive)
        elif default is False:
            more.setdefault("action", "store_true")
        self.add_argument(name, default=default, help=help, **more)


class Report:
    """Rows as a Markdown table on standard output, and as JSON in ``file``.

    A row whose columns are others than those of the row before begins a new table.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.rows: list[Any] = []
        self._file = file
        self._columns: tuple[str, ...] = ()

    def add(self, row: Any, cells: Mapping[str, Any] | None = None) -> None:
        """Print ``cells`` (all of the row where not given), and write the file again."""
        self.rows.append(row)
        shown = cells if cells is not None else record(row)
        lines = [line(shown.values())]
        if tuple(shown) != self._columns:
            lines = [*[""] * bool(self._columns), *head(tuple(shown)), *lines]
            self._columns = tuple(shown)
        write_above(sys.stdout, "".join(f"{each}\n" for each in lines))
        sys.stdout.flush()
        if self._file is not None:
            write_json(self._file, [record(each) for each in self.rows])


def record(row: Any) -> dict[str, Any]:
    """Row as a dictionary."""
    return dict(row) if isinstance(row, Mapping) else asdict(row)


def write_json(file: Path, value: Any) -> None:
    """Write a whole file or none."""
    with replacing(file) as beside:
        beside.write_text(json.dumps(value, indent=1, default=str) + "\n")


def table(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Lines of a Markdown table; columns are all keys of all rows."""
    rows = list(rows)
    names = tuple(dict.fromkeys(name for row in rows for name in row))
    return [*head(names), *(line(row.get(name, "") for name in names) for row in rows)] * bool(rows)


def head(names: Sequence[str]) -> list[str]:
    """First two lines of a Markdown table."""
    return [line(name.replace("_", " ") for name in names), "|" + "---|" * len(names)]


def line(cells: Iterable[Any]) -> str:
    """Line of a Markdown table."""
    return f"| {' | '.join(map(cell, cells))} |"


def cell(value: Any) -> str:
    """Text of one cell: four digits of a number, items with commas between."""
    if isinstance(value, Mapping):
        value = [f"{key} {cell(each)}" for key, each in value.items()]
    if isinstance(value, list | tuple):
        return ", ".join(map(cell, value))
    text = f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def positive(text: str) -> float:
    """Finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number above 0")
    return value


def count(text: str) -> int:
    """Whole number from 1 on."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 1 on")
    return int(text)


def existing(text: str) -> Path:
    """File that is there."""
    if not (file := Path(text)).is_file():
        raise argparse.ArgumentTypeError(f"{text}: there is no such file")
    return file


def positives(text: str) -> list[float]:
    """Numbers with commas between."""
    return list(map(positive, text.split(",")))


def some_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Names with commas between, all ``known``."""

    def names(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(
                f"{', '.join(map(repr, unknown))}: there are {', '.join(known)}"
            )
        return found

    return names
