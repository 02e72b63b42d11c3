"""Checkpoints written by a thread of each rank, beside training (``--async-save``).

Megatron's own writer is a process. One that is spawned takes 600 MB for each rank, outlives a rank
that is killed, and finds no device where there is no GPU; of tensors on the CPU it gets the memory
and no copy, so that it writes what later steps make of them. One that is forked copies a process
with threads, whose locks may be held for ever then. A thread ends with its rank, and what takes
long in it (copying into files, hashing, the disk) lets Python run meanwhile.
"""

from __future__ import annotations

import functools
import threading
from types import SimpleNamespace
from typing import Any

import megatron.training.checkpointing as checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies.async_utils import (
    AsyncCaller,
    AsyncCallsQueue,
    AsyncRequest,
)
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync


def copied(state: Any) -> Any:
    """``state``, in which tensors on the CPU that this rank writes are copies.

    Those on a GPU Megatron copies, before it hands them to a writer.
    """
    for value in nested_values(state):
        if isinstance(value, ShardedTensor) and is_main_replica(value.replica_id):
            if value.data is not None and value.data.device.type == "cpu":
                value.data = value.data.detach().clone()
    return state


class ThreadCaller(AsyncCaller):
    """Runs one request of Megatron's queue in a thread of this process."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """Begin; tensors are on the CPU when this returns."""
        if async_req.async_fn is None:
            return
        arguments = list(async_req.async_fn_args)
        if async_req.preload_fn is not None:
            arguments[1] = async_req.preload_fn()
        self._thread = threading.Thread(
            target=async_req.async_fn,
            args=arguments,
            kwargs=async_req.async_fn_kwargs,
            name="checkpoint",
            daemon=True,  # a rank that fails does not wait for it
        )
        self._thread.start()

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Whether all ranks are done (collective); if it is ``blocking``, when they are."""
        if blocking:
            self.close()
        writes = self._thread is not None and self._thread.is_alive()
        return not writes if no_dist else bool(self.sync_all_async_calls(writes))

    def close(self, abort: bool = False) -> None:
        """Wait for the end; the watch of the main thread bounds it."""
        if self._thread is not None and not abort:
            self._thread.join()

    def __del__(self) -> None:
        pass


class _Remover(threading.Thread):
    """In the place of a process that removes an old checkpoint; Megatron logs its ``pid``."""

    pid = None


@functools.cache
def write_in_threads() -> None:
    """Make Megatron's background writing use threads; once per process."""
    AsyncCallsQueue._get_async_caller = lambda self: ThreadCaller()
    # They would keep Python's garbage collector off for as long as is written.
    for name in ("write_preloaded_data", "write_preloaded_data_multithread"):
        write = getattr(FileSystemWriterAsync, name).__wrapped__
        setattr(FileSystemWriterAsync, name, staticmethod(write))
    removing = SimpleNamespace(Process=_Remover)
    checkpointing.multiprocessing = SimpleNamespace(get_context=lambda method: removing)
