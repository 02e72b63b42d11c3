"""Index of a tar of samples as in WebDataset: where each sample's picture, caption and class are.

Members in a row whose names are equal up to the first dot of the last part are one sample
(``a/7.jpg``, ``a/7.txt``, ``a/7.cls``). A tar is read once, head by head. Its index is kept in the
cache folder under the tar's path, size and time of change.
"""

from __future__ import annotations

import errno
import io
import os
import re
import struct
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from megatron_pulse.data.images.opening import SUFFIXES
from megatron_pulse.data.split_groups import ends_hash
from megatron_pulse.data.stored_file import ArchivedFile, Window
from megatron_pulse.files import cache_folder, open_regular, replacing
from megatron_pulse.fonts import printable

_VERSION = 2
"""Version of the kept indexes; those of others are not read."""
_NAME = re.compile(r"((?:.*/)?[^/.]+)\.([^/]*)", re.DOTALL)
_META = re.compile(r"__[^/]*__(?:$|/)")
"""Names of members about the tar, which are no samples."""
_PICTURES = frozenset(suffix[1:] for suffix in SUFFIXES)
_TEXTS = ("txt", "caption", "json")
"""Extensions of captions: of several the first here counts."""
_DAMAGED = (tarfile.TarError, EOFError, OverflowError, MemoryError, RecursionError, struct.error)
"""Exceptions for heads that cannot be, such as sizes beyond memory and endless names."""
_LABEL = "cls"
_LABEL_BYTES = 32
"""Bytes of the longest class number."""
_BUFFER_BYTES = 1 << 16
ROW = np.dtype(
    [(name, "<i8") for name in ("offset", "size", "text_offset", "text_size", "label", "name_end")]
    + [("picture_hash", "<u8"), ("text_hash", "<u8"), ("is_json", "?")]
)
"""A sample: the places of its picture and its caption (size -1: none), its class (-1: none), the
end of its picture's name among all names, and their ``ends_hash`` (0 without a caption)."""


Stamp = tuple[int, int, int]
"""Number, size and time of change of a file."""


def stamp_of(stat: os.stat_result) -> Stamp:
    """Stamp of a file, another one for another file in its place."""
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def on_one_line(name: str) -> str:
    """A member's name for people."""
    return printable(name).replace("\n", "\ufffd").replace("\r", "\ufffd")


@dataclass(frozen=True)
class TarMember(ArchivedFile):
    """The file ``name`` in ``archive``: ``size`` bytes from ``offset`` on.

    ``stamp`` is that of the archive (see ``stamp_of``). Another archive in its place is an OSError.
    ``hash`` is that of its ends, 0 if it is not known.
    """

    archive: Path
    name: str
    offset: int
    size: int
    stamp: Stamp
    hash: int = 0

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        with open_regular(self.archive) as content:
            if stamp_of(os.fstat(content.fileno())) != self.stamp:
                raise OSError(errno.ESTALE, f"{self.archive} has changed; begin again")
            window = Window(content, self.offset, self.size)
            yield io.BufferedReader(window, min(self.size, _BUFFER_BYTES) or 1)

    def num_bytes(self) -> int:
        return self.size

    def ends(self) -> int:
        return self.hash

    def version(self) -> str:
        return f"{self.archive} {self.stamp} {self.offset} {self.size}"

    def relative_to(self, root: Path) -> str:
        return f"{os.path.relpath(self.archive, root)}: {on_one_line(self.name)}"

    def __str__(self) -> str:
        return f"{self.archive}: {on_one_line(self.name)}"


@dataclass(frozen=True)
class TarIndex:
    """Samples of one tar.

    - ``rows``: an entry of dtype ``ROW`` for each sample.

    - ``names``: names of all pictures, one after another.

    - ``num_without_picture``: samples without a picture, which are left aside.

    - ``num_further``: pictures beside the first of a sample, which are left aside.

    - ``num_links``: links and sparse files with names of pictures, which are left aside.

    - ``stamp``: that of the tar.
    """

    rows: np.ndarray
    names: bytes
    num_without_picture: int = 0
    num_further: int = 0
    num_links: int = 0
    stamp: Stamp = (0, 0, 0)

    @classmethod
    def of(cls, path: Path) -> TarIndex:
        """Index of a tar, from the cache folder if it is there.

        Raises ValueError for a file that is no whole tar, OSError if it cannot be read.
        """
        stamp = stamp_of(path.stat())
        key = f"{_VERSION} {path.resolve()} {stamp}"
        kept = cache_folder() / "tar_index" / f"{xxhash.xxh3_128_hexdigest(key.encode())}.npz"
        with suppress(Exception):  # NumPy and zipfile raise many kinds for damaged files
            return cls._load(kept, stamp)
        made = _read(path)
        with suppress(OSError):  # a cache that cannot be written is no fault
            made._save(kept)
        return made

    @classmethod
    def _load(cls, kept: Path, stamp: Stamp) -> TarIndex:
        with np.load(kept) as arrays:
            pictures, further, links = arrays["counts"].tolist()
            rows, names = arrays["rows"], arrays["names"].tobytes()
        if rows.dtype != ROW or (len(rows) and rows["name_end"][-1] != len(names)):
            raise ValueError("it has other columns")
        return cls(rows, names, pictures, further, links, stamp)

    def _save(self, kept: Path) -> None:
        counts = np.array([self.num_without_picture, self.num_further, self.num_links])
        names: np.ndarray = np.frombuffer(self.names, np.uint8)
        with replacing(kept) as beside:
            np.savez(beside, rows=self.rows, names=names, counts=counts)

    def name(self, place: int) -> str:
        """Name of a sample's picture in the tar."""
        ends = self.rows["name_end"]
        start = int(ends[place - 1]) if place else 0
        return self.names[start : int(ends[place])].decode(errors="surrogateescape")


@dataclass
class _Sample:
    """Members of one sample by extension, in lower case."""

    name: str
    members: dict[str, tarfile.TarInfo] = field(default_factory=dict)


def _read(path: Path) -> TarIndex:
    """Index of a tar, from the heads of its members."""
    rows, names = list[tuple[object, ...]](), list[bytes]()
    without = further = length = 0
    links: list[str] = []
    with open_regular(path) as content:
        stamp = stamp_of(os.fstat(content.fileno()))
        for sample in _samples(content, links):
            pictures = [name for name in sample.members if name in _PICTURES] or [
                name for name in sample.members if name.rpartition(".")[2] in _PICTURES
            ]
            if not pictures:
                without += 1
                continue
            further += len(pictures) - 1
            picture = sample.members[pictures[0]]
            text = next((name for name in _TEXTS if name in sample.members), "")
            names.append(picture.name.encode(errors="surrogateescape"))
            length += len(names[-1])
            place, size, text_hash = 0, -1, 0
            if text:
                caption = _member(path, sample.members[text], stamp)
                place, size, text_hash = caption.offset, caption.size, ends_hash(caption)
            found = _member(path, picture, stamp)
            places = (found.offset, found.size, place, size, _label(content, sample), length)
            rows.append((*places, ends_hash(found), text_hash, text == "json"))
    return TarIndex(np.array(rows, ROW), b"".join(names), without, further, len(links), stamp)


def _samples(content: BinaryIO, links: list[str]) -> Iterator[_Sample]:
    """Samples of an open tar, in its order; raises ValueError for damage.

    Adds to ``links`` the names of links and of sparse files that would be pictures.
    """
    sample: _Sample | None = None
    end = 0
    try:
        with tarfile.open(fileobj=content, mode="r:") as tar:
            for member in tar:
                tar.members = []  # type: ignore[attr-defined]  # else all of them stay in memory
                if member.size < 0 or tar.offset <= end:
                    raise ValueError(f"{on_one_line(member.name)} claims a size that cannot be")
                end = tar.offset
                found = _NAME.fullmatch(member.name)
                if found is None or _META.match(member.name):
                    continue
                if not member.isreg() or member.issparse():
                    links += [member.name] * (found[2].lower() in _PICTURES)
                    continue
                name, extension = found[1], found[2].lower()
                if sample is None or sample.name != name:
                    if sample is not None:
                        yield sample
                    sample = _Sample(name)
                if extension in sample.members:
                    raise ValueError(f"{on_one_line(member.name)} comes twice in one sample")
                sample.members[extension] = member
    except _DAMAGED as error:
        raise ValueError(f"{_damage(content)} ({error})") from error
    if fault := _end_fault(content, end):
        raise ValueError(fault)
    if sample is not None:
        yield sample


def _end_fault(content: BinaryIO, end: int) -> str:
    """Fault of a tar that is cut off after its last member, or has another one behind its end."""
    content.seek(end)
    if content.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        return "its end is missing, so it was not written to the end: write it again"
    padding, more = content.read(2 * tarfile.RECORDSIZE), content.seek(0, io.SEEK_END) - end
    if any(padding) or more > 2 * tarfile.RECORDSIZE:
        return f"{more:,} bytes follow its end, as in joined tars: write them as tars of their own"
    return ""


def _member(path: Path, member: tarfile.TarInfo, stamp: Stamp) -> TarMember:
    return TarMember(path, member.name, member.offset_data, member.size, stamp)


def _damage(content: BinaryIO) -> str:
    content.seek(0)
    if content.read(2) == b"\x1f\x8b":
        return "it is compressed, so its samples cannot be read by index: decompress it"
    return "it is not a whole tar: write it again"


def _label(content: BinaryIO, sample: _Sample) -> int:
    """Class number of a sample, -1 without one."""
    member = sample.members.get(_LABEL)
    if member is None:
        return -1
    content.seek(member.offset_data)
    text = content.read(min(member.size, _LABEL_BYTES)).strip()
    if not text.isdigit() or len(text) > 9:
        raise ValueError(f"{on_one_line(member.name)} is no class number from 0 on")
    return int(text)
