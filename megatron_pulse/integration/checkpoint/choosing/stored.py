"""The checkpoints in a folder: what each is worth, and which can go."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_pulse.faults import Faults
from megatron_pulse.integration.checkpoint.checkpoints import read_common, require_in_place
from megatron_pulse.integration.checkpoint.choosing.falling_back import DAMAGED
from megatron_pulse.integration.checkpoint.folders import (
    HALF,
    LATEST,
    RELEASE,
    CheckpointError,
    DamagedError,
    MovedError,
    newest,
    newest_named,
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

REMOVED = ".removed"
"""The end of the name of a folder whose removal has begun."""
_STEP = re.compile(r"iter_([0-9]{1,18})((?:\.damaged(?:\.[0-9]+)?)?(?:\.removed)?)")
"""What a folder of a step is called, and what runs and commands add; all else is a user's own."""


@dataclass(frozen=True)
class StoredCheckpoint:
    """A folder of one checkpoint.

    ``step`` is None of imported weights and of what was set aside or half removed; ``faults`` are
    what can be seen without reading files: of one with none, sizes are as they were saved. What a
    run that is alive has not yet written to its end ``is_begun``, what was found to be another step
    ``is_moved``.
    """

    folder: Path
    step: int | None
    num_bytes: int
    written: float
    """Seconds since 1970."""
    faults: tuple[str, ...]
    is_newest: bool
    is_begun: bool = False
    is_moved: bool = False

    @property
    def is_hashed(self) -> bool:
        """Whether its files' hashes were kept, so that it can be verified."""
        return not self.faults and read_hashes(self.folder) is not None

    @property
    def is_aside(self) -> bool:
        """Whether it was set aside or half removed: no run goes on from it."""
        return self.step is None and self.folder.name != RELEASE

    @property
    def is_link(self) -> bool:
        """Whether it lies elsewhere: it is then not ours to remove."""
        return self.folder.is_symlink()

    def read(self, progress: Callable[[int], object]) -> StoredCheckpoint:
        """The same, every byte read, with what is not as it was saved as ``faults``, and whether it
        was moved; ``progress`` is told of bytes."""
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
        """Why a run does not find out what it is of, before it reads all of it; None if it does."""
        try:
            require_readable(self.folder)
            require_in_place(self.folder, read_common(self.folder))
        except DamagedError as error:
            return error
        return None


def stored_in(folder: Path, is_held: bool = False) -> list[StoredCheckpoint]:
    """The checkpoints below ``folder``, oldest first, with what was set aside or half removed.

    ``is_held``: this process has its lock, so no run writes there. Raises CheckpointError where
    there is none.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder")
    named = newest_named(folder)
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
        found.append(replace(one, is_begun=begun))
    if not found:
        hint = "; give the folder that --save named" if (folder / METADATA).exists() else ""
        raise CheckpointError(f"{folder} holds no checkpoint{hint}")
    return sorted(found, key=lambda one: (one.step is None, one.step or 0, one.folder.name))


def require_newest(folder: Path, stored: Sequence[StoredCheckpoint]) -> None:
    """Raise CheckpointError unless the file that names the newest names one that is there."""
    latest = newest(folder)
    if latest is None:
        raise CheckpointError(f"{folder} has no {LATEST}")
    if not any(one.is_newest for one in stored):
        raise CheckpointError(f"{folder / LATEST} names {latest}, which is not there")


def is_being_saved(one: StoredCheckpoint) -> bool:
    """Whether a run that is alive has not yet named it, and may write it anew."""
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
        faults = ("set aside, as damaged",)
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
