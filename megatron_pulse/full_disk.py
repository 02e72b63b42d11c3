"""A disk without room: what could not be written, and where.

Python names no file when a write fails, and libraries below it (safetensors, torch) raise errors of
their own, whose text holds the system's.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TEXTS = tuple(os.strerror(code) for code in _CODES)
_FULL_BYTES = 1 << 20


def why_full(
    error: BaseException, places: Sequence[str | Path | None], *, guess: bool = False
) -> str | None:
    """``PATH: No space left on device``, if that, a quota or a limit of files is behind ``error``.

    ``places`` are what was being written, for errors that name no path: of several the one whose
    disk is full. With ``guess`` a full disk there is reason enough, whatever the error says.
    """
    full = [
        place
        for place in (Path(place) for place in places if place)
        if _free_bytes(place) < _FULL_BYTES
    ]
    path, reason = None, (_TEXTS[0] if guess and full else None)
    cause: BaseException | None = error
    while cause is not None:
        reason = next((text for text in _TEXTS if text in str(cause)), reason)
        if isinstance(cause, OSError) and cause.errno in _CODES:
            path = path or cause.filename
        cause = cause.__cause__ or cause.__context__
    if reason is None:
        return None
    where = path or next(iter(full), None) or next(iter(filter(None, places)), "the disk")
    return f"{where}: {reason}"


def _free_bytes(place: Path) -> int:
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return _FULL_BYTES
