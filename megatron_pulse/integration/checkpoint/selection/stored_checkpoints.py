"""Checkpoints in a folder, with their state."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_pulse.errors import Faults
from megatron_pulse.integration.checkpoint.folders import (
    HALF,
    LATEST,
    RELEASE,
    CheckpointError,
    DamagedError,
    MovedError,
    newest,
    newest_named,
    read_best,
    step_folder,
)
from megatron_pulse.integration.checkpoint.integrity.hashes import (
    METADATA,
    all_chunks,
    find_hash_faults,
    find_size_faults,
    read_hashes,
)
from megatron_pulse.integration.checkpoint.integrity.verify import require_readable
from megatron_pulse.integration.checkpoint.lock import is_in_use
from megatron_pulse.integration.checkpoint.saved_run import read_common, require_in_place
from megatron_pulse.integration.checkpoint.selection.recovery import DAMAGED

REMOVED = ".removed"
"""Suffix of a folder whose removal has begun."""
_STEP = re.compile(r"iter_([0-9]{1,18})((?:\.damaged(?:\.[0-9]+)?)?(?:\.removed)?)")
"""Names of the folders of steps, with the suffixes of runs and commands; others are the user's."""


@dataclass(frozen=True)
class StoredCheckpoint:
    """Folder of one checkpoint.

    ``step`` is None for imported weights, and for folders set aside or half removed. ``faults`` are
    visible without reading files: without faults, all sizes are as saved. ``is_begun`` marks a
    checkpoint that a live run has not finished writing. ``is_moved`` marks a folder found to hold
    another step, and ``is_best`` the lowest validation loss.
    """

    folder: Path
    step: int | None
    num_bytes: int
    written: float
    """Time of the last write, in seconds since 1970."""
    faults: tuple[str, ...]
    is_newest: bool
    is_begun: bool = False
    is_moved: bool = False
    is_best: bool = False

    @property
    def is_hashed(self) -> bool:
        """True if the hashes of its files were kept, so that it can be verified."""
        return not self.faults and read_hashes(self.folder) is not None

    @property
    def is_aside(self) -> bool:
        """True if it was set aside or half removed, so that no run continues from it."""
        return self.step is None and self.folder.name != RELEASE

    @property
    def is_link(self) -> bool:
        """True if the folder is a symbolic link; its target is not ours to remove."""
        return self.folder.is_symlink()

    def read(self, progress: Callable[[int], object]) -> StoredCheckpoint:
        """Read every byte; return the same checkpoint with all ``faults`` and ``is_moved``.

        ``progress`` is called with numbers of bytes read.
        """
        if self.faults:
            return self
        hashes = read_hashes(self.folder) or {}
        found: list[str] = []
        for chunk in all_chunks(hashes):
            found += find_hash_faults(self.folder, hashes, [chunk])
            whole = hashes[chunk.name]
            progress(whole.num_bytes // len(whole.chunks))
        refusal = None if found else self.refusal()
        if refusal is not None:
            found.append(refusal.reason)
        faults = tuple(dict.fromkeys(found))
        return replace(self, faults=faults, is_moved=isinstance(refusal, MovedError))

    def refusal(self) -> DamagedError | None:
        """Error that a run meets when it opens the checkpoint; None without one."""
        try:
            require_readable(self.folder)
            require_in_place(self.folder, read_common(self.folder))
        except DamagedError as error:
            return error
        return None


def stored_in(folder: Path, is_held: bool = False) -> list[StoredCheckpoint]:
    """Checkpoints below ``folder``, oldest first, with those set aside or half removed.

    ``is_held`` says that this process has the folder's lock, so no other run writes there. Raises
    CheckpointError if there is none, and DamagedError if the record of the best is damaged.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder")
    named, best = newest_named(folder), read_best(folder)
    found = []
    for path in sorted(folder.iterdir()):
        match = _STEP.fullmatch(path.name)
        if not path.is_dir() or (match is None and path.name != RELEASE):
            continue
        step = int(match[1]) if match and not match[2] else None
        is_newest = named is not None and path.name == (
            RELEASE if named == RELEASE else step_folder(int(named))
        )
        one = _look_at(path, step, is_newest)
        begun = one.faults == (HALF,) and not is_held and is_being_saved(one)
        is_best = best is not None and step == best.step
        found.append(replace(one, is_begun=begun, is_best=is_best))
    if not found:
        hint = ". Give the folder of --save" if (folder / METADATA).exists() else ""
        raise CheckpointError(f"{folder} holds no checkpoint{hint}")
    return sorted(found, key=lambda one: (one.step is None, one.step or 0, one.folder.name))


def require_newest(folder: Path, stored: Sequence[StoredCheckpoint]) -> None:
    """Raise CheckpointError unless the named newest checkpoint exists."""
    latest = newest(folder)
    if latest is None:
        raise CheckpointError(f"{folder} has no {LATEST}")
    if not any(one.is_newest for one in stored):
        raise CheckpointError(f"{folder / LATEST} names {latest}, which does not exist")


def is_being_saved(one: StoredCheckpoint) -> bool:
    """True if a live run has not yet named the checkpoint as complete, and may still write it."""
    folder = one.folder.parent
    named = newest_named(folder)
    last = int(named) if named is not None and named != RELEASE else 0
    return (one.step or 0) > last and is_in_use(folder)


def _look_at(path: Path, step: int | None, is_newest: bool) -> StoredCheckpoint:
    files = [file for file in path.rglob("*") if file.is_file()]
    faults: tuple[str, ...] = ()
    if path.name.endswith(REMOVED):
        faults = ("half removed",)
    elif DAMAGED in path.name:
        faults = ("set aside (damaged)",)
    elif not (path / METADATA).exists():
        faults = (HALF,)
    else:
        try:
            faults = tuple(find_size_faults(path, read_hashes(path)))
        except Faults as error:
            faults = tuple(error.faults)
    written = max((file.stat().st_mtime for file in files), default=path.stat().st_mtime)
    return StoredCheckpoint(
        path, step, sum(file.stat().st_size for file in files), written, faults, is_newest
    )
