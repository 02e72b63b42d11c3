"""Heads of pictures, read from their files once and remembered on disk.

Every rank needs all sizes, and finds them before the ranks have met. Processes of one machine
share the work: the first reads, and the others wait a while for the file that it writes. Sizes of
changed files are read again. The file's removal costs only time.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import xxhash

from megatron_pulse.data.images.opening import UNREADABLE, opened
from megatron_pulse.data.images.pictures import has_alpha, upright_size
from megatron_pulse.data.stored_file import StoredFile, version_of
from megatron_pulse.files import cache_folder, replacing
from megatron_pulse.progress import track

NUM_READERS = 8
"""Threads that read heads of files, each of which waits for storage most of the time."""
_FEWEST_KEPT = 1000
"""Files; the heads of fewer are read faster than processes agree who reads."""
_LONGEST_WAIT_S = 300.0
_POLL_S = 0.2
_ROW = np.dtype([("file", "<u8"), ("height", "<i4"), ("width", "<i4"), ("alpha", "?")])

Head = tuple[int, int, bool]
"""(height, width) of a picture that is set upright, and True if it has transparency."""


def heads_of(root: Path, files: Sequence[StoredFile]) -> list[Head | None]:
    """Head of each of ``files`` below ``root``; None for an unreadable one.

    Few are not remembered.
    """
    unique = list(dict.fromkeys(files))
    known = dict(zip(unique, _heads(root, unique), strict=True))
    return [known[path] for path in files]


def _heads(root: Path, files: Sequence[StoredFile]) -> list[Head | None]:
    if len(files) < _FEWEST_KEPT:
        return _read(files)
    name = xxhash.xxh3_128_hexdigest(str(root.resolve()).encode())
    place = cache_folder() / "picture-sizes" / f"{name}.npy"
    keys = _keys(files)
    if (found := _known(place, keys)) is not None:
        return found
    with _alone(place.with_suffix(".lock")):
        if (found := _known(place, keys)) is not None:
            return found
        old = _rows(place)
        missing = [i for i, key in enumerate(keys) if key not in old]
        read = dict(zip(missing, _read([files[i] for i in missing]), strict=True))
        heads = [read[i] if i in read else old[key] for i, key in enumerate(keys)]
        with suppress(OSError):
            _keep(place, keys, heads)
    return heads


def _read(files: Sequence[StoredFile]) -> list[Head | None]:
    def look(path: StoredFile) -> Head | None:
        try:
            with opened(path) as file:
                (width, height), alpha = upright_size(file), has_alpha(file)
        except UNREADABLE:  # told where it is read
            return None
        return height, width, alpha

    with ThreadPoolExecutor(NUM_READERS) as readers:
        looks: Iterator[Head | None] = readers.map(look, files)
        return list(track(looks, "reading picture headers", "files", len(files)))


def _keys(files: Sequence[StoredFile]) -> list[int]:
    """Hash of each file's path, size and time of change; 0 where there is no file."""

    def key(file: StoredFile) -> int:
        try:
            return int(xxhash.xxh3_64_intdigest(version_of(file).encode()))
        except OSError:
            return 0

    return list(map(key, files))


def _rows(place: Path) -> dict[int, Head]:
    try:
        table = np.load(place, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return {}
    if table.dtype != _ROW or table.ndim != 1:
        return {}
    return {file: (height, width, alpha) for file, height, width, alpha in table.tolist()}


def _known(place: Path, keys: Sequence[int]) -> list[Head | None] | None:
    """Remembered heads; None if one is missing."""
    rows = _rows(place)
    return [rows[key] for key in keys] if all(key in rows for key in keys) else None


def _keep(place: Path, keys: Sequence[int], heads: Sequence[Head | None]) -> None:
    """Remember heads; unreadable files are looked at again."""
    rows = [(key, *head) for key, head in zip(keys, heads, strict=True) if key and head is not None]
    with replacing(place) as beside, open(beside, "wb") as file:
        np.save(file, np.array(rows, _ROW))


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    """Hold the lock file ``place``, if another process releases it in time; else without it."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        file = open(place, "wb")
    except OSError:
        yield
        return
    end = time.monotonic() + _LONGEST_WAIT_S
    with file:
        while time.monotonic() < end:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(_POLL_S)
        yield
