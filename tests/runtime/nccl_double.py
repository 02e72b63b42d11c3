"""A double of NCCL's channels over gloo: what would hang, or read too early, there does so here.

Each channel has a group of two ranks and at each end a worker, which does what was issued in that
order, one after the other: a send begins when the other end's receive has, is read from the very
tensor then, and not before; a buffer holds NaN until its message is there. With ``ONE`` a device
has a single worker for all of its channels, as where all kernels share one hardware queue.

A worker begins with what was issued while the device computes or waits; a wait holds up the
device, as it holds up a stream. What is issued after it would on a GPU wait for the same event, so
what hangs here hangs there.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_pulse.runtime.messages import channels

VARIABLE = "PULSE_TESTS_CHANNELS"
"""Set to one of these, ranks of tests use the double."""
APART, ONE = "apart", "one"

_LONG = timedelta(seconds=600)


class _Worker:
    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[tuple[_Transfer, Callable[[], None]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def add(self, do: Callable[[], None]) -> _Transfer:
        transfer = _Transfer()
        self.queue.put((transfer, do))
        return transfer

    def _work(self) -> None:
        while True:
            transfer, do = self.queue.get()
            try:
                do()
            except RuntimeError as error:
                transfer.error = error
            transfer.ended.set()


class _Transfer:
    """See channels.Work."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error: RuntimeError | None = None

    def wait(self, timeout: timedelta = _LONG) -> bool:
        if not self.ended.wait(timeout.total_seconds()):
            raise RuntimeError("Timed out")
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.ended.is_set()


_shared: list[_Worker] = []


def forget_workers() -> None:
    """Have channels that are made from here on wait for none of what was issued before."""
    _shared.clear()


class DoubleChannel:
    """See channels.Channel."""

    on_stream = True

    def __init__(
        self, group: dist.ProcessGroup, source: int, destination: int, timeout_s: float
    ) -> None:
        sends = group.rank() == source
        store = channels.store_of(group, source, destination)
        self._group = dist.ProcessGroupGloo(store, 0 if sends else 1, 2, _LONG)
        self._peer = 1 if sends else 0
        if os.environ.get(VARIABLE) != ONE:
            self._worker = _Worker()
            return
        if not _shared:
            _shared.append(_Worker())
        self._worker = _shared[0]

    def send(self, tensor: torch.Tensor) -> channels.Work:
        def do() -> None:
            self._group.recv([torch.empty(1)], self._peer, 0).wait(_LONG)
            self._group.send([tensor], self._peer, 0).wait(_LONG)

        return self._worker.add(do)

    def receive(self, buffer: torch.Tensor) -> channels.Work:
        buffer.fill_(float("nan") if buffer.is_floating_point() else 77)

        def do() -> None:
            self._group.send([torch.zeros(1)], self._peer, 0).wait(_LONG)
            self._group.recv([buffer], self._peer, 0).wait(_LONG)

        return self._worker.add(do)


def install_if_asked() -> None:
    """Have this process' links use the double where the environment says so."""
    if os.environ.get(VARIABLE):
        channels.OPENERS["gloo"] = DoubleChannel
