"""Selection and removal of old checkpoints, never of one from which a run would continue.

A link's target also stays. The folder is locked throughout, so that no run writes between the check
and the removal::

  read      the named newest, else the newest, until one is intact: a run would continue from
            it (``recovery`` has the same rule); then the newest ones, until as many are
            intact as are to stay
  choose    unread ones are older; damaged ones are chosen only on request
  remove    each is renamed first, and a half removed one is removed the next time
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_pulse.integration.checkpoint.folders import (
    HALF,
    LATEST,
    RELEASE,
    CheckpointError,
    newest_named,
)
from megatron_pulse.integration.checkpoint.lock import FolderLock
from megatron_pulse.integration.checkpoint.selection.stored_checkpoints import (
    REMOVED,
    StoredCheckpoint,
)

Progress = Callable[[int], object]
"""Callback for numbers of bytes read."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that no run begins there; raises FolderInUse if a run writes."""
    lock = FolderLock(folder, wait_s=0)
    try:
        yield
    finally:
        lock.release()


def read_checkpoints_to_keep(
    stored: Sequence[StoredCheckpoint], keep: int, progress: Progress = lambda num_bytes: None
) -> tuple[list[StoredCheckpoint], set[Path]]:
    """Checkpoints with the faults of those read, and the folders that stay.

    These are the ``keep`` newest intact ones, and the one from which a run would continue. Raises
    CheckpointError if the newest is unknown, or if there are steps and none is intact.
    """
    folder = stored[0].folder.parent
    if newest_named(folder) is None and (folder / LATEST).exists():
        raise CheckpointError(
            f"{folder / LATEST} is damaged, so nothing was removed. Write the newest step into it "
            "first"
        )
    known = {one.folder: one for one in stored}
    read: set[Path] = set()

    def is_whole(one: StoredCheckpoint) -> bool:
        if one.folder not in read:
            read.add(one.folder)
            known[one.folder] = one.read(progress)
        return not known[one.folder].faults

    steps = [one for one in stored if one.step is not None and one.faults != (HALF,)]
    newest_first = steps[::-1]
    goes_on, has_readable = None, False
    for one in sorted(newest_first, key=lambda one: not one.is_newest):
        if is_whole(one) and (one.is_hashed or not has_readable):
            goes_on = one
            break
        has_readable = has_readable or one.refusal() is None
    if goes_on is None and steps:
        raise CheckpointError(
            f"{folder}: nothing was removed, since no step there is intact. 'pulse checkpoint "
            "verify' lists the damage; remove checkpoints by hand"
        )
    staying: set[Path] = set()
    for one in newest_first:
        if len(staying) < keep and is_whole(one):
            staying.add(one.folder)
    if goes_on is not None:
        staying.add(goes_on.folder)
    return list(known.values()), staying


def to_remove(
    stored: Sequence[StoredCheckpoint],
    staying: set[Path],
    every: int | None = None,
    damaged: bool = False,
) -> list[StoredCheckpoint]:
    """Checkpoints to remove, half removed ones first.

    All steps go, except those ``staying``, those divisible by ``every``, the named newest and the
    best. With ``damaged``, those with faults go as well. A moved one stays, since perhaps only its
    name is wrong. Links, targets of any link in the folder, and imported weights stay.
    """
    led_to = {place for one in stored for path in _links(one) for place in _around(path)}
    found: list[StoredCheckpoint] = []
    for one in stored:
        kept = one.is_newest or one.is_best or one.folder in staying
        if kept or one.is_link or one.folder.name == RELEASE:
            continue
        if one.folder.resolve() in led_to:
            continue
        if one.folder.name.endswith(REMOVED):
            found.insert(0, one)
        elif one.faults:
            found += [one] * (damaged and not one.is_moved)
        elif every is None or one.step is None or one.step % every:
            found.append(one)
    return found


def _links(one: StoredCheckpoint) -> Iterator[Path]:
    for path in (one.folder, *one.folder.rglob("*")):
        if path.is_symlink():
            yield path


def _around(link: Path) -> Iterator[Path]:
    """Target of a link, and the folders that contain it."""
    target = link.resolve()
    yield from (target, *target.parents)


def set_removed(one: StoredCheckpoint) -> Path:
    """Rename a checkpoint, so that a half removed folder is not taken for one."""
    if one.folder.name.endswith(REMOVED):
        return one.folder
    return one.folder.rename(one.folder.with_name(one.folder.name + REMOVED))


def remove(chosen: Sequence[StoredCheckpoint]) -> Iterator[StoredCheckpoint]:
    """Remove ``chosen`` from a locked folder one after the other, and yield each removed one."""
    for one in chosen:
        shutil.rmtree(set_removed(one))
        yield one
