"""Checkpoints written by a thread of each rank, beside training (``--async-save``).

Megatron's own writer is a process. If spawned, it takes as much host memory as another import of
torch, outlives a killed rank, and finds no device without a GPU. It also shares the memory of CPU
tensors, so it would write the values of later steps. If forked, it copies a process with threads,
whose locks may then be held for ever.

A thread ends with its rank. Its long operations (copying into files, hashing, disk access) release
Python's global lock.
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
    """``state`` with copies of the CPU tensors that this rank writes.

    Megatron itself copies GPU tensors before it passes them to a writer.
    """
    for value in nested_values(state):
        if isinstance(value, ShardedTensor) and is_main_replica(value.replica_id):
            if value.data is not None and value.data.device.type == "cpu":
                value.data = value.data.detach().clone()
    return state


class ThreadCaller(AsyncCaller):
    """Caller that runs one request of Megatron's queue in a thread of this process."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """Start the thread; tensors are on the CPU on return."""
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
        """True if all ranks are done (collective); waits for them if ``blocking``."""
        if blocking:
            self.close()
        writes = self._thread is not None and self._thread.is_alive()
        return not writes if no_dist else bool(self.sync_all_async_calls(writes))

    def close(self, abort: bool = False) -> None:
        """Wait for the end, bounded by the watchdog of the main thread."""
        if self._thread is not None and not abort:
            self._thread.join()

    def __del__(self) -> None:
        pass


class _Remover(threading.Thread):
    """Thread instead of a process that removes an old checkpoint; Megatron logs its ``pid``."""

    pid = None


@functools.cache
def write_in_threads() -> None:
    """Make Megatron's background writing use threads; once per process."""
    AsyncCallsQueue._get_async_caller = lambda self: ThreadCaller()
    # These wrappers would disable Python's garbage collector while writing.
    for name in ("write_preloaded_data", "write_preloaded_data_multithread"):
        write = getattr(FileSystemWriterAsync, name).__wrapped__
        setattr(FileSystemWriterAsync, name, staticmethod(write))
    removing = SimpleNamespace(Process=_Remover)
    checkpointing.multiprocessing = SimpleNamespace(get_context=lambda method: removing)
