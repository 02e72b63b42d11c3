"""Channels: FIFO transport of messages from one pipeline device to another.

Each ordered pair of devices has its own process group. No message then waits for one of other
devices, or for one of the opposite direction. Messages use single ``isend`` and ``irecv`` calls, on
NCCL on a separate stream, never grouped.

On gloo, posting locks the group's connection. The group's thread polls for this lock when data has
arrived from the other side. With one group for both directions, the thread would take the CPU core
from the poster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

GROUP_TIMEOUT, GROUP_LEAST_S = 10.0, 3600.0
"""Timeout of an NCCL group as a multiple of the device's timeout, and its minimum in seconds.

NCCL's own watchdog ends the process without naming the awaited message. It counts from enqueueing,
which is up to a step before execution.
"""

_THREAD_BLOCKS = 4
"""Maximum thread blocks of a transfer, which runs beside computation on the GPU."""


class PendingTransfer(Protocol):
    """A transfer in flight; the interface of torch.distributed's ``Work``."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Block the host (gloo) or the current stream (NCCL) until complete. Raises
        RuntimeError.
        """
        ...

    def is_completed(self) -> bool:
        """True if the transfer has ended, successfully or not."""
        ...


class Channel(Protocol):
    """One end of the connection from one device to another.

    ``on_stream`` is true if a wait blocks a stream instead of the host.
    """

    on_stream: bool

    def send(self, tensor: torch.Tensor) -> PendingTransfer:
        """Start sending; called at the source."""
        ...

    def receive(self, buffer: torch.Tensor) -> PendingTransfer:
        """Start receiving; called at the destination."""
        ...


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU the current device within the context."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


type Opener = Callable[[dist.ProcessGroup, int, int, float], Channel]
"""Factory of channels: pipeline group, source and destination ranks, timeout in seconds.

Both ends call the factory; other ranks do not.
"""


class _PairGroup:
    """Channel with its own process group of two ranks; ``make`` creates it from a store and a rank.

    ``dist.new_group`` is unsuitable. By default all processes of the job must take part. With local
    synchronization the name depends on each member's number of groups, and these numbers differ.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        source: int,
        destination: int,
        make: Callable[[dist.Store, int], Any],
    ) -> None:
        rank, self._peer = (0, 1) if group.rank() == source else (1, 0)
        self._group = make(store_of(group, source, destination), rank)

    def send(self, tensor: torch.Tensor) -> PendingTransfer:
        work: PendingTransfer = self._group.send([tensor], self._peer, 0)
        return work

    def receive(self, buffer: torch.Tensor) -> PendingTransfer:
        work: PendingTransfer = self._group.recv([buffer], self._peer, 0)
        return work


class GlooChannel(_PairGroup):
    """Channel over gloo, connected at construction."""

    on_stream = False

    def __init__(
        self, group: dist.ProcessGroup, source: int, destination: int, timeout_s: float
    ) -> None:
        limit = timedelta(seconds=timeout_s)
        super().__init__(
            group, source, destination, lambda s, rank: dist.ProcessGroupGloo(s, rank, 2, limit)
        )


class NcclChannel(_PairGroup):
    """Channel over NCCL, connected at construction."""

    on_stream = True

    def __init__(
        self, group: dist.ProcessGroup, source: int, destination: int, timeout_s: float
    ) -> None:
        options = _options(timeout_s)
        super().__init__(
            group, source, destination, lambda s, rank: dist.ProcessGroupNCCL(s, rank, 2, options)
        )
        # A communicator's first call connects both ends and blocks both hosts.
        first = torch.zeros(1, device="cuda")
        work = self.send(first) if group.rank() == source else self.receive(first)
        work.wait(timedelta(seconds=timeout_s))
        torch.cuda.synchronize()


_stores: Counter[tuple[int, int]] = Counter()


def store_of(group: dist.ProcessGroup, source: int, destination: int) -> dist.Store:
    """Part of the job's store for one channel.

    Its name counts the channels between two ranks; both ends have opened equally many.
    """
    ends = dist.get_global_rank(group, source), dist.get_global_rank(group, destination)
    _stores[ends] += 1
    name = f"megatron_pulse/channel/{ends[0]}-{ends[1]}/{_stores[ends]}"
    return dist.PrefixStore(name, dist.distributed_c10d._get_default_store())


def _options(timeout_s: float) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    options.config.max_ctas = _THREAD_BLOCKS
    options._timeout = timedelta(seconds=max(GROUP_TIMEOUT * timeout_s, GROUP_LEAST_S))
    return options


OPENERS: dict[str, Opener] = {"gloo": GlooChannel, "nccl": NcclChannel}
"""Channel factories by the backend of the pipeline's group."""
