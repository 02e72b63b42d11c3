"""Pairs of pictures for preference losses, from the lists of a folder.

A row of ``metadata.jsonl`` or ``metadata.csv`` (see ``metadata.py``) names the pictures ``winner``
and ``loser``, and has their caption. Pick-a-Pic's columns are read too: the pictures ``jpg_0`` and
``jpg_1``, and ``label_0``: 1 if the first is preferred, 0 if the second, and 0.5 for a tie. Ties,
and pairs of a picture with itself, are left out.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from megatron_pulse.data.dataset import DataError
from megatron_pulse.data.images.listing import Listing, is_picture, some
from megatron_pulse.data.images.lists import GROUP, Columns, Files, lists_of, rows
from megatron_pulse.data.images.metadata import Captions, misspelt, uncaptioned, unprintable
from megatron_pulse.data.standard_splits import require_one_split
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import FileError, read_lines

_NAMED = ("winner", "loser")
_PICKED, _LABEL = ("jpg_0", "jpg_1"), "label_0"
_REMEDY = (
    'List pairs in metadata.jsonl (lines {{"winner": ..., "loser": ..., "{column}": ...}}), or in '
    "such a metadata.csv. For another caption column than {column}, give pairs:{root}#NAME."
)


def read_pairs(root: Path, column: str, default: str = "") -> Captions:
    """Pictures and captions of the pairs below ``root``: each winner, then its loser.

    ``column`` is the caption column, and ``default`` replaces empty captions. Raises DataError with
    every fault.
    """
    faults: list[str] = []
    listing = Listing.of(root)
    require_one_split(f"pairs {root}", root, listing.pictures, prefixes=False)
    files, unread, groups = Files(listing), Counter[str](), dict[Path, str]()
    found, bare, named = list[tuple[Path, str]](), dict[Path, None](), set[Path]()
    num_ties = 0
    for path in lists_of(listing, faults):
        where = str(path.relative_to(root))
        columns = _columns(path, column)
        for number, (one, other, *label), caption, group in rows(
            path, where, columns, faults, unread
        ):
            at = f"{where}, line {number}"
            won = _share_won(label, at, faults)
            pair = [
                picture
                for name in (one, other)
                if (picture := _picture(files, path.parent, name, at, faults)) is not None
            ]
            if unfit := unprintable(caption):
                faults.append(f"{at}: the caption {unfit}")
            for picture in pair if group else ():
                if (before := groups.setdefault(picture, group)) != group:
                    faults.append(f"{at}: {picture.name} is in two groups, {before} and {group}")
            named.update(pair)
            if won is None or len(pair) < 2:
                continue
            if won == 0.5 or pair[0] == pair[1]:
                num_ties += 1
                continue
            if not caption.strip():
                bare[pair[0]] = None
            ordered = pair if won else reversed(pair)
            found += [(picture, caption if caption.strip() else default) for picture in ordered]
    if not found and not faults:
        faults.append(f"all {num_ties} pairs are ties" if num_ties else "it lists no pairs")
    if faults:
        remedy = _REMEDY.format(column=column, root=root)
        raise DataError(f"pairs of pictures {root}", faults, remedy)
    known = (*_NAMED, *_PICKED, _LABEL, column, GROUP)
    cautions = [*listing.ignored_files(), *misspelt(root, unread, known)]
    cautions += uncaptioned(root, bare, default)
    if num_ties:
        pairs = num_ties + len(found) // 2
        cautions.append(f"{root}: {num_ties} of {pairs} pairs are ties: left out")
    if others := [picture for picture in listing.pictures if picture not in named]:
        cautions.append(f"{root}: {some(root, others, 'picture')} in no pair: ignored")
    return Captions(found, listing.pictures, cautions, groups=groups)


def _columns(path: Path, caption: str) -> Columns:
    """Columns of a list, by its first line."""
    try:
        first = next(read_lines(path, FileKind.CAPTIONS), "")
    except FileError:  # told where it is read
        first = ""
    return Columns(_PICKED, caption, (_LABEL,)) if _LABEL in first else Columns(_NAMED, caption)


def _picture(files: Files, folder: Path, name: str, at: str, faults: list[str]) -> Path | None:
    """Picture that a list in ``folder`` calls ``name``; None is a fault."""
    found = files.find(folder, name, at, faults)
    if found is None or is_picture(found):
        return found
    faults.append(f"{at}: {name} has no suffix of a supported picture format")
    return None


def _share_won(label: list[str], at: str, faults: list[str]) -> float | None:
    """1 if the first picture is preferred, 0 if the second, 0.5 for a tie; None is a fault."""
    known = {"0": 0.0, "0.0": 0.0, "0.5": 0.5, "1": 1.0, "1.0": 1.0}
    if not label:
        return 1.0
    if label[0] not in known:
        faults.append(f"{at}: {_LABEL} is {label[0][:60]!r}; it must be 0, 0.5 or 1")
    return known.get(label[0])
