"""Saving of checkpoints that appear whole or not at all, with clear errors for a full disk.

With ``--async-save`` a thread of each rank writes while training continues (``async_writer.py``)::

  main thread   step 2, plan, copy   step 3   step 4   all wrote: index, hashes, newest   step 5
  writer                             write, hash ..
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
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
from megatron_pulse.full_disk import full_remedy, why_full
from megatron_pulse.integration.checkpoint.async_writer import copied, write_in_threads
from megatron_pulse.integration.checkpoint.folders import LATEST, step_folder
from megatron_pulse.integration.checkpoint.integrity.hashes import (
    METADATA,
    BufferedFile,
    FileHash,
    HashedFile,
    gather_hashes,
    metadata_text,
)
from megatron_pulse.integration.checkpoint.selection.retention import Retention
from megatron_pulse.integration.megatron.wandb_artifacts import CheckpointArtifacts
from megatron_pulse.runtime.collectives import gather_objects
from megatron_pulse.runtime.failure_board import PulseError
from megatron_pulse.runtime.watchdog.progress import PROGRESS


@functools.cache
def results_queue(mode: str = "") -> queue.Queue[Any]:
    """Queue for the results of a checkpoint's writers, which are threads of this process.

    Megatron's queue is in a process of its own, a manager that imports torch again. It outlives a
    killed rank and keeps its output open.
    """
    return queue.Queue()


class AtomicTracker:
    """Megatron's file access, which replaces the file naming the newest checkpoint as a whole."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def open(self, path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Open like the builtin ``open``."""
        if mode == "w" and os.path.basename(path) == LATEST:
            return _replaced(path)
        return self._original.open(path, mode, *args, **kwargs)


@contextlib.contextmanager
def _replaced(path: str) -> Iterator[Any]:
    with replacing(path) as beside, beside.open("w") as file:
        yield file


class Saving:
    """Megatron's ``save_checkpoint`` and ``maybe_finalize_async_save`` with clear errors.

    An error tells what could not be written, and which checkpoints are left. Only one checkpoint is
    written at a time.
    """

    def __init__(
        self, save: Callable[..., Any], finish: Callable[..., Any], retention: Retention
    ) -> None:
        self._save, self._finish = save, finish
        self._retention = retention
        self._artifacts = CheckpointArtifacts()
        self._unfinished: int | None = None
        """Step that is being written beside training."""

    def save(self, iteration: int, *args: Any, **kwargs: Any) -> Any:
        """Save ``iteration``; with ``--async-save`` copy it now and write it in the background."""
        self.finish(blocking=True)
        with _telling("saving", iteration):
            result = self._save(iteration, *args, **kwargs)
        self._unfinished = iteration if get_args().async_save else None
        if self._unfinished is None:
            self._end(iteration)
        return result

    def finish(self, blocking: bool = False, terminate: bool = False) -> None:
        """End the checkpoint that is being written, if all ranks have written it (collective).

        Waits for all ranks if ``blocking``.
        """
        step = self._unfinished
        with contextlib.nullcontext() if step is None else _telling("ending the save of", step):
            self._finish(blocking=blocking, terminate=terminate)
        if step is not None and is_empty_async_queue():
            self._unfinished = None
            self._end(step)
        if blocking:
            with PROGRESS.during("removing checkpoints", patient=True):
                self._retention.join()

    def _end(self, step: int) -> None:
        """Act on a checkpoint that all ranks have ended."""
        self._artifacts.log()
        with PROGRESS.during("choosing checkpoints to keep", patient=True):
            self._retention.apply(step)


@contextlib.contextmanager
def _telling(what: str, iteration: int) -> Iterator[None]:
    try:
        with PROGRESS.during(f"{what} step {iteration}", patient=True):
            yield
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        folder = Path(get_args().save)
        # Megatron's writers drop the system's message.
        if (reason := why_full(error, [folder], guess=True)) is None:
            raise
        raise PulseError(
            f"the checkpoint of step {iteration} cannot be written: {reason}\n"
            + _what_is_left(folder, iteration, reason)
        ) from error


def _what_is_left(folder: Path, iteration: int, reason: str) -> str:
    half, latest = step_folder(iteration), folder / LATEST
    newest = (
        (f"the newest complete checkpoint is step {latest.read_text()}")
        if latest.exists()
        else "there is no complete checkpoint"
    )
    return f"{newest}. Delete {half}, {full_remedy(reason)}, and start again"


class _Hashing:
    """Extension of Megatron's strategy: each rank hashes the files that it writes.

    All hashes go into the file that is written last.
    """

    def __init__(self, plan: Callable[..., Any]) -> None:
        self._plan = plan
        self._files: dict[Path, HashedFile] = {}
        self._told: dict[str, dict[str, FileHash]] = {}

    def open(self, path: str | Path, mode: str) -> io.BufferedWriter:
        """Replacement of ``open`` in Megatron's writers."""
        self._files[Path(path)] = file = HashedFile(path)
        return BufferedFile(file)

    def save(self, strategy: Any, state: Any, folder: str | Path) -> None:
        """Replacement of the strategy's ``save``."""
        self._request(strategy, state, folder).execute_sync()

    def async_save(self, strategy: Any, state: Any, folder: str | Path, name: str = "") -> Any:
        """Replacement of the strategy's ``async_save``, which writes a copy of the state."""
        return self._request(strategy, copied(state), folder)

    def save_config(self, config: Any, folder: str | Path) -> None:
        """Replacement of ``save_config``, which ends a checkpoint."""
        text = metadata_text(asdict(config), self._told.pop(str(folder)))
        with replacing(Path(folder) / METADATA) as beside:
            beside.write_text(text)

    def is_news(self, record: logging.LogRecord) -> bool:
        """False for Megatron's log of an error that ``check`` raises with its reason."""
        return not any(file.refused for file in self._files.values())

    def _request(self, strategy: Any, state: Any, folder: str | Path) -> Any:
        request = self._plan(strategy, state, folder, async_strategy="mcore")
        failed: list[Exception] = []

        def write(*args: Any, **kwargs: Any) -> None:
            try:
                request.async_fn(*args, **kwargs)
            except Exception as error:  # an exception of a thread would be lost
                failed.append(error)

        def check() -> None:
            refused = [file.refused for file in self._files.values() if file.refused]
            told = gather_objects(next(iter([*refused, *failed]), None))
            if (first := next(filter(None, told), None)) is not None:
                self._files.clear()
                _drain(results_queue())  # Megatron's result, with another reason or none
                raise first

        def tell() -> None:
            mine = {path.name: file.hashed for path, file in self._files.items()}
            self._files.clear()
            self._told[str(folder)] = gather_hashes(Path(folder), mine)

        return request._replace(
            async_fn=None if request.async_fn is None else write,
            finalize_fns=[check, *request.finalize_fns, tell],
        )


def _drain(results: queue.Queue[Any]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            results.get_nowait()


@functools.cache
def patch_saving() -> None:
    """Make Megatron's saving use this module; once per process."""
    import megatron.core.dist_checkpointing.serialization as serialization
    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem
    import megatron.core.dist_checkpointing.strategies.torch as strategy

    # Megatron's synchronous saving is implemented by a deprecated asynchronous one, and would warn.
    strategy._logged_mcore_async_deprecation = True
    filesystem.get_write_results_queue = results_queue
    hashing = _Hashing(strategy.TorchDistSaveShardedStrategy.async_save)
    strategy.TorchDistSaveShardedStrategy.save = lambda *state: hashing.save(*state)
    strategy.TorchDistSaveShardedStrategy.async_save = lambda *state: hashing.async_save(*state)
    serialization.save_config = hashing.save_config
    filesystem.open = hashing.open
    logging.getLogger(filesystem.__name__).addFilter(hashing.is_news)
    checkpointing.maybe_msc = AtomicTracker(checkpointing.maybe_msc)
    write_in_threads()
