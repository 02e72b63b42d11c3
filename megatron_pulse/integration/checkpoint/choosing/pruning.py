"""Which checkpoints of a folder can go: never what a run would go on from, nor what it leads to.

All happens while the folder is held, so that no run writes there between looking and removing::

    read      what is named the newest, else the newest, until one is whole: a run would go on from
              it (``falling_back`` has the same rule); then the newest, until as many are
              whole as are to stay
    choose    what was not read is older; what is damaged goes only where that is asked for
    remove    each gets another name first, and what is half removed goes the next time
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_pulse.integration.checkpoint.choosing.stored import REMOVED, StoredCheckpoint
from megatron_pulse.integration.checkpoint.folders import (
    HALF,
    LATEST,
    RELEASE,
    CheckpointError,
    newest_named,
)
from megatron_pulse.integration.checkpoint.lock import FolderLock

Progress = Callable[[int], object]
"""Is told of bytes that were read."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Within, no run begins in ``folder``; raises FolderInUse where one writes there."""
    lock = FolderLock(folder, wait_s=0)
    try:
        yield
    finally:
        lock.release()


def read_those_that_stay(
    stored: Sequence[StoredCheckpoint], keep: int, progress: Progress = lambda num_bytes: None
) -> tuple[list[StoredCheckpoint], set[Path]]:
    """The same with the faults of what was read; and the folders of the ``keep`` newest that are
    whole, and of what a run would go on from.

    Raises CheckpointError where the newest is not known, or there are steps and none is whole.
    """
    folder = stored[0].folder.parent
    if newest_named(folder) is None and (folder / LATEST).exists():
        raise CheckpointError(
            f"{folder / LATEST} is damaged: nothing is removed; name the newest there first"
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
            f"{folder}: nothing is removed, for no step there is whole: 'pulse checkpoint verify' "
            "says what is damaged; remove by hand what you do not need"
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
    """Which can go, what is half removed first: all steps but those ``staying``, those divisible by
    ``every`` and the one that is named the newest; with ``damaged`` also what has faults, but for
    what was moved, of which another name may be all that is wrong. Links, what any link in the
    folder leads to, and imported weights stay."""
    led_to = {place for one in stored for path in _links(one) for place in _around(path)}
    found: list[StoredCheckpoint] = []
    for one in stored:
        if one.is_link or one.is_newest or one.folder.name == RELEASE or one.folder in staying:
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
    """Where a link leads to, and the folders around that."""
    target = link.resolve()
    yield from (target, *target.parents)


def remove(chosen: Sequence[StoredCheckpoint]) -> Iterator[StoredCheckpoint]:
    """Remove ``chosen`` from a folder that is held, one after the other; each when it is gone.

    Each gets another name first, so that what is half removed is nobody's checkpoint.
    """
    for one in chosen:
        path = one.folder
        if not path.name.endswith(REMOVED):
            path = path.rename(path.with_name(path.name + REMOVED))
        shutil.rmtree(path)
        yield one
