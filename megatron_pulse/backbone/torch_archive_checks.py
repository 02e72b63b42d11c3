"""Safety checks of files written by ``torch.save``, before ``torch.load`` reads them.

torch.save writes a zip archive of uncompressed records. A forged archive can hold compressed
records: a few megabytes expand to any number of gigabytes, and memory-mapped values are wrong. Its
records can also overlap, or be listed twice for two different readers.
"""

from __future__ import annotations

import errno
import io
import os
import struct
import zipfile
from pathlib import Path
from typing import IO, Any

from megatron_pulse.files import open_regular

_MAGIC = b"PK\3\4"
_END, _LOCATOR, _LARGE_END = (struct.Struct(form) for form in ("<4s4H2LH", "<4sLQL", "<4sQ2H2L4Q"))
_MODIFIED = "it is not an archive of torch.save"

Readable = IO[bytes] | io.RawIOBase


class FilePart(io.RawIOBase):
    """``size`` bytes of an open file from ``first`` on, as a file."""

    def __init__(self, file: IO[bytes], first: int, size: int) -> None:
        self._file, self._first, self._size, self._at = file, first, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        at = offset + (0, self._at, self._size)[whence]
        if at < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = at
        return at

    def readinto(self, into: Any, /) -> int:
        self._file.seek(self._first + self._at)
        content = self._file.read(max(0, min(len(into), self._size - self._at)))
        into[: len(content)] = content
        self._at += len(content)
        return len(content)


def is_plain_archive(path: Path) -> bool:
    """True if ``path`` is an archive with records as torch.save stores them.

    Raises ValueError for other records, OSError unless ``path`` is a regular file.
    """
    with open_regular(path) as file:
        if archive := is_archive(file):
            require_stored(file)
    return archive


def is_archive(file: Readable) -> bool:
    """True if torch reads ``file`` as an archive, False for the format before version 1.6."""
    file.seek(0)
    begins = file.read(len(_MAGIC)) == _MAGIC
    file.seek(0)
    return begins


def require_stored(file: Readable) -> None:
    """Raise ValueError unless the archive's records are uncompressed and do not overlap.

    Leaves ``file`` at its beginning.
    """
    try:
        size = file.seek(0, 2)
        first = _directory(file, size)
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            if archive.start_dir != first:
                raise ValueError(_MODIFIED)
    except (zipfile.BadZipFile, struct.error, OSError, NotImplementedError) as error:
        raise ValueError(f"{_MODIFIED}: {error}") from error
    finally:
        file.seek(0)
    packed = [one.filename for one in records if one.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise ValueError(
            f"{len(packed)} of its records are compressed ({packed[0][:60]!r}), which torch.save "
            "never does. If you trust the file, load it with torch and save it again"
        )
    if sum(max(one.file_size, one.compress_size) for one in records) > size:
        raise ValueError(f"{_MODIFIED}: its records overlap")


def _directory(file: Readable, size: int) -> int:
    """Offset of the list of records, from the file's last bytes alone."""
    place = size - _END.size
    file.seek(max(0, place))
    magic, *_, num_bytes, first, comment = _END.unpack(file.read())
    if magic != b"PK\5\6" or comment:
        raise ValueError(_MODIFIED)
    if (locator := place - _LOCATOR.size) >= 0:
        file.seek(locator)
        magic, _, named, _ = _LOCATOR.unpack(file.read(_LOCATOR.size))
        if magic == b"PK\6\7":
            place = locator - _LARGE_END.size
            file.seek(max(0, place))
            magic, *_, num_bytes, first = _LARGE_END.unpack(file.read(_LARGE_END.size))
            if magic != b"PK\6\6" or named != place:
                raise ValueError(_MODIFIED)
    if first + num_bytes != place:
        raise ValueError(_MODIFIED)
    return int(first)
