"""Channels: what carries messages from one pipeline device to another, first in, first out.

Each ordered pair of devices has a process group of its own, so that no message waits for one of
other devices, nor for one of the other direction: a single ``isend`` or ``irecv`` at a time, on
NCCL on a stream of its own, never in a group. On gloo whoever posts locks the group's connection,
and its thread, for which something has come the other way, looks for the lock without a rest: with
one group for both directions that takes the core from the poster itself.
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
"""How many times as long as a device waits a group of NCCL does, and how many seconds at least. Its
watchdog ends the process without a word of what was waited for, and counts from when an operation
was enqueued, which is a step before it is done."""

_THREAD_BLOCKS = 4
"""What a transfer takes of a GPU at most: it runs beside the computing."""


class PendingTransfer(Protocol):
    """A transfer under way, as torch.distributed has it."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Wait for it, on gloo; on NCCL have the current stream wait. Raises RuntimeError."""
        ...

    def is_completed(self) -> bool:
        """Whether it has ended, one way or the other."""
        ...


class Channel(Protocol):
    """One end of the way from one device to another; ``on_stream`` says that a wait holds up a
    stream, and not the host."""

    on_stream: bool

    def send(self, tensor: torch.Tensor) -> PendingTransfer:
        """Start sending; at the source."""
        ...

    def receive(self, buffer: torch.Tensor) -> PendingTransfer:
        """Start receiving; at the destination."""
        ...


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Within, a GPU is the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


type Opener = Callable[[dist.ProcessGroup, int, int, float], Channel]
"""Makes a channel of the pipeline's group between two of its ranks, source and destination; its
devices wait so many seconds at most. Both ends call it, all others do not."""


class _Own:
    """A channel with a process group of two ranks of its own, which ``make`` makes of a store and a
    rank.

    The group is no ``dist.new_group``: that has all processes of the job make it, or, synchronized
    among its members alone, names it by how many groups each of them has, which differs.
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
        """See ``Channel``."""
        work: PendingTransfer = self._group.send([tensor], self._peer, 0)
        return work

    def receive(self, buffer: torch.Tensor) -> PendingTransfer:
        """See ``Channel``."""
        work: PendingTransfer = self._group.recv([buffer], self._peer, 0)
        return work


class GlooChannel(_Own):
    """A channel over gloo, connected when it is made."""

    on_stream = False

    def __init__(
        self, group: dist.ProcessGroup, source: int, destination: int, timeout_s: float
    ) -> None:
        limit = timedelta(seconds=timeout_s)
        super().__init__(
            group, source, destination, lambda s, rank: dist.ProcessGroupGloo(s, rank, 2, limit)
        )


class NcclChannel(_Own):
    """A channel over NCCL, connected when it is made."""

    on_stream = True

    def __init__(
        self, group: dist.ProcessGroup, source: int, destination: int, timeout_s: float
    ) -> None:
        options = _options(timeout_s)
        super().__init__(
            group, source, destination, lambda s, rank: dist.ProcessGroupNCCL(s, rank, 2, options)
        )
        # A communicator's first call connects its ends, and holds up both hosts.
        first = torch.zeros(1, device="cuda")
        work = self.send(first) if group.rank() == source else self.receive(first)
        work.wait(timedelta(seconds=timeout_s))
        torch.cuda.synchronize()


_stores: Counter[tuple[int, int]] = Counter()


def store_of(group: dist.ProcessGroup, source: int, destination: int) -> dist.Store:
    """A part of the job's store for one channel: both ends have made as many from one to the
    other."""
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
"""By the backend of the pipeline's group."""
