"""Where checkpoints are below the folder that ``--save`` named, and which is the newest."""

from __future__ import annotations

import os
import re
from pathlib import Path

from megatron_pulse.backbone.published import PublishedError
from megatron_pulse.diffusion.published import find_component
from megatron_pulse.faults import UserError
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import FileError, read_text
from megatron_pulse.integration.checkpoint.integrity.hashes import INDEX, METADATA

LATEST = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""What Megatron calls a checkpoint without iteration, optimizer and random states."""
HALF = "half-written"
"""What a step is that has no ``metadata.json``."""
RESTORE = (
    "restore the files, or name another --save to train anew (and --pretrained-checkpoint, where "
    "there are weights to begin with)"
)
"""What to do where no step of a run is whole."""
_ITERATION = re.compile(r"[0-9]{1,18}")


class CheckpointError(UserError):
    """A checkpoint that cannot be used; the message says why and what to do."""


class DamagedError(CheckpointError):
    """A checkpoint that is not what was saved; ``reason`` says in a line what of it is not."""

    def __init__(self, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.reason = reason or text


class MovedError(DamagedError):
    """A step's folder that holds another ``step``, whole as that may be."""

    def __init__(self, folder: Path, step: int) -> None:
        super().__init__(f"{folder} holds step {step}: it was moved there")
        self.step = step


def checkpoint_folder(load: str | Path, iteration: int | None = None) -> Path:
    """The folder of the latest checkpoint (or of ``iteration``) below ``load``."""
    load = Path(load)
    if not load.is_dir():
        raise CheckpointError(f"{load} holds no checkpoint: there is no such folder")
    complete = complete_checkpoints(load)
    others = f"; complete are {', '.join(map(str, complete))}" if complete else ""
    latest = newest(load) if iteration is None else str(iteration)
    if latest is None and is_published(load):
        raise CheckpointError(
            f"{load} holds published weights: 'pulse import --from {load} --to DIR' makes a "
            "checkpoint of them"
        )
    if latest is None and (lost := lost_run(load)):
        raise CheckpointError(f"{load} holds a run that is damaged: {lost}; restore the files")
    if latest is None:
        raise CheckpointError(
            f"{load} holds no checkpoint: there is no {LATEST}{others}; give the folder that "
            "--save named"
        )
    folder = load / (RELEASE if latest == RELEASE else step_folder(int(latest)))
    if not (folder / METADATA).exists():
        reason = f"{folder} is not a complete torch_dist checkpoint"
        if folder.is_dir():
            reason += f" (it has no {METADATA})"
        elif iteration is None:
            reason = f"{load / LATEST} names {latest}, and there is no {folder}"
        raise DamagedError(reason + others, reason)
    return folder


def step_folder(iteration: int) -> str:
    """The name of a step's folder."""
    return f"iter_{iteration:07d}"


def newest(load: str | Path | None) -> str | None:
    """What ``load`` names as its latest checkpoint, ``release`` or an iteration, if anything.

    Raises DamagedError if the file that names it says something else.
    """
    if load is None or not os.path.lexists(path := Path(load) / LATEST):
        return None
    try:
        latest = read_text(path, FileKind.LATEST).strip()
    except FileError as error:
        raise DamagedError(str(error)) from error
    if latest != RELEASE and not _ITERATION.fullmatch(latest):
        raise DamagedError(f"{path} does not name an iteration: {ascii(latest[:40])}")
    return latest


def newest_named(load: str | Path | None) -> str | None:
    """``newest``; None also where the file that names it is damaged."""
    try:
        return newest(load)
    except DamagedError:
        return None


def is_published(folder: Path) -> bool:
    """Whether ``folder`` is one of diffusers', a pipeline's or a model's."""
    if (folder / "model_index.json").is_file():
        return True
    try:
        find_component(folder)
    except PublishedError:
        return False
    return True


def complete_checkpoints(load: Path) -> list[int]:
    """The iterations below ``load`` whose checkpoints were written to the end."""
    return sorted(int(path.name[5:]) for path in step_folders(load) if (path / METADATA).exists())


def step_folders(load: Path) -> list[Path]:
    """The folders of steps below ``load``, complete or not."""
    found = (path for path in load.glob("iter_*") if _ITERATION.fullmatch(path.name[5:]))
    return sorted(path for path in found if path.is_dir())


def lost_run(load: Path) -> str:
    """What is there of a run below ``load`` that has saved, where neither the newest is named nor
    any step was written to its end; else empty.

    A run that ended in its first save leaves one step without an index, which is written when all
    ranks have written theirs: nothing is lost with it.
    """
    if os.path.lexists(load / LATEST) or complete_checkpoints(load):
        return ""
    begun = step_folders(load)
    steps = [path for path in load.glob("iter_*") if _ITERATION.match(path.name[5:])]
    if steps == begun and len(steps) == 1 and not (steps[0] / INDEX).exists():
        steps = []
    found = sorted(path for path in (*steps, load / RELEASE) if path.is_dir())
    if not found:
        return ""
    gone = [LATEST] if (load / RELEASE / METADATA).exists() else [LATEST, f"any {METADATA}"]
    return f"{', '.join(path.name for path in found)}, without {' and '.join(gone)}"
