"""Checkpoints that appear whole or not at all, and what is said where the disk is full.

With ``--async-save`` a thread of each rank writes while training goes on (``background.py``)::

    main thread   step 2, plan, copy   step 3   step 4   all wrote: index, hashes, newest   step 5
    writer                             write, hash ..
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import queue
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import megatron.training.checkpointing as checkpointing
from megatron.training.async_utils import is_empty_async_queue
from megatron.training.global_vars import get_args
from torch.distributed.checkpoint.api import CheckpointException

from megatron_pulse.files import replacing
from megatron_pulse.full_disk import why_full
from megatron_pulse.integration.checkpoint.background import copied, write_in_threads
from megatron_pulse.integration.checkpoint.folders import LATEST, step_folder
from megatron_pulse.integration.checkpoint.integrity.hashes import (
    METADATA,
    BufferedFile,
    FileHash,
    HashedFile,
    gather_hashes,
    sealed,
)
from megatron_pulse.integration.megatron.artifacts import CheckpointArtifacts
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


class Saving:
    """Megatron's ``save_checkpoint`` and ``maybe_finalize_async_save``, which say what could not be
    written, and what is left. One checkpoint is written at a time."""

    def __init__(self, save: Callable[..., Any], finish: Callable[..., Any]) -> None:
        self._save, self._finish = save, finish
        self._artifacts = CheckpointArtifacts()
        self._unfinished: int | None = None
        """The step that is being written beside training."""

    def save(self, iteration: int, *args: Any, **kwargs: Any) -> Any:
        """Save ``iteration``; with ``--async-save`` copy it, and let it be written from now on."""
        self.finish(blocking=True)
        with _telling("saving", iteration):
            result = self._save(iteration, *args, **kwargs)
        self._unfinished = iteration if get_args().async_save else None
        if self._unfinished is None:
            self._artifacts.log()
        return result

    def finish(self, blocking: bool = False, terminate: bool = False) -> None:
        """End the checkpoint that is being written, where all ranks have written it (collective);
        if it is ``blocking``, when they have."""
        if self._unfinished is None:
            self._finish(blocking=blocking, terminate=terminate)
            return
        with _telling("ending the save of", self._unfinished):
            self._finish(blocking=blocking, terminate=terminate)
        if is_empty_async_queue():
            self._unfinished = None
            self._artifacts.log()


@contextlib.contextmanager
def _telling(what: str, iteration: int) -> Iterator[None]:
    try:
        with HERE.during(f"{what} step {iteration}", patient=True):
            yield
    except (Exception, CheckpointException) as error:  # which is no Exception
        folder = Path(get_args().save)
        # Megatron's writers drop what the system said.
        if (reason := why_full(error, [folder], guess=True)) is None:
            raise
        raise PulseError(
            f"the checkpoint of step {iteration} cannot be written: {reason}\n"
            + _what_is_left(folder, iteration)
        ) from error


def _what_is_left(folder: Path, iteration: int) -> str:
    half, latest = step_folder(iteration), folder / LATEST
    newest = f"the newest is of step {latest.read_text()}" if latest.exists() else "there is none"
    return f"of whole checkpoints {newest}; delete {half}, make room, and start again"


class _Hashing:
    """Has Megatron's strategy hash on each rank what it writes; all hashes go into the file that
    ends a checkpoint."""

    def __init__(self, plan: Callable[..., Any]) -> None:
        self._plan = plan
        self._files: dict[Path, HashedFile] = {}
        self._told: dict[str, dict[str, FileHash]] = {}

    def open(self, path: str | Path, mode: str) -> io.BufferedWriter:
        """In the place of ``open`` in Megatron's writers."""
        self._files[Path(path)] = file = HashedFile(path)
        return BufferedFile(file)

    def save(self, strategy: Any, state: Any, folder: str | Path) -> None:
        """In the place of the strategy's ``save``."""
        self._request(strategy, state, folder).execute_sync()

    def async_save(self, strategy: Any, state: Any, folder: str | Path, name: str = "") -> Any:
        """In the place of the strategy's ``async_save``: what to write is a copy of the state."""
        return self._request(strategy, copied(state), folder)

    def save_config(self, config: Any, folder: str | Path) -> None:
        """In the place of ``save_config``, which ends a checkpoint."""
        text = sealed(asdict(config), self._told.pop(str(folder)))
        with replacing(Path(folder) / METADATA) as beside:
            beside.write_text(text)

    def _request(self, strategy: Any, state: Any, folder: str | Path) -> Any:
        request = self._plan(strategy, state, folder, async_strategy="mcore")
        failed: list[Exception] = []

        def write(*args: Any, **kwargs: Any) -> None:
            try:
                request.async_fn(*args, **kwargs)
            except Exception as error:  # of a thread nobody would hear
                failed.append(error)

        def check() -> None:
            if failed:
                raise failed[0]

        def tell() -> None:
            mine = {path.name: file.hashed for path, file in self._files.items()}
            self._files.clear()
            self._told[str(folder)] = gather_hashes(Path(folder), mine)

        return request._replace(
            async_fn=None if request.async_fn is None else write,
            finalize_fns=[check, *request.finalize_fns, tell],
        )


@functools.cache
def patch_saving() -> None:
    """Make Megatron's saving use these; once per process."""
    import megatron.core.dist_checkpointing.serialization as serialization
    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem
    import megatron.core.dist_checkpointing.strategies.torch as strategy

    # Its synchronous saving warns of a deprecated asynchronous one, as which it is implemented.
    strategy._logged_mcore_async_deprecation = True
    filesystem.get_write_results_queue = results_queue
    hashing = _Hashing(strategy.TorchDistSaveShardedStrategy.async_save)
    strategy.TorchDistSaveShardedStrategy.save = lambda *state: hashing.save(*state)
    strategy.TorchDistSaveShardedStrategy.async_save = lambda *state: hashing.async_save(*state)
    serialization.save_config = hashing.save_config
    filesystem.open = hashing.open
    checkpointing.maybe_msc = WholeTracker(checkpointing.maybe_msc)
    write_in_threads()
