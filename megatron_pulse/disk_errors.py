"""Description of errors from a full disk: the reason and the file.

Python names no file when a write fails. Libraries such as safetensors and torch raise their own
errors, whose text contains the system's.
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
    """Text ``PATH: No space left on device`` if a full disk, quota or file size limit caused
    ``error``.

    ``places`` are paths being written, for errors without a path; among several the one with a full
    disk is named. With ``guess`` a full disk there suffices, whatever the error.
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
