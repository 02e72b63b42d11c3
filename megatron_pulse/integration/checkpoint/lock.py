"""Folder lock, held by rank 0 as long as it lives: one run at a time writes into a folder.

The lock is a POSIX record lock (``fcntl``). The kernel releases it when the process ends, in any
way, and no child inherits it. The file's content only describes the holder. The lock works between
nodes if the storage's mount has locks: NFS 4, NFS 3 with lockd, Lustre mounted with ``flock``. On
NFS the lock of a dead node lasts until its lease ends, about 90 s. On NFS 3 it lasts until the node
is up again.

Without locks on the mount, the holder touches the file every ``BEAT_S``. A file not touched for
``STALE_S``, by the storage's own clock, has no holder.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

LOCK = ".run.lock"
BEAT_S, STALE_S = 10.0, 60.0
_SETTLES_S = 0.5
_LOCKLESS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_LABELS: Mapping[str, str] = MappingProxyType(
    {"host": "on", "pid": "process", "since": "since", "job": "Slurm job"}
)


class FolderInUse(Exception):
    """Refusal of a folder that another run uses; the message gives the reason and the remedy."""


class FolderLock:
    """Lock on ``folder``, held by this process.

    Raises FolderInUse if another process still holds it after ``wait_s`` seconds, since a run that
    was just stopped needs a moment to end. An earlier start of the same Slurm job is dead and does
    not count.
    """

    def __init__(self, folder: Path, wait_s: float = 5.0) -> None:
        self._path = folder / LOCK
        self._file: int | None = None
        self._released = threading.Event()
        folder.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + wait_s
        while (held_by := self._try()) is not None:
            if _is_predecessor(held_by):
                self._path.unlink(missing_ok=True)  # the old lock stays with the removed file
            elif time.monotonic() >= deadline:
                raise FolderInUse(
                    f"another run writes into {folder} ({_describe(held_by)}). Wait until it "
                    "ends, stop it, or name another --save"
                )
            else:
                time.sleep(0.2)

    def release(self) -> None:
        """Release the lock and remove its file."""
        self._released.set()
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def _try(self) -> Mapping[str, str] | None:
        """Holder of the lock; None if this process holds it now, also on a mount without locks."""
        while True:
            file = _open(self._path)
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                held_by = _read(file)
                if error.errno in _LOCKLESS:
                    if held_by and self._beats(file):
                        os.close(file)
                        return held_by
                    mine = self._hold(file)
                    time.sleep(_SETTLES_S)
                    if (held_by := _read(file)) != mine:  # a simultaneous start wrote last
                        self._file = None
                        os.close(file)
                        return held_by
                    threading.Thread(target=self._beat, name="lock", daemon=True).start()
                    return None
                os.close(file)
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    return held_by
                raise
            if _is_file(file, self._path):
                self._hold(file)
                return None
            os.close(file)  # released, and its file removed, after it was opened

    def _hold(self, file: int) -> dict[str, str]:
        mine = _this_process()
        os.truncate(file, 0)
        os.pwrite(file, json.dumps(mine).encode(), 0)
        self._file = file
        return mine

    def _beats(self, file: int) -> bool:
        """True if the holder has touched the file lately, compared with a new file's time stamp."""
        with tempfile.NamedTemporaryFile(dir=self._path.parent, prefix=".clock.") as now:
            age_s = os.fstat(now.fileno()).st_mtime - os.fstat(file).st_mtime
        return age_s < STALE_S

    def _beat(self) -> None:
        while not self._released.wait(BEAT_S):
            try:
                os.utime(self._path)
            except OSError:
                pass  # storage that is unavailable for a moment


def is_in_use(folder: Path) -> bool:
    """True if a run holds ``folder`` now; false if unknown."""
    if not (folder / LOCK).exists():
        return False
    try:
        FolderLock(folder, wait_s=0).release()
    except FolderInUse:
        return True
    except OSError:
        pass
    return False


def _open(path: Path) -> int:
    """Open the file at ``path``, or create it, without following a link."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR):
            raise FolderInUse(_foreign(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise FolderInUse(_foreign(path))
    return file


def _foreign(path: Path) -> str:
    return f"{path} is not a lock file of a run. Remove it, or name another --save"


def _is_file(file: int, path: Path) -> bool:
    """True if the open ``file`` is still the file at ``path``."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _this_process() -> dict[str, str]:
    return {
        "host": socket.gethostname(),
        "pid": str(os.getpid()),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        **_slurm_start(),
    }


def _slurm_start() -> dict[str, str]:
    """Slurm job and number of its start, if Slurm started this process."""
    if "SLURM_JOB_ID" not in os.environ:
        return {}
    return {"job": os.environ["SLURM_JOB_ID"], "start": os.environ.get("SLURM_RESTART_COUNT", "0")}


def _is_predecessor(held_by: Mapping[str, str]) -> bool:
    """True if the holder is an earlier start of this Slurm job, of which one runs at a time."""
    mine = _slurm_start()
    return (
        bool(mine) and held_by.get("job") == mine["job"] and held_by.get("start") != mine["start"]
    )


def _read(file: int) -> dict[str, str]:
    """Description that the holder wrote of itself; empty if not written yet."""
    try:
        held_by = json.loads(os.pread(file, 4096, 0))
        return {str(key): str(value) for key, value in held_by.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _describe(held_by: Mapping[str, str]) -> str:
    known = [f"{label} {held_by[key]}" for key, label in _LABELS.items() if key in held_by]
    return ", ".join(known) or "unknown process"
