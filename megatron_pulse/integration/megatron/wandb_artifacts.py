"""Checkpoints as artifacts of Weights & Biases: written by a run, or its start.

Megatron's last rank logs a checkpoint while rank 0 still writes the name of the newest one, a file
of the artifact. This module logs it after all ranks have ended the checkpoint.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.training import wandb_utils
from megatron.training.global_vars import get_args, get_wandb_writer

_log_saved = wandb_utils.on_save_checkpoint_success
_MOST = 128
"""Longest name of an artifact, in characters."""


class CheckpointArtifacts:
    """Queue of Megatron's log entries on checkpoints, until ``log`` is called on all ranks."""

    def __init__(self) -> None:
        patch_wandb()
        self._held: list[tuple[Any, ...]] = []
        wandb_utils.on_save_checkpoint_success = self._hold

    def _hold(self, *saved: Any) -> None:
        self._held.append(saved)

    def log(self) -> None:
        """Log the checkpoints that all ranks have ended by now (collective)."""
        if not get_args().wandb_project:
            self._held.clear()
            return
        dist.barrier()
        for saved in self._held:
            _log_saved(*saved)
        self._held.clear()


@functools.cache
def patch_wandb() -> None:
    """Make Megatron use valid artifact names, and ask only for artifacts that may exist.

    Applies once per process.
    """
    wandb_utils._get_artifact_name_and_version = artifact_name
    wandb_utils.on_load_checkpoint_success = _link_loaded


def artifact_name(save: Path, checkpoint: Path) -> tuple[str, str]:
    """Name and version of a checkpoint in ``save``: W&B takes letters, digits, _ . and -."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", save.resolve().name)[:_MOST]
    return name or "checkpoints", checkpoint.stem


def _link_loaded(checkpoint: str, load: str) -> None:
    """Tell W&B that this run continues ``checkpoint``, if a run with W&B has written it."""
    writer = get_wandb_writer()
    project = wandb_utils._get_wandb_artifact_tracker_filename(load)
    if not writer or writer.run.offline or not project.is_file():
        return
    name, version = artifact_name(Path(load), Path(checkpoint))
    artifact = f"{project.read_text().strip()}/{name}:{version}"
    try:
        writer.run.use_artifact(artifact)
    except Exception as error:  # W&B's errors are of many kinds, and the run itself has all data
        print(
            f"W&B does not show the checkpoint that this run continues: artifact {artifact}: "
            f"{error}"
        )
