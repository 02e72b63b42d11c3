"""Recovery from a damaged newest checkpoint: the run continues from the newest intact one.

::

  each rank alone    sizes, the index, the flags     -> newest_readable: the newest that can be read
  all ranks          every byte, each its share      -> newest_intact: the newest that is intact
  rank 0, with the   iter_0000060 -> iter_0000060.damaged, and the name of the newest is written
  lock of --save     anew; nothing is deleted
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from megatron_pulse.errors import format_faults
from megatron_pulse.files import replacing
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
    verified_other_steps,
)
from megatron_pulse.integration.checkpoint.saved_run import SavedRun, read_saved_run
from megatron_pulse.runtime.collectives import gather_objects

DAMAGED = ".damaged"
"""Suffix of a folder that was set aside."""


@dataclass(frozen=True)
class SkippedCheckpoint:
    """Checkpoint that was skipped, with the ``reason``.

    ``step`` is the step in its folder's name (None: unknown, or the folder stays). ``lost`` is the
    step whose state is lost with it.
    """

    reason: str
    step: int | None = None
    lost: int | None = None

    @classmethod
    def of(cls, error: DamagedError, step: int | None) -> SkippedCheckpoint:
        """Record of ``error`` on a step; a moved folder counts for the step that it holds."""
        return cls(error.reason, step, error.step if isinstance(error, MovedError) else step)


def newest_readable(load: str | Path) -> tuple[SavedRun, tuple[SkippedCheckpoint, ...]]:
    """Newest run in ``load`` that can be read, and the skipped checkpoints.

    Without a valid name of the newest, the last completely written step counts. Raises
    DamagedError, of all of them, if none can be read.
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
        passed.append(SkippedCheckpoint.of(error, named))
    for step in reversed(complete):
        if step == named:
            continue
        try:
            return read_saved_run(load, step), tuple(passed)
        except DamagedError as error:
            passed.append(SkippedCheckpoint.of(error, step))
    tried = {step_folder(step) for step in (named, *complete) if step is not None}
    half = [folder for folder in step_folders(load) if folder.name not in tried]
    reasons = [one.reason for one in passed] + [f"{folder} is {HALF}" for folder in half]
    raise DamagedError(format_faults(f"no checkpoint in {load} is intact", reasons, RESTORE))


def newest_intact(
    saved: SavedRun, known: tuple[SkippedCheckpoint, ...] = ()
) -> tuple[SavedRun, tuple[SkippedCheckpoint, ...]]:
    """``saved``, or the newest step with every byte as saved, and the skipped steps (collective).

    ``known`` are steps skipped before. Raises DamagedError if no step is intact, CheckpointError if
    ranks have read different ones.
    """
    chosen = gather_objects(str(saved.folder))
    if len(set(chosen)) > 1:
        raise CheckpointError(
            f"ranks found different checkpoints ({', '.join(sorted(set(chosen)))}). Use storage "
            "that all ranks share, and start again"
        )
    if not (faults := find_damage(saved.folder)):
        return saved, known
    tried = {one.step for one in known}
    passed = [*known, SkippedCheckpoint.of(damaged(saved.folder, faults), saved.iteration)]
    for step, folder, why in verified_other_steps(saved.folder, tried):
        if why:
            error = damaged(folder, why)
            unknown = why == [UNHASHED]
            passed.append(
                SkippedCheckpoint(error.reason) if unknown else SkippedCheckpoint.of(error, step)
            )
            continue
        try:
            older = read_saved_run(saved.folder.parent, step)
        except DamagedError as error:
            passed.append(SkippedCheckpoint.of(error, step))
        except CheckpointError as error:
            passed.append(SkippedCheckpoint(str(error)))
        else:
            if older.record == saved.record:
                return older, tuple(passed)
            passed.append(SkippedCheckpoint(f"{folder} holds another backbone"))
    raise damaged(saved.folder, faults, f"no other step there is intact: {RESTORE}")


def describe_passed(passed: tuple[SkippedCheckpoint, ...], saved: SavedRun) -> list[str]:
    """Warnings on the skipped checkpoints and the lost steps."""
    lines = [f"warning: {one.reason}" for one in passed]
    first = saved.iteration + 1
    lost = max((one.lost for one in passed if one.lost is not None), default=0)
    again = f"; steps {first} to {lost} are lost and will be trained again" if lost >= first else ""
    return [
        *lines,
        f"warning: continuing from step {saved.iteration}, the newest intact checkpoint{again}",
    ]


def describe_newer(saved: SavedRun) -> str:
    """Warning if a newer step exists than the one named the newest; empty if none."""
    folder = saved.folder.parent
    newer = [step for step in complete_checkpoints(folder) if step > saved.iteration]
    if not newer:
        return ""
    return (
        f"warning: {folder / LATEST} names step {saved.iteration}, but step {newer[-1]} there is "
        f"complete. Unless you went back on purpose, stop, and continue with --load {folder} "
        f"--ckpt-step {newer[-1]}"
    )


def set_aside(
    passed: tuple[SkippedCheckpoint, ...], saved: SavedRun, args: argparse.Namespace
) -> None:
    """Rename skipped checkpoints in ``--save``, whose lock this process holds.

    The next save of such a step then finds no files. ``saved`` becomes the named newest.
    """
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
    """``path``, or the first numbered variant of it that does not exist."""
    paths = (path, *(path.with_name(f"{path.name}.{number}") for number in range(2, 1000)))
    return next(path for path in paths if not os.path.lexists(path))
