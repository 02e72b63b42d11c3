"""Lists of pictures with captions: ``metadata.jsonl`` and ``metadata.csv``, row by row."""

from __future__ import annotations

import csv
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from megatron_pulse.data.images.listing import METADATA, TABLE, Listing
from megatron_pulse.errors import did_you_mean
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import FileError, parse_json, read_lines
from megatron_pulse.paths import within

FILE_NAME, GROUP = "file_name", "group"

Row = tuple[int, tuple[str, ...], str, str]
"""(line, file names and numbers, caption, group)"""


@dataclass(frozen=True)
class Columns:
    """Columns of a list: ``files`` and ``numbers`` in every row, and the ``caption``."""

    files: tuple[str, ...]
    caption: str
    numbers: tuple[str, ...] = ()

    @property
    def needed(self) -> tuple[str, ...]:
        """Columns without which there is no row."""
        return (*self.files, *self.numbers)

    @property
    def known(self) -> tuple[str, ...]:
        """All columns that are read."""
        return (*self.needed, self.caption, GROUP)


class Files:
    """Files of a folder, by the names that its lists give them."""

    def __init__(self, listing: Listing) -> None:
        self._root = listing.root
        self._by_name = defaultdict[str, list[Path]](list)
        for each in listing.pictures:
            self._by_name[each.name.lower()].append(each)

    def find(self, folder: Path, name: str, at: str, faults: list[str]) -> Path | None:
        """File that a list in ``folder`` calls ``name`` at the place ``at``; None is a fault."""
        picture = within(self._root, folder, name)
        if picture is None:
            faults.append(f"{at}: {repr(name)[:80]} is outside of the folder")
        elif not os.path.isfile(picture):
            faults.append(f"{at}: there is no file {name}{self._meant(folder, name)}")
        else:
            return picture
        return None

    def _meant(self, folder: Path, name: str) -> str:
        """Remedy for a list in ``folder``: its name for the one picture that ``name`` may mean."""
        near = self._by_name.get(name.replace("\\", "/").rpartition("/")[2].lower(), ())
        if len(near) != 1:
            return ""
        right = os.path.relpath(near[0], folder)
        return f"; did you mean {right}? File names are relative to the folder of their list"


def lists_of(listing: Listing, faults: list[str]) -> list[Path]:
    """Lists of captions, one per folder."""
    found: dict[Path, Path] = {}
    for path in listing.lists:
        if found.setdefault(path.parent, path) != path:
            both = sorted((found[path.parent], path), key=lambda p: p.name != METADATA)
            names = " and ".join(str(p.relative_to(listing.root)) for p in both)
            faults.append(f"{names} both exist. Remove one")
            found[path.parent] = both[0]
    return sorted(found.values())


def rows(
    path: Path, where: str, columns: Columns, faults: list[str], unread: Counter[str]
) -> Iterator[Row]:
    """Rows of the list ``path``, called ``where`` in ``faults``; unusable lines are faults.

    Unknown keys are counted if a required key is missing.
    """
    try:
        lines, of = read_lines(path, FileKind.CAPTIONS), _of_lines
        if path.name == TABLE:
            of = _of_table
        yield from of(lines, where, columns, faults, unread)
    except FileError as error:
        faults.append(str(error))


def _of_lines(
    lines: Iterator[str], where: str, columns: Columns, faults: list[str], unread: Counter[str]
) -> Iterator[Row]:
    known, with_caption, keys = columns.known, False, dict[str, None]()
    needed, column = columns.needed, columns.caption
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = parse_json(line, only=known)
            if not isinstance(record, dict):
                raise TypeError(f"it must be an object with {needed[0]} and the caption")
            for name in needed:
                if name not in record:
                    raise TypeError(_missing(name, record, needed))
            _count_unread(record, known, unread)
            with_caption |= column in record
            keys |= dict.fromkeys(record)
            files, caption = [record[name] for name in columns.files], record.get(column)
            group = record.get(GROUP)
            if not all(isinstance(text, str) for text in files) or not isinstance(
                caption, str | None
            ):
                raise TypeError(f"{', '.join(columns.files)} and {column} must be strings")
            numbers = [record[name] for name in columns.numbers]
            if any(isinstance(n, bool) or not isinstance(n, int | float) for n in numbers):
                raise TypeError(f"{', '.join(columns.numbers)} must be a number")
            if not isinstance(group, str | int | None) or isinstance(group, bool):
                raise TypeError(f"{GROUP} must be a string or a whole number")
        except (ValueError, TypeError) as error:
            faults.append(f"{where}, line {number}: {error}")
            continue
        told = tuple(map(str, [*files, *numbers]))
        yield number, told, caption or "", "" if group is None else str(group)
    if keys and not with_caption:
        faults.append(f"{where}, all lines: {_missing(column, keys, needed)}")


def _missing(key: str, there: Collection[str], needed: Sequence[str]) -> str:
    others = [name for name in there if name not in needed]
    return f"{key} is missing; {did_you_mean(key, others)}it has {_names(list(there))}"


def _count_unread(there: Collection[str], known: Collection[str], unread: Counter[str]) -> None:
    if any(key not in there for key in known):
        unread.update(key for key in there if key not in known)


@dataclass(frozen=True)
class _Form:
    """Dialect of a table: ``apart`` separates cells; ``blanks`` around cells are stripped."""

    apart: str = ","
    blanks: bool = False

    @classmethod
    def of(cls, beginning: str, columns: Columns) -> _Form:
        """Dialect in which the first line has the names that are read; else the usual one."""
        for apart in ",;\t":
            reader = csv.reader([beginning], delimiter=apart, skipinitialspace=True, strict=True)
            with suppress(csv.Error):  # told where it is read
                names = next(reader, [])
                head = [name.strip() for name in names]
                if {*columns.needed, columns.caption} <= {*head}:
                    exact = next(csv.reader([beginning], delimiter=apart))
                    return cls(apart, exact != head)
        return cls()

    def cells(self, row: list[str]) -> list[str]:
        """Cells of a row, without surrounding blanks."""
        return [cell.strip() for cell in row] if self.blanks else row


_PYTHONS = "new-line character seen in unquoted field"
"""Beginning of Python's message, which goes on about the mode of the file."""
_CARRIAGE = (
    "it holds a carriage return outside of quotes. End lines with a line feed, with or without a "
    "carriage return before it"
)


def _of_table(
    lines: Iterator[str], where: str, columns: Columns, faults: list[str], unread: Counter[str]
) -> Iterator[Row]:
    form = _Form.of(beginning := next(lines, ""), columns)
    needed, column = columns.needed, columns.caption
    whole = (f"{line}\n" for line in chain([beginning], lines))
    reader = csv.reader(whole, delimiter=form.apart, skipinitialspace=form.blanks, strict=True)
    try:
        head = form.cells(next(reader, []))
        if missing := [key for key in (*needed, column) if head.count(key) != 1]:
            near = "".join(
                did_you_mean(key, [name for name in head if name not in needed]) for key in missing
            )
            if len(head) == 1:
                near = "columns are separated by commas, semicolons or tabs; "
            faults.append(
                f"{where}: expected one column named {' and one named '.join(missing)}; {near}it "
                f"has {_names(head)}"
            )
            return
        at, says = [head.index(name) for name in needed], head.index(column)
        group = head.index(GROUP) if GROUP in head else None
        _count_unread(head, columns.known, unread)
        first = reader.line_num + 1
        for row in reader:
            number, first = first, reader.line_num + 1
            if row and len(row) != len(head):
                faults.append(f"{where}, line {number}: {len(row)} cells for {len(head)} columns")
            elif row := form.cells(row):
                told = tuple(row[i] for i in at)
                yield number, told, row[says], "" if group is None else row[group].strip()
    except csv.Error as error:
        fault = _CARRIAGE if str(error).startswith(_PYTHONS) else str(error)
        faults.append(f"{where}, line {reader.line_num}: {fault}")


def _names(keys: Sequence[str]) -> str:
    return ", ".join(key[:40] for key in keys[:10]) or "none"
