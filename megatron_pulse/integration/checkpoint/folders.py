"""Folders of checkpoints inside the folder of ``--save``, the newest and the best of them."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from megatron_pulse.backbone.published_weights import PublishedError
from megatron_pulse.diffusion.published import find_component
from megatron_pulse.errors import UserError
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import FileError, read_json, read_text, write_with_checksum
from megatron_pulse.integration.checkpoint.integrity.hashes import INDEX, METADATA
from megatron_pulse.json_validation import Count, validated

LATEST = "latest_checkpointed_iteration.txt"
BEST_RECORD = "best_checkpoint.json"
BEST: Literal["best"] = "best"
"""Name of the checkpoint with the lowest validation loss, in place of its step."""
type Step = int | Literal["best"]
RELEASE = "release"
"""Megatron's name of a checkpoint without iteration, optimizer and random states."""
HALF = "half-written"
"""State of a step without ``metadata.json``."""
RESTORE = (
    "restore the files, or start a new run with another --save (and --pretrained-checkpoint, if "
    "there are initial weights)"
)
"""Advice where no step of a run is whole."""
_ITERATION = re.compile(r"[0-9]{1,18}")


class CheckpointError(UserError):
    """Checkpoint that cannot be used; the message gives the reason and the remedy."""


class DamagedError(CheckpointError):
    """Checkpoint that is not as it was saved; ``reason`` is one line on the fault."""

    def __init__(self, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.reason = reason or text


class MovedError(DamagedError):
    """Folder of a step that holds another ``step``, perhaps undamaged."""

    def __init__(self, folder: Path, step: int) -> None:
        super().__init__(f"{folder} holds step {step}: it was renamed")
        self.step = step


def checkpoint_folder(load: str | Path, iteration: Step | None = None) -> Path:
    """Folder of the latest checkpoint in ``load``, or of ``iteration``."""
    load = Path(load)
    if not load.is_dir():
        raise CheckpointError(f"{load} holds no checkpoint: there is no such folder")
    if iteration == BEST:
        iteration = best_step(load)
    complete = complete_checkpoints(load)
    others = f"; complete steps: {', '.join(map(str, complete))}" if complete else ""
    latest = newest(load) if iteration is None else str(iteration)
    if latest is None and is_published(load):
        raise CheckpointError(
            f"{load} holds published weights: 'pulse import --from {load} --to DIR' converts them "
            "to a checkpoint"
        )
    if latest is None and (lost := lost_run(load)):
        raise CheckpointError(f"{load} holds a damaged run: {lost}. Restore the files")
    if latest is None:
        raise CheckpointError(
            f"{load} holds no checkpoint: there is no {LATEST}{others}. Give the folder of --save"
        )
    folder = load / (RELEASE if latest == RELEASE else step_folder(int(latest)))
    if not (folder / METADATA).exists():
        reason = f"{folder} is not a complete torch_dist checkpoint"
        if folder.is_dir():
            reason += f" (it has no {METADATA})"
        elif iteration is None:
            reason = f"{load / LATEST} names {latest}, but {folder} does not exist"
        raise DamagedError(reason + others, reason)
    return folder


def step_folder(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def newest(load: str | Path | None) -> str | None:
    """Latest checkpoint that ``load`` names: ``release`` or an iteration; None if it names none.

    Raises DamagedError if the file with the name has another content.
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


@dataclass(frozen=True)
class BestCheckpoint:
    """Step with the lowest validation loss of a run, this loss, and the validation it is of."""

    step: Count
    validation_loss: float
    validation: str = ""

    def write(self, save: Path) -> None:
        """Make this the best checkpoint of ``save``, atomically."""
        write_with_checksum(save / BEST_RECORD, json.dumps(asdict(self), indent=1) + "\n")


def read_best(load: Path) -> BestCheckpoint | None:
    """Best checkpoint that ``load`` records; None without a record.

    Raises DamagedError for a damaged record.
    """
    path = load / BEST_RECORD
    if not os.path.lexists(path):
        return None
    try:
        return validated(BestCheckpoint, read_json(path, FileKind.BEST))
    except FileError as error:
        raise DamagedError(str(error)) from error
    except ValueError as error:
        raise DamagedError(f"{path}: {error}") from error


def best_step(load: Path) -> int:
    """Step of the best checkpoint in ``load``; raises CheckpointError without a record."""
    if (best := read_best(load)) is None:
        raise CheckpointError(
            f"{load} records no best checkpoint: a run with --pulse-keep-best does. Name a step"
        )
    return best.step


def newest_named(load: str | Path | None) -> str | None:
    """``newest``, and None also if the file with the name is damaged."""
    try:
        return newest(load)
    except DamagedError:
        return None


def is_published(folder: Path) -> bool:
    """True if ``folder`` is a pipeline or a model of diffusers."""
    if (folder / "model_index.json").is_file():
        return True
    try:
        find_component(folder)
    except PublishedError:
        return False
    return True


def complete_checkpoints(load: Path) -> list[int]:
    """Iterations in ``load`` with completely written checkpoints."""
    return sorted(int(path.name[5:]) for path in step_folders(load) if (path / METADATA).exists())


def step_folders(load: Path) -> list[Path]:
    """Folders of steps in ``load``, complete or not."""
    found = (path for path in load.glob("iter_*") if _ITERATION.fullmatch(path.name[5:]))
    return sorted(path for path in found if path.is_dir())


def lost_run(load: Path) -> str:
    """Remains of a run in ``load`` that names no newest step and has no complete one; else empty.

    A run that ended during its first save leaves one step without an index. The index is written
    after all ranks have written their parts, so nothing is lost with such a step.
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
