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

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from megatron_pulse.data.dataset import DataError
from megatron_pulse.data.images.listing import TEXT_SUFFIX, Listing, by_stem, some
from megatron_pulse.data.images.lists import FILE_NAME, GROUP, Columns, Files, lists_of, rows
from megatron_pulse.data.standard_splits import require_one_split
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import FileError, read_text
from megatron_pulse.fonts import UNPRINTABLE

TEXT = "text"
_ALIKE = 0.75
"""Likeness of an unread key to one that is read, from which on it may be meant."""


@dataclass(frozen=True)
class Captions:
    """Captions of an image folder.

    - ``pairs``: (picture, caption).

    - ``pictures``: all pictures in the folder.

    - ``cautions``: ignored files and keys.

    - ``bare``: pictures without a caption, on which ``uncaptioned`` gives a caution.

    - ``groups``: groups of those pictures that have one.
    """

    pairs: Sequence[tuple[Path, str]]
    pictures: Sequence[Path]
    cautions: Sequence[str] = ()
    bare: Collection[Path] = ()
    groups: Mapping[Path, str] = field(default_factory=dict)


def read_captions(
    root: Path, column: str = TEXT, default: str = "", listing: Listing | None = None
) -> Captions:
    """Captions below ``root``, of the samples of its ``listing`` (default: its pictures).

    Listed pictures come first, in list order, then pictures with a text file, then those without a
    caption, which get ``default``. There are none without lists, texts and default. ``column`` is
    the caption column of lists. Raises DataError with every fault: bad lines, missing pictures,
    contradicting captions or groups.
    """
    faults: list[str] = []
    listing = listing or Listing.of(root)
    require_one_split(f"image folder {root}", root, listing.pictures, prefixes=False)
    texts, pictures = set(listing.texts), listing.pictures
    listed, said = list[tuple[Path, str]](), defaultdict[Path, dict[str, str]](dict)
    lists, groups, unread = lists_of(listing, faults), dict[Path, str](), Counter[str]()
    aside, bare = dict[Path, None](), dict[Path, None]()
    files, columns = Files(listing), Columns((FILE_NAME,), column)
    for path in lists:
        where = str(path.relative_to(root))
        for number, (name,), says, group in rows(path, where, columns, faults, unread):
            at = f"{where}, line {number}"
            picture = files.find(path.parent, name, at, faults)
            if picture is None:
                continue
            if not listing.is_sample(picture):
                aside[picture] = None
                continue
            named = said[picture]
            if group and groups.setdefault(picture, group) != group:
                other = groups[picture]
                faults.append(
                    f"{at}: {name} has two values of {GROUP}: {_short(group)} and {_short(other)}"
                )
            if unfit := unprintable(says):
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
    unsupported = []
    if aside:
        few = some(root, aside, "listed file")
        unsupported.append(f"{root}: {few} of unsupported format: ignored")
    cautions = [
        *listing.ignored_files(),
        *unsupported,
        *misspelt(root, unread, columns.known),
        *_shared(root, [picture for picture, _ in beside]),
    ]
    pairs = [*listed, *beside, *((picture, default) for picture in without)]
    return Captions(pairs, pictures, cautions, bare, groups)


def misspelt(root: Path, unread: Counter[str], known: Collection[str]) -> Iterator[str]:
    """Cautions on ``unread`` keys of lists that are like ``known`` ones."""
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


def uncaptioned(root: Path, bare: Collection[Path], default: str) -> Iterator[str]:
    """Caution on pictures without a caption."""
    if bare:
        kept = f"caption {_short(default)} is used" if default else "they train unconditionally"
        few = some(root, bare, "picture")
        yield f"{root}: {few} without a caption, or with an empty one: {kept}"


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def _read(path: Path, faults: list[str]) -> str | None:
    """Text beside a picture; None if it is a fault."""
    try:
        text = read_text(path, FileKind.CAPTION).strip()
    except FileError as error:
        faults.append(str(error))
        return None
    if unfit := unprintable(text):
        faults.append(f"{path} {unfit}")
        return None
    return text


def unprintable(caption: str) -> str:
    """Fault of a caption with a character that has no glyph; empty if there is none."""
    found = UNPRINTABLE.search(caption)
    return f"has the character {found[0]!r}" if found else ""
