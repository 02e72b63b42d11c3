"""Errors of a full disk: which write failed, the reason (space, quota, file size), and the fix."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

_REMEDIES = {
    errno.ENOSPC: "free disk space",
    errno.EDQUOT: "raise the quota",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
}
_TEXTS = {os.strerror(code): code for code in _REMEDIES}
_FULL_BYTES = 1 << 20


def why_full(
    error: BaseException, places: Sequence[str | Path | None], *, guess: bool = False
) -> str | None:
    """Text ``PATH: No space left on device`` if a full disk, quota or file size limit caused
    ``error``.

    ``places`` are paths being written, for errors without a path; of several only one with a full
    disk is named. With ``guess`` a full disk there suffices, whatever the error.
    """
    known = [Path(place) for place in places if place]
    full = [place for place in known if _free_bytes(place) < _FULL_BYTES]
    code, path = _full_code(error)
    if code is None and guess and full:
        code = errno.ENOSPC
    if code is None:
        return None
    where = path or next(iter(full or (known if len(known) == 1 else [])), "the disk")
    return f"{where}: {os.strerror(code)}"


def full_remedy(reason: str) -> str:
    """Remedy for a ``reason`` of ``why_full``."""
    return next(_REMEDIES[code] for text, code in _TEXTS.items() if reason.endswith(text))


def full_error(error: Exception, beside: Path, path: Path) -> OSError | None:
    """OSError that names ``path`` if a full disk, quota or file size limit caused ``error``.

    None for other errors, and for one that names another file already. ``beside`` is the file or
    folder that was being written for ``path``, and is given up. Many writers drop the system's
    error, so bytes are appended to the newest file there to see.
    """
    code, named = _full_code(error)
    if code is None and isinstance(error, OSError | RuntimeError):
        files = [file for file in (beside, *beside.rglob("*")) if file.is_file()]
        newest = max(files, key=lambda file: file.stat().st_mtime_ns, default=None)
        code = None if newest is None else _appending_code(newest)
    if named is not None and Path(named).is_relative_to(beside):
        path = path / Path(named).relative_to(beside)
    elif named is not None:
        return None
    if code is None:
        return None
    return OSError(code, os.strerror(code), str(path))


def _full_code(error: BaseException) -> tuple[int | None, str | None]:
    """(errno of a full disk, quota or file size limit in the chain of ``error``, file if known)."""
    code, path = None, None
    cause: BaseException | None = error
    while cause is not None:
        code = next((code for text, code in _TEXTS.items() if text in str(cause)), code)
        if isinstance(cause, OSError) and cause.errno in _REMEDIES:
            code, path = code or cause.errno, path or cause.filename
        cause = cause.__cause__ or cause.__context__
    return code, path


def _appending_code(file: Path) -> int | None:
    """errno with which the system refuses to make ``file`` longer; None if that works."""
    try:
        with open(file, "ab", buffering=0) as appended:
            left = _FULL_BYTES
            while left:
                left -= appended.write(bytes(left))
            os.fsync(appended.fileno())
    except OSError as error:
        return error.errno if error.errno in _REMEDIES else None
    return None


def _free_bytes(place: Path) -> int:
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return _FULL_BYTES
