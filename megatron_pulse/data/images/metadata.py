"""What is said of image files: texts beside them, and lists of captions.

``a.txt`` is the caption of ``a.png`` in the same folder. ``metadata.jsonl`` (a line of JSON for
each) and ``metadata.csv`` have a ``file_name``, relative to their own folder, and a column of
captions, as Hugging Face's ``imagefolder`` has them; they may lie in subfolders, and name no file
outside of the folder that is read. A picture that is listed several times, with other captions, is
as many samples.
"""

from __future__ import annotations

import csv
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_pulse.data.dataset import DataError
from megatron_pulse.data.images.opening import SUFFIXES
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import FileError, parse_json, read_lines, read_text
from megatron_pulse.letters import NO_LETTER
from megatron_pulse.named_files import within

METADATA = "metadata.jsonl"
TABLE = "metadata.csv"
FILE_NAME, TEXT = "file_name", "text"
_UNREAD = (".avif", ".bmp", ".gif", ".heic", ".heif", ".jfif", ".jxl", ".tif", ".tiff")
"""Of pictures in formats that are not read here."""
_NAMED = 3

Row = tuple[int, str, str]
"""(line, file_name, caption)"""


@dataclass(frozen=True)
class Captions:
    """Every (picture, caption), and ``cautions``: which files are left aside."""

    pairs: Sequence[tuple[Path, str]]
    cautions: Sequence[str] = ()


def read_captions(root: Path, column: str = TEXT) -> Captions:
    """Those below ``root``: pictures that are listed, in that order, then those with a text beside
    them. None where there are neither lists nor texts.

    ``column`` is the captions' in the lists. Raises DataError with everything that is wrong:
    lines, pictures that are missing, without a caption or with contrary ones, empty captions.
    """
    faults: list[str] = []
    files = _files_below(root)
    texts = {path for path in files if path.suffix == ".txt"}
    pictures = [path for path in files if path.suffix.lower() in SUFFIXES]
    listed, said = list[tuple[Path, str]](), defaultdict[Path, dict[str, str]](dict)
    lists = _lists(root, files, faults)
    for path in lists:
        where = str(path.relative_to(root))
        for number, name, says in _rows(path, where, column, faults):
            at = f"{where}, line {number}"
            picture = within(root, path.parent, name)
            if picture is None:
                faults.append(f"{at}: {repr(name)[:80]} is outside of the folder")
                continue
            if not os.path.isfile(picture):
                faults.append(f"{at}: there is no file {name}")
                continue
            named = said[picture]
            if unfit := _unfit(says):
                faults.append(f"{at}: the caption of {name} {unfit}")
            else:
                listed.append((picture, says))
                named[says.strip()] = at
    if lists and not listed and not faults:
        faults.append(f"{' and '.join(str(p.relative_to(root)) for p in lists)} names no images")
    beside, bare = [], []
    for picture in pictures:
        text = picture.with_suffix(".txt")
        if text not in texts:
            bare += [picture] if picture not in said else []
        elif (caption := _read(text, faults)) is None:
            continue
        elif picture not in said:
            beside.append((picture, caption))
        elif said[picture] and caption not in said[picture]:
            other, at = next(iter(said[picture].items()))
            here = f"{text.relative_to(root)} says {_short(caption)}"
            faults.append(f"{here}, and {at} {_short(other)}")
    if listed or beside or faults:
        faults += [f"{picture.relative_to(root)} has no caption" for picture in bare]
    if faults:
        raise DataError(
            f"captioned images {root}",
            faults,
            "Correct these: every picture has its caption in NAME.txt beside it, or in a list. "
            f"Captions that are not called {TEXT} in a list are named behind the folder: "
            f"captions:{root}#NAME.",
        )
    return Captions([*listed, *beside], left_aside(root, files))


def left_aside(root: Path, files: Sequence[Path]) -> list[str]:
    """What to say of texts among ``files`` beside which there is no picture of their name, and of
    pictures in formats that are not read here: how many, and the names of some."""
    names = {path.with_suffix("") for path in files if path.suffix.lower() in SUFFIXES}
    texts = [p for p in files if p.suffix == ".txt" and p.with_suffix("") not in names]
    others = [path for path in files if path.suffix.lower() in _UNREAD]
    # One that is beside no picture at all is no caption: a README, a licence.
    folders = {name.parent for name in names} | {path.parent for path in others}
    texts = [path for path in texts if path.parent in folders]
    cautions = []
    if texts:
        cautions.append(
            f"{root} has {some(root, texts, 'text')} without a picture of that name: left aside"
        )
    if others:
        cautions.append(
            f"{root} has {some(root, others, 'picture')} in formats that are not read: left "
            f"aside; convert them to {', '.join(SUFFIXES)}"
        )
    return cautions


def some(root: Path, paths: Sequence[Path], what: str) -> str:
    """How many paths below ``root``, each a ``what``, and the names of the first."""
    shown = ", ".join(str(path.relative_to(root)) for path in paths[:_NAMED])
    more = ", ..." if len(paths) > _NAMED else ""
    return f"{len(paths)} {what}{'s' * (len(paths) > 1)} ({shown}{more})"


def _files_below(root: Path) -> list[Path]:
    """All that is not hidden, sorted folder by folder; links to folders count in ``root`` itself,
    where classes may be such."""
    found: list[Path] = []
    for top in sorted(root.iterdir()) if root.is_dir() else ():
        if top.name.startswith("."):
            continue
        if not top.is_dir():
            found.append(top)
            continue
        for folder, folders, names in os.walk(top):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            found += [Path(folder, name) for name in sorted(names) if not name.startswith(".")]
    return found


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def _lists(root: Path, files: Sequence[Path], faults: list[str]) -> list[Path]:
    """The lists of captions among ``files``; one for each folder."""
    found = {path.parent: path for path in files if path.name == METADATA}
    for path in files:
        if path.name == TABLE and found.setdefault(path.parent, path) != path:
            names = " and ".join(str(p.relative_to(root)) for p in (found[path.parent], path))
            faults.append(f"{names} are both there: which one counts?")
    return sorted(found.values())


def _rows(path: Path, where: str, column: str, faults: list[str]) -> Iterator[Row]:
    """What a list says; its lines that say nothing that can be used are faults."""
    try:
        lines = read_lines(path, FileKind.CAPTIONS)
        yield from (_of_table if path.name == TABLE else _of_lines)(lines, where, column, faults)
    except FileError as error:
        faults.append(str(error))


def _of_lines(lines: Iterator[str], where: str, column: str, faults: list[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = parse_json(line)
            if not isinstance(record, dict):
                raise TypeError("it must be an object with file_name and the caption")
            missing = [key for key in (FILE_NAME, column) if key not in record]
            if missing:
                raise TypeError(f"{' and '.join(missing)} is missing; it has {_names(record)}")
            name, caption = record[FILE_NAME], record[column]
            if not isinstance(name, str) or not isinstance(caption, str):
                raise TypeError(f"{FILE_NAME} and {column} must be strings")
        except (ValueError, TypeError) as error:
            faults.append(f"{where}, line {number}: {error}")
            continue
        yield number, name, caption


def _of_table(lines: Iterator[str], where: str, column: str, faults: list[str]) -> Iterator[Row]:
    reader = csv.reader((f"{line}\n" for line in lines), strict=True)
    try:
        head = next(reader, [])
        if missing := [key for key in (FILE_NAME, column) if head.count(key) != 1]:
            faults.append(
                f"{where}: of {' and '.join(missing)} there must be one column; it has "
                f"{_names(head)}"
            )
            return
        at, says = head.index(FILE_NAME), head.index(column)
        first = reader.line_num + 1
        for row in reader:
            number, first = first, reader.line_num + 1
            if row and len(row) != len(head):
                faults.append(f"{where}, line {number}: {len(row)} cells below {len(head)} names")
            elif row:
                yield number, row[at], row[says]
    except csv.Error as error:
        faults.append(f"{where}, line {reader.line_num}: {error}")


def _names(keys: Sequence[str] | dict[str, object]) -> str:
    return ", ".join(str(key)[:40] for key in list(keys)[:10]) or "none"


def _read(path: Path, faults: list[str]) -> str | None:
    """The text beside a picture; None if it is a fault."""
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
    if not caption.strip():
        return "is empty"
    found = NO_LETTER.search(caption)
    return f"has the character {found[0]!r}" if found else ""
