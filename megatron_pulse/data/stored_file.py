"""Files as a dataset reads them: on their own, or within an archive or a table."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO

from megatron_pulse.files import open_regular


class ArchivedFile(ABC):
    """A file within another one; ``str`` gives its name for people.

    Equal ones are the same place of the same archive.
    """

    @abstractmethod
    def open(self) -> AbstractContextManager[BinaryIO]:
        """Open for reading, as a seekable file of its own bytes alone; raises OSError."""

    @abstractmethod
    def num_bytes(self) -> int:
        """Number of bytes; raises OSError."""

    def ends(self) -> int:
        """Hash of size, beginning and end as by ``ends_hash``, if it is known; else 0."""
        return 0

    @abstractmethod
    def version(self) -> str:
        """Text that is another one for another file, or if the archive has changed; raises
        OSError.
        """

    @abstractmethod
    def relative_to(self, root: Path) -> str:
        """Name of the file, with that of its archive below ``root``."""


StoredFile = Path | ArchivedFile
"""A regular file, or one within an archive."""


@contextmanager
def open_stored(file: StoredFile) -> Iterator[BinaryIO]:
    """Open a file for reading; raises OSError, without an errno for a path of another kind."""
    with file.open() if isinstance(file, ArchivedFile) else open_regular(file) as content:
        yield content


def stored_size(file: StoredFile) -> int:
    """Number of bytes of a file; raises OSError."""
    return file.num_bytes() if isinstance(file, ArchivedFile) else file.stat().st_size


def version_of(file: StoredFile) -> str:
    """Text that is another one for another file, or a changed one; raises OSError."""
    if isinstance(file, ArchivedFile):
        return file.version()
    told = file.stat()
    return f"{file} {told.st_size} {told.st_mtime_ns}"


class Window(io.RawIOBase):
    """The ``size`` bytes from ``start`` on of an open file, as a file of their own."""

    def __init__(self, content: BinaryIO, start: int, size: int) -> None:
        self._content, self._start, self._size = content, start, size
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"negative position {base + offset}")
        self._place = base + offset
        return self._place

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        count = max(0, min(len(buffer), self._size - self._place))
        self._content.seek(self._start + self._place)
        read = self._content.read(count)
        buffer[: len(read)] = read
        self._place += len(read)
        return len(read)
