"""Pictures in tars as WebDataset and Megatron-Energon lay them out, read by index."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from megatron_pulse.data.archives.images import CAPTIONS, ArchivedImages
from megatron_pulse.data.archives.tar_index import TarIndex, TarMember
from megatron_pulse.data.dataset import NO_FIELDS, DataError, FieldSpec
from megatron_pulse.data.images.folder import ImageSize
from megatron_pulse.data.images.sizes import NUM_READERS
from megatron_pulse.data.lazy_sequence import LazySequence
from megatron_pulse.data.split_groups import name_hash
from megatron_pulse.data.standard_splits import require_one_split
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import parse_json, read_yaml
from megatron_pulse.fonts import printable
from megatron_pulse.progress import track

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MOST_SHARDS = 1_000_000
_SPLITS = Path(".nv-meta", "split.yaml")
_NAMED = 3


class WebDataset(ArchivedImages):
    """Pictures in the tars that ``place`` names (see ``shards_of``).

    A sample's picture is its first member with a picture's extension. Its caption is the member
    ``txt``, else ``caption``, else the key ``column`` of ``json`` (default: text or caption), and
    ``default`` without one. Its class is the number in ``cls``. Tars are indexed once (see
    ``tar_index.py``). Raises DataError with every damaged tar.
    """

    kind = "webdataset"

    def __init__(
        self,
        place: str | Path,
        image_size: ImageSize,
        channels: int = 3,
        fields: Mapping[str, FieldSpec] = NO_FIELDS,
        verify: bool = False,
        column: str | None = None,
        default: str = "",
    ) -> None:
        tars = shards_of(str(place))
        members = TarMembers(tars, _indexed(str(place), tars))
        labels = [int(label) for index in members.indexes for label in index.rows["label"]]
        if faults := list(_faults(members, labels)):
            raise DataError(f"webdataset {place}", faults, "Write these tars again.")
        captions = TarCaptions(members, (column,) if column else CAPTIONS, default)
        super().__init__(
            _root(str(place)),
            members,
            [max(label, 0) for label in labels],
            image_size,
            channels,
            fields,
            verify,
            captions if default or members.num_captions else (),
        )
        self._members = members
        self.cautions = [f"webdataset {place}: {each}" for each in _cautions(members, captions)]

    def fingerprints(self, indices: Sequence[int]) -> Sequence[int]:
        rows = (self._members.row(index) for index in indices)
        return [name_hash(f"{row['picture_hash']} {row['text_hash']}") for row in rows]


@dataclass(frozen=True)
class TarMembers(LazySequence[TarMember]):
    """Pictures of all samples of ``tars``, made from their ``indexes`` when asked for."""

    tars: Sequence[Path]
    indexes: Sequence[TarIndex]

    @cached_property
    def _ends(self) -> list[int]:
        """Number of samples up to the end of each tar."""
        return list(accumulate(len(index.rows) for index in self.indexes))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _place(self, index: int) -> tuple[int, int]:
        """Number of a sample's tar, and the sample's place in it."""
        number = bisect_right(self._ends, index)
        return number, index - (self._ends[number - 1] if number else 0)

    def make(self, index: int) -> TarMember:
        number, place = self._place(index)
        row, name = self.indexes[number].rows[place], self.indexes[number].name(place)
        place_in_tar = int(row["offset"]), int(row["size"])
        known = self.indexes[number].stamp, int(row["picture_hash"])
        return TarMember(self.tars[number], name, *place_in_tar, *known)

    def row(self, index: int) -> Any:
        """Entry of a sample in the index of its tar."""
        number, place = self._place(index)
        return self.indexes[number].rows[place]

    def text(self, index: int) -> TarMember | None:
        """Member that holds a sample's caption."""
        number, place = self._place(index)
        row = self.indexes[number].rows[place]
        offset, size = int(row["text_offset"]), int(row["text_size"])
        if size < 0:
            return None
        return TarMember(self.tars[number], "caption", offset, size, self.indexes[number].stamp)

    @property
    def num_captions(self) -> int:
        """Number of samples with a member for the caption."""
        return sum(int((index.rows["text_size"] >= 0).sum()) for index in self.indexes)


@dataclass(frozen=True)
class TarCaptions(LazySequence[str]):
    """Captions of ``members``, read when asked for; ``default`` without one.

    Unprintable characters are replaced. Raises ValueError for a text that is no caption.
    """

    members: TarMembers
    columns: Sequence[str]
    default: str = ""

    def __len__(self) -> int:
        return len(self.members)

    def make(self, index: int) -> str:
        text = self._text(index)
        if self.members.row(index)["is_json"]:
            record = self._record(text)
            text = next((record[name] for name in self.columns if record.get(name)), "")
            if not isinstance(text, str):
                raise ValueError("is no text")
        return printable(text).strip() or self.default

    def _text(self, index: int) -> str:
        member = self.members.text(index)
        if member is None:
            return ""
        if member.size > _MOST_TEXT:
            raise ValueError(f"has {member.size:,} bytes; at most {_MOST_TEXT:,} are read")
        with member.open() as content:
            try:
                return content.read().decode("utf-8-sig")
            except UnicodeDecodeError as error:
                raise ValueError("is not UTF-8") from error

    def _record(self, text: str) -> dict[str, Any]:
        if not text:
            return {}
        record = parse_json(text, only=self.columns)
        if not isinstance(record, dict):
            raise ValueError("is JSON, but no object")
        return record

    def keys(self, index: int) -> list[str]:
        """Keys of a sample's JSON; empty if its caption is another member."""
        if not self.members.row(index)["is_json"]:
            return []
        return list(self._record(self._text(index)))


_MOST_TEXT = 1 << 20
"""Bytes of the longest text that is read for a caption."""


def shards_of(place: str) -> list[Path]:
    """Tars that ``place`` names, in order of name.

    It is a tar, a folder with tars, or a pattern such as ``photos-{000..012}.tar``. A folder that
    Megatron-Energon has prepared may be followed by a split's name (``photos/val``); without one
    its training split is meant. Raises DataError.
    """
    path = Path(place)
    if _RANGE.search(place):
        return _existing(place, _expanded(place))
    if path.is_file():
        return [path]
    if (path / _SPLITS).is_file():
        return _split(path, "train")
    if (path.parent / _SPLITS).is_file() and not path.exists():
        return _split(path.parent, path.name)
    if path.is_dir():
        found = sorted(one for one in path.rglob("*.tar") if not one.name.startswith("."))
        packed = [*path.rglob("*.tar.gz"), *path.rglob("*.tgz")]
        if found and not packed:
            require_one_split(f"webdataset {place}", path, found, prefixes=True)
            return found
        fault, remedy = "there are no tars in it", f"Give tars, or images with folder:{place}."
        if packed:
            fault = f"{len(packed)} of its tars are compressed, so samples cannot be found by index"
            remedy = "Decompress them (gunzip): pictures are compressed already."
        raise DataError(f"webdataset {place}", [fault], remedy)
    raise DataError(
        f"webdataset {place}",
        ["there is no such file or folder"],
        "Give a folder with tars, a tar, or a pattern as in photos-{000..012}.tar.",
    )


def _root(place: str) -> Path:
    """Folder to which names of tars are relative."""
    before = Path(_RANGE.split(place)[0] + "x").parent if _RANGE.search(place) else Path(place)
    return before if before.is_dir() else before.parent


def _expanded(pattern: str) -> list[Path]:
    """Paths of a pattern with ranges of numbers, as wide as the first number is written."""
    names = [pattern]
    while found := _RANGE.search(names[0]):
        first, last = int(found[1]), int(found[2])
        if not first <= last < first + _MOST_SHARDS // len(names):
            fault = f"{found[0]} goes from {first:,} to {last:,}"
            raise DataError(f"webdataset {pattern}", [fault], "Give the lower number first.")
        names = [
            _RANGE.sub(f"{number:0{len(found[1])}}", name, count=1)
            for name in names
            for number in range(first, last + 1)
        ]
    return [Path(name) for name in names]


def _existing(place: str, tars: Sequence[Path]) -> list[Path]:
    missing = [path for path in tars if not path.is_file()]
    if missing:
        shown = ", ".join(map(str, missing[:_NAMED])) + (", ..." if len(missing) > _NAMED else "")
        fault = f"{len(missing)} of {len(tars)} tars are missing: {shown}"
        raise DataError(f"webdataset {place}", [fault], "Correct the names, or copy the tars.")
    return list(tars)


def _split(folder: Path, name: str) -> list[Path]:
    """Tars of one split of a folder prepared by Megatron-Energon."""
    told = read_yaml(folder / _SPLITS, FileKind.SPLITS)
    splits, left_out = told.get("split_parts"), told.get("exclude") or []
    if not isinstance(splits, dict) or not isinstance(splits.get(name), list):
        has = ", ".join(splits) if isinstance(splits, dict) else "none"
        fault = f"{_SPLITS} has no split {name}; its splits are: {has}"
        raise DataError(f"webdataset {folder}", [fault], "Name one of them: PATH/SPLIT.")
    names = [path for each in splits[name] for path in _expanded(str(each))]
    strange = [str(path) for path in names if path.is_absolute() or ".." in path.parts]
    if strange:
        fault = f"{_SPLITS} names tars outside of the folder: {', '.join(strange[:_NAMED])}"
        raise DataError(f"webdataset {folder}", [fault], "Names must stay in the folder.")
    if within := [str(each) for each in left_out if "/" in str(each).partition(".tar")[2]]:
        fault = f"{_SPLITS} excludes single samples ({', '.join(within[:_NAMED])})"
        raise DataError(f"webdataset {folder}", [fault], "Exclude whole tars, or write them anew.")
    aside = {path for each in left_out for path in _expanded(str(each))}
    return _existing(str(folder), [folder / path for path in names if path not in aside])


def _indexed(place: str, tars: Sequence[Path]) -> list[TarIndex]:
    """Index of each tar; raises DataError with every fault."""

    def look(path: Path) -> TarIndex | str:
        try:
            return TarIndex.of(path)
        except (OSError, ValueError) as error:
            return f"{path}: {error}"

    first = os.getpid() % max(len(tars), 1)  # processes that begin together share the work
    turned = [*tars[first:], *tars[:first]]
    with ThreadPoolExecutor(NUM_READERS) as readers:
        found = list(track(readers.map(look, turned), "indexing tars", "tars", len(tars)))
    found = [*found[len(tars) - first :], *found[: len(tars) - first]]
    if faults := [one for one in found if isinstance(one, str)]:
        raise DataError(f"webdataset {place}", faults, "Correct or remove these tars.")
    return [one for one in found if isinstance(one, TarIndex)]


def _faults(members: TarMembers, labels: Sequence[int]) -> Iterator[str]:
    if not len(members):
        yield "its tars have no pictures (members such as NAME.jpg, with NAME.txt for the caption)"
    without = sum(label < 0 for label in labels)
    if 0 < without < len(labels):
        yield f"{without:,} of {len(labels):,} samples have no class (NAME.cls), others have one"


def _cautions(members: TarMembers, captions: TarCaptions) -> Iterator[str]:
    """Notes on what is left aside, and on captions that are not found."""
    if count := sum(index.num_without_picture for index in members.indexes):
        yield f"{count:,} samples without a picture: ignored"
    if count := sum(index.num_further for index in members.indexes):
        yield f"{count:,} pictures beside the first of a sample: ignored"
    if count := sum(index.num_links for index in members.indexes):
        yield f"{count:,} links and sparse files with names of pictures: ignored"
    without = len(members) - members.num_captions
    if members.num_captions and without and not captions.default:
        yield f"{without:,} samples without a caption train unconditionally"
    keys = list[str]()
    with suppress(OSError, ValueError):  # told where it is read
        keys = captions.keys(0)
    if keys and not any(name in keys for name in captions.columns):
        yield (
            f"{members[0]}: its JSON has no {' or '.join(captions.columns)} for the caption; name "
            f"one of its keys as PATH#NAME: {', '.join(keys[:10])}"
        )
