"""Metadata of image files: texts beside them, and lists of captions.

``a.txt`` is the caption of ``a.png`` in the same folder. ``metadata.jsonl`` (one line of JSON per
picture) and ``metadata.csv`` have a ``file_name``, relative to their own folder, and a caption
column, like Hugging Face's ``imagefolder``. Tables may use semicolons or tabs. If names have
surrounding blanks, all cells are stripped. Lists may lie in subfolders, but may not name files
outside of the folder that is read. A picture that is listed several times with different captions
counts as several samples. Pictures of one ``group`` stay together in the split into training and
validation. Other keys are ignored. A picture without a caption gets ``default``.
"""

from __future__ import annotations

import csv
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import chain
from pathlib import Path

from megatron_pulse.data.dataset import DataError
from megatron_pulse.data.images.listing import (
    METADATA,
    TABLE,
    TEXT_SUFFIX,
    Listing,
    by_stem,
    is_picture,
    some,
)
from megatron_pulse.errors import did_you_mean
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import FileError, parse_json, read_lines, read_text
from megatron_pulse.fonts import UNPRINTABLE
from megatron_pulse.paths import within

FILE_NAME, TEXT, GROUP = "file_name", "text", "group"
_ALIKE = 0.75
"""Likeness of an unread key to one that is read, from which on it may be meant."""

Row = tuple[int, str, str, str]
"""(line, file_name, caption, group)"""


@dataclass(frozen=True)
class Captions:
    """Captions of an image folder.

    - ``pairs``: (picture, caption).

    - ``pictures``: all pictures in the folder.

    - ``cautions``: ignored files and keys, and pictures without a caption.

    - ``groups``: groups of those pictures that have one.
    """

    pairs: Sequence[tuple[Path, str]]
    pictures: Sequence[Path]
    cautions: Sequence[str] = ()
    groups: Mapping[Path, str] = field(default_factory=dict)


def read_captions(root: Path, column: str = TEXT, default: str = "") -> Captions:
    """Captions below ``root``.

    Listed pictures come first, in list order, then pictures with a text file, then those without a
    caption, which get ``default``. There are none without lists, texts and default. ``column`` is
    the caption column of lists. Raises DataError with every fault: bad lines, missing pictures,
    contradicting captions or groups.
    """
    faults: list[str] = []
    listing = Listing.of(root)
    texts, pictures = set(listing.texts), listing.pictures
    listed, said = list[tuple[Path, str]](), defaultdict[Path, dict[str, str]](dict)
    lists, groups, unread = _lists(listing, faults), dict[Path, str](), Counter[str]()
    aside, bare = dict[Path, None](), dict[Path, None]()
    by_name = defaultdict[str, list[Path]](list)
    for each in pictures:
        by_name[each.name.lower()].append(each)
    for path in lists:
        where = str(path.relative_to(root))
        for number, name, says, group in _rows(path, where, column, faults, unread):
            at = f"{where}, line {number}"
            picture = within(root, path.parent, name)
            if picture is None:
                faults.append(f"{at}: {repr(name)[:80]} is outside of the folder")
                continue
            if not os.path.isfile(picture):
                faults.append(f"{at}: there is no file {name}{_meant(by_name, path.parent, name)}")
                continue
            if not is_picture(picture):
                aside[picture] = None
                continue
            named = said[picture]
            if group and groups.setdefault(picture, group) != group:
                other = groups[picture]
                faults.append(
                    f"{at}: {name} has two values of {GROUP}: {_short(group)} and {_short(other)}"
                )
            if unfit := _unfit(says):
                faults.append(f"{at}: the caption of {name} {unfit}")
            elif not says.strip():
                if picture not in bare:  # several lines that say nothing are one
                    listed.append((picture, default))
                bare[picture] = None
            else:
                listed.append((picture, says))
                named[says.strip()] = at
    if lists and not listed and not faults:
        faults.append(f"{' and '.join(str(p.relative_to(root)) for p in lists)} names no images")
    beside, without, instead = [], [], dict[Path, str]()
    for picture in pictures:
        text = picture.with_suffix(TEXT_SUFFIX)
        caption = _read(text, faults) if text in texts else ""
        if caption is None:
            continue
        if not caption:
            without += [picture] if picture not in said else []
        elif picture not in said:
            beside.append((picture, caption))
        elif not said[picture]:  # listed without a caption
            instead[picture] = caption
            bare.pop(picture, None)
        elif caption not in said[picture]:
            other, at = next(iter(said[picture].items()))
            here = f"{text.relative_to(root)} says {_short(caption)}"
            faults.append(f"{here}, and {at} {_short(other)}")
    listed = [(picture, instead.get(picture, says)) for picture, says in listed]
    if faults:
        raise DataError(
            f"captioned images {root}",
            faults,
            "Correct these. Captions are read from NAME.txt beside a picture, or from a list. For "
            f"a caption column other than {TEXT}, give captions:{root}#NAME.",
        )
    if not listed and not beside and not default:
        return Captions([], pictures, list(listing.ignored_files()))
    bare |= dict.fromkeys(without)
    cautions = [
        *listing.ignored_files(),
        *_ignored_by_lists(root, aside, unread, column),
        *_shared(root, [picture for picture, _ in beside]),
        *_uncaptioned(root, bare, default),
    ]
    pairs = [*listed, *beside, *((picture, default) for picture in without)]
    return Captions(pairs, pictures, cautions, groups)


def _meant(by_name: Mapping[str, Sequence[Path]], folder: Path, name: str) -> str:
    """Remedy for a list in ``folder``: its name for the one picture that ``name`` may mean."""
    near = by_name.get(name.replace("\\", "/").rpartition("/")[2].lower(), ())
    if len(near) != 1:
        return ""
    right = os.path.relpath(near[0], folder)
    return f"; did you mean {right}? File names are relative to the folder of their list"


def _ignored_by_lists(
    root: Path, aside: Collection[Path], unread: Counter[str], column: str
) -> Iterator[str]:
    """Cautions on ignored parts of lists: files of other formats, keys that may be misspelt."""
    if aside:
        yield f"{root}: {some(root, aside, 'listed file')} of unsupported format: ignored"
    known = (FILE_NAME, column, GROUP)
    for key, count in unread.items():
        if near := get_close_matches(key.lower(), known, n=1, cutoff=_ALIKE):
            yield (
                f"{root}: the key {key[:60]!r}, on {count} line{'s' * (count > 1)} of its lists "
                f"without {near[0]!r}, is not used. Did you mean {near[0]!r}?"
            )


def _shared(root: Path, beside: Sequence[Path]) -> Iterator[str]:
    """Cautions on texts that several pictures of the same name share."""
    several = [same for same in by_stem(beside).values() if len(same) > 1]
    if several:
        names = " and ".join(str(path.relative_to(root)) for path in several[0])
        yield (
            f"{root}: {len(several)} text{'s' * (len(several) > 1)} beside several pictures of "
            "the same name, which share the caption "
            f"({names}{', ...' if len(several) > 1 else ''})"
        )


def _uncaptioned(root: Path, bare: Collection[Path], default: str) -> Iterator[str]:
    """Caution on pictures without a caption."""
    if bare:
        kept = f"caption {_short(default)} is used" if default else "they train unconditionally"
        few = some(root, bare, "picture")
        yield f"{root}: {few} without a caption, or with an empty one: {kept}"


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def _lists(listing: Listing, faults: list[str]) -> list[Path]:
    """Lists of captions, one per folder."""
    found: dict[Path, Path] = {}
    for path in listing.lists:
        if found.setdefault(path.parent, path) != path:
            both = sorted((found[path.parent], path), key=lambda p: p.name != METADATA)
            names = " and ".join(str(p.relative_to(listing.root)) for p in both)
            faults.append(f"{names} both exist. Remove one")
            found[path.parent] = both[0]
    return sorted(found.values())


def _rows(
    path: Path, where: str, column: str, faults: list[str], unread: Counter[str]
) -> Iterator[Row]:
    """Rows of a list; unusable lines are faults.

    Unknown keys are counted if a required key is missing.
    """
    try:
        lines, of = read_lines(path, FileKind.CAPTIONS), _of_lines
        if path.name == TABLE:
            of = _of_table
        yield from of(lines, where, column, faults, unread)
    except FileError as error:
        faults.append(str(error))


def _of_lines(
    lines: Iterator[str], where: str, column: str, faults: list[str], unread: Counter[str]
) -> Iterator[Row]:
    known, with_caption, keys = (FILE_NAME, column, GROUP), False, dict[str, None]()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = parse_json(line, only=known)
            if not isinstance(record, dict):
                raise TypeError("it must be an object with file_name and the caption")
            if FILE_NAME not in record:
                raise TypeError(_missing(FILE_NAME, record))
            _count_unread(record, known, unread)
            with_caption |= column in record
            keys |= dict.fromkeys(record)
            name, caption = record[FILE_NAME], record.get(column)
            group = record.get(GROUP)
            if not isinstance(name, str) or not isinstance(caption, str | None):
                raise TypeError(f"{FILE_NAME} and {column} must be strings")
            if not isinstance(group, str | int | None) or isinstance(group, bool):
                raise TypeError(f"{GROUP} must be a string or a whole number")
        except (ValueError, TypeError) as error:
            faults.append(f"{where}, line {number}: {error}")
            continue
        yield number, name, caption or "", "" if group is None else str(group)
    if keys and not with_caption:
        faults.append(f"{where}, all lines: {_missing(column, keys)}")


def _missing(key: str, there: Collection[str]) -> str:
    others = [name for name in there if name != FILE_NAME]
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
    def of(cls, beginning: str, column: str) -> _Form:
        """Dialect in which the first line has the names that are read; else the usual one."""
        for apart in ",;\t":
            reader = csv.reader([beginning], delimiter=apart, skipinitialspace=True, strict=True)
            with suppress(csv.Error):  # told where it is read
                names = next(reader, [])
                head = [name.strip() for name in names]
                if FILE_NAME in head and column in head:
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
    lines: Iterator[str], where: str, column: str, faults: list[str], unread: Counter[str]
) -> Iterator[Row]:
    form = _Form.of(beginning := next(lines, ""), column)
    whole = (f"{line}\n" for line in chain([beginning], lines))
    reader = csv.reader(whole, delimiter=form.apart, skipinitialspace=form.blanks, strict=True)
    try:
        head = form.cells(next(reader, []))
        if missing := [key for key in (FILE_NAME, column) if head.count(key) != 1]:
            near = "".join(
                did_you_mean(key, [name for name in head if name != FILE_NAME]) for key in missing
            )
            if len(head) == 1:
                near = "columns are separated by commas, semicolons or tabs; "
            faults.append(
                f"{where}: expected one column named {' and one named '.join(missing)}; {near}it "
                f"has {_names(head)}"
            )
            return
        at, says = head.index(FILE_NAME), head.index(column)
        group = head.index(GROUP) if GROUP in head else None
        _count_unread(head, (FILE_NAME, column, GROUP), unread)
        first = reader.line_num + 1
        for row in reader:
            number, first = first, reader.line_num + 1
            if row and len(row) != len(head):
                faults.append(f"{where}, line {number}: {len(row)} cells for {len(head)} columns")
            elif row := form.cells(row):
                yield number, row[at], row[says], "" if group is None else row[group].strip()
    except csv.Error as error:
        fault = _CARRIAGE if str(error).startswith(_PYTHONS) else str(error)
        faults.append(f"{where}, line {reader.line_num}: {fault}")


def _names(keys: Sequence[str]) -> str:
    return ", ".join(key[:40] for key in keys[:10]) or "none"


def _read(path: Path, faults: list[str]) -> str | None:
    """Text beside a picture; None if it is a fault."""
    try:
        text = read_text(path, FileKind.CAPTION).strip()
    except FileError as error:
        faults.append(str(error))
        return None
    if unfit := _unfit(text):
        faults.append(f"{path} {unfit}")
        return None
    return text


def _unfit(caption: str) -> str:
    found = UNPRINTABLE.search(caption)
    return f"has the character {found[0]!r}" if found else ""
