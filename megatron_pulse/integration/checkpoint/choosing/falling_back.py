"""Where the newest checkpoint of a run is damaged, the run goes on from the newest whole one.

::

    each rank alone    sizes, the index, the flags     -> read_newest: the newest that can be read
    all ranks          every byte, each its share      -> whole_start: the newest that is whole
    rank 0, with the   iter_0000060 -> iter_0000060.damaged, and the name of the newest is written
    lock of --save     anew; nothing is deleted
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from megatron_pulse.faults import told
from megatron_pulse.files import replacing
from megatron_pulse.integration.checkpoint.checkpoints import SavedRun, read_saved_run
from megatron_pulse.integration.checkpoint.folders import (
    HALF,
    LATEST,
    RESTORE,
    CheckpointError,
    DamagedError,
    MovedError,
    complete_checkpoints,
    newest,
    step_folder,
    step_folders,
)
from megatron_pulse.integration.checkpoint.integrity.verify import (
    UNHASHED,
    damaged,
    find_damage,
    gathered,
    judged_steps,
)

DAMAGED = ".damaged"
"""The end of the name of a folder that was set aside."""


@dataclass(frozen=True)
class Passed:
    """What was not gone on from: its ``reason``, the step by which its folder is called (None: it
    is not known, or stays there), and the one that was lost with it."""

    reason: str
    step: int | None = None
    lost: int | None = None

    @classmethod
    def of(cls, error: DamagedError, step: int | None) -> Passed:
        """What ``error`` says of a step; what was moved there is another's."""
        return cls(error.reason, step, error.step if isinstance(error, MovedError) else step)


def read_newest(load: str | Path) -> tuple[SavedRun, tuple[Passed, ...]]:
    """The newest run below ``load`` that can be read, and what was passed over for it.

    Where the file that names the newest is lost or names nothing that is there, it is the last step
    that was written to its end. Raises DamagedError, of all of them, if none can be read.
    """
    load = Path(load)
    named, passed = None, []
    complete = complete_checkpoints(load)
    try:
        latest = newest(load)
        if latest is None and complete:
            raise DamagedError(f"{load} has no {LATEST}")
        if latest is not None and latest.isdigit() and (load / step_folder(int(latest))).is_dir():
            named = int(latest)
        return read_saved_run(load), ()
    except DamagedError as error:
        passed.append(Passed.of(error, named))
    for step in reversed(complete):
        if step == named:
            continue
        try:
            return read_saved_run(load, step), tuple(passed)
        except DamagedError as error:
            passed.append(Passed.of(error, step))
    tried = {step_folder(step) for step in (named, *complete) if step is not None}
    half = [folder for folder in step_folders(load) if folder.name not in tried]
    reasons = [one.reason for one in passed] + [f"{folder} is {HALF}" for folder in half]
    raise DamagedError(told(f"no checkpoint in {load} is whole", reasons, RESTORE))


def newest_whole(
    saved: SavedRun, known: tuple[Passed, ...] = ()
) -> tuple[SavedRun, tuple[Passed, ...]]:
    """``saved``, or the newest step of which every byte is as it was saved (collective), and what
    was passed over; those that are ``known`` were before.

    Raises DamagedError if there is none, CheckpointError if ranks have read different ones.
    """
    chosen = gathered(str(saved.folder))
    if len(set(chosen)) > 1:
        raise CheckpointError(
            f"ranks go on from different checkpoints ({', '.join(sorted(set(chosen)))}): the "
            "folder must be on storage that all ranks see alike; start again"
        )
    if not (faults := find_damage(saved.folder)):
        return saved, known
    tried = {one.step for one in known}
    passed = [*known, Passed.of(damaged(saved.folder, faults), saved.iteration)]
    for step, folder, why in judged_steps(saved.folder, tried):
        if why:
            error = damaged(folder, why)
            unknown = why == [UNHASHED]
            passed.append(Passed(error.reason) if unknown else Passed.of(error, step))
            continue
        try:
            older = read_saved_run(saved.folder.parent, step)
        except DamagedError as error:
            passed.append(Passed.of(error, step))
        except CheckpointError as error:
            passed.append(Passed(str(error)))
        else:
            if older.record == saved.record:
                return older, tuple(passed)
            passed.append(Passed(f"{folder} holds another backbone"))
    raise damaged(saved.folder, faults, f"no other step there is whole: {RESTORE}")


def describe_passed(passed: tuple[Passed, ...], saved: SavedRun) -> list[str]:
    """Warnings: what was passed over, and which steps are lost."""
    lines = [f"warning: {one.reason}" for one in passed]
    first = saved.iteration + 1
    lost = max((one.lost for one in passed if one.lost is not None), default=0)
    again = f"; steps {first} to {lost} are lost and trained again" if lost >= first else ""
    return [
        *lines,
        f"warning: going on from step {saved.iteration}, the newest that is whole{again}",
    ]


def describe_newer(saved: SavedRun) -> str:
    """A warning where there is a newer step than the one that is named the newest; else empty."""
    folder = saved.folder.parent
    newer = [step for step in complete_checkpoints(folder) if step > saved.iteration]
    if not newer:
        return ""
    return (
        f"warning: {folder / LATEST} names step {saved.iteration}, and step {newer[-1]} there is "
        f"complete: unless you went back on purpose, stop, and go on with --load {folder} "
        f"--ckpt-step {newer[-1]}"
    )


def set_aside(passed: tuple[Passed, ...], saved: SavedRun, args: argparse.Namespace) -> None:
    """Rename what was passed over in ``--save``, which this process holds, so that the next save
    of that step finds no files; and name ``saved`` the newest."""
    folder = saved.folder.parent
    if args.save is None or Path(args.save).resolve() != folder.resolve():
        return
    for one in passed:
        there = None if one.step is None else folder / step_folder(one.step)
        if there is not None and there.is_dir():
            aside = there.rename(_free(there.with_name(there.name + DAMAGED)))
            print(f"set aside: {aside}", flush=True)
    if (folder / LATEST).is_dir():
        (folder / LATEST).rename(_free(folder / (LATEST + DAMAGED)))
    with replacing(folder / LATEST) as beside:
        beside.write_text(str(saved.iteration))


def _free(path: Path) -> Path:
    """``path``, or with a number behind it, where nothing is yet."""
    paths = (path, *(path.with_name(f"{path.name}.{number}") for number in range(2, 1000)))
    return next(path for path in paths if not os.path.lexists(path))
