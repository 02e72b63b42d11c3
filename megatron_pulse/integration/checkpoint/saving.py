"""Checkpoints that appear whole or not at all, and what is said where the disk is full."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import megatron.training.checkpointing as checkpointing
from megatron.training.global_vars import get_args
from torch.distributed.checkpoint.api import CheckpointException

from megatron_pulse.files import replacing
from megatron_pulse.full_disk import why_full
from megatron_pulse.integration.checkpoint.folders import LATEST, step_folder
from megatron_pulse.integration.checkpoint.integrity.hashes import (
    METADATA,
    FileHash,
    hash_written,
    sealed,
)
from megatron_pulse.runtime.failures import PulseError
from megatron_pulse.runtime.watch.place import HERE


@functools.cache
def results_queue(mode: str = "") -> queue.Queue[Any]:
    """What a checkpoint's writers, threads of this process, answer on.

    Megatron's is in a process of its own (a manager that imports torch again, 600 MB a rank), which
    outlives a rank that is killed and keeps its output open.
    """
    return queue.Queue()


class WholeTracker:
    """Megatron's file access, but the name of the newest checkpoint is replaced, never cut."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def open(self, path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """As ``open``."""
        if mode == "w" and os.path.basename(path) == LATEST:
            return _replaced(path)
        return self._original.open(path, mode, *args, **kwargs)


@contextlib.contextmanager
def _replaced(path: str) -> Iterator[Any]:
    with replacing(path) as beside, beside.open("w") as file:
        yield file


def wrap_save(save_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's ``save_checkpoint``, which says where it could not write and what is left."""

    @functools.wraps(save_checkpoint)
    def save(iteration: int, *args: Any, **kwargs: Any) -> Any:
        try:
            with HERE.during(f"saving step {iteration}", patient=True):
                return save_checkpoint(iteration, *args, **kwargs)
        except (Exception, CheckpointException) as error:  # which is no Exception
            folder = Path(get_args().save)
            # Megatron's writers drop what the system said.
            if (reason := why_full(error, [folder], guess=True)) is None:
                raise
            raise PulseError(
                f"the checkpoint of step {iteration} cannot be written: {reason}\n"
                + _what_is_left(folder, iteration)
            ) from error

    return save


def _what_is_left(folder: Path, iteration: int) -> str:
    half, latest = step_folder(iteration), folder / LATEST
    newest = f"the newest is of step {latest.read_text()}" if latest.exists() else "there is none"
    return f"of whole checkpoints {newest}; delete {half}, make room, and start again"


def _with_hashes(
    save: Callable[..., None],
) -> tuple[Callable[..., None], Callable[[Any, str | Path], None]]:
    """Megatron's ``save`` of a strategy and ``save_config``, which rank 0 calls after it.

    All ranks hash what they have written; the hashes go into the one file that ends a checkpoint.
    """
    written: dict[str, dict[str, FileHash]] = {}

    @functools.wraps(save)
    def save_hashed(self: Any, state: Any, folder: str | Path) -> None:
        save(self, state, folder)
        written[str(folder)] = hash_written(Path(folder))

    def save_config(config: Any, folder: str | Path) -> None:
        text = sealed(asdict(config), written.pop(str(folder)))
        with replacing(Path(folder) / METADATA) as beside:
            beside.write_text(text)

    return save_hashed, save_config


@functools.cache
def patch_saving() -> None:
    """Make Megatron's saving use these; once per process."""
    import megatron.core.dist_checkpointing.serialization as serialization
    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem
    import megatron.core.dist_checkpointing.strategies.torch as strategy

    # Its synchronous saving warns of a deprecated asynchronous one, as which it is implemented.
    strategy._logged_mcore_async_deprecation = True
    filesystem.get_write_results_queue = results_queue
    strategy.TorchDistSaveShardedStrategy.save, serialization.save_config = _with_hashes(
        strategy.TorchDistSaveShardedStrategy.save
    )
    checkpointing.maybe_msc = WholeTracker(checkpointing.maybe_msc)
