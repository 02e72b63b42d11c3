"""Emulation of NCCL's channels over gloo, which hangs or reads too early where NCCL would.

Each channel has a group of two ranks and a worker at each end. A worker executes calls in the order
of their issue. A send begins after the other end's receive, and reads the tensor at that time. A
buffer holds NaN until its message arrives. With ``ONE``, a device has a single worker for all
channels, as if all kernels shared one hardware queue. With ``LATE``, a send reads its tensor late:
when the device waits for a message, or after 20 ms.

The emulation does not keep sent memory alive. Memory that only it holds is filled with NaN, since
an allocator could hand it out. A tensor released before it was sent therefore sends NaN. Views,
saved tensors of a graph, and skips that alias a stage's output also hold memory.

A worker starts issued calls while the device computes or waits. A wait blocks the device as it
would block a stream. Later calls would wait for the same event on a GPU, so a hang here is a hang
there.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_pulse.runtime.p2p import channels

VARIABLE = "PULSE_TESTS_CHANNELS"
"""Set to one of these, ranks of tests use the double."""
MODES = APART, ONE, LATE = "apart", "one", "late"

_LONG = timedelta(seconds=600)
_LATEST_S = 0.02


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
        _waits.began += 1
        if not self.ended.wait(timeout.total_seconds()):
            raise RuntimeError("Timed out")
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.ended.is_set()


@dataclass
class _Waits:
    """Counter of waits that this device has begun."""

    began: int = 0


_waits = _Waits()


class _Sent:
    """The memory of a tensor that is sent."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = tensor.untyped_storage()
        self._dtype, self._offset = tensor.dtype, tensor.storage_offset()
        self._size, self._strides = tensor.size(), tensor.stride()
        self._waits = _waits.began
        self.transfer: _Transfer | None = None

    @property
    def is_free(self) -> bool:
        """True if nobody else holds the memory, so that nobody else ever will."""
        count: int = torch._C._storage_Use_Count(self._storage._cdata)
        return count == 1

    def read(self) -> torch.Tensor:
        """Value being sent."""
        tensor = torch.empty(0, dtype=self._dtype)
        return tensor.set_(self._storage, self._offset, self._size, self._strides)

    def poison_if_free(self) -> bool:
        """Have it hold what no result may come of, if it is free, and say whether it is."""
        if not self.is_free:
            return False
        _poison(torch.empty(0, dtype=self._dtype).set_(self._storage))
        return True

    def await_last_moment(self) -> None:
        """Come back when the device waits for a message, or has let it go, or a while has passed:
        collectives are waited for elsewhere."""
        end = time.monotonic() + _LATEST_S
        while _waits.began == self._waits and not self.is_free and time.monotonic() < end:
            time.sleep(0.0005)


def _poison(tensor: torch.Tensor) -> None:
    tensor.fill_(float("nan") if tensor.is_floating_point() else 77)


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
        self._sent: list[_Sent] = []
        if os.environ.get(VARIABLE) != ONE:
            self._worker = _Worker()
            return
        if not _shared:
            _shared.append(_Worker())
        self._worker = _shared[0]

    def send(self, tensor: torch.Tensor) -> channels.PendingTransfer:
        self._look()
        sent, is_late = _Sent(tensor), os.environ.get(VARIABLE) == LATE

        def do() -> None:
            self._group.recv([torch.empty(1)], self._peer, 0).wait(_LONG)
            if is_late:
                sent.await_last_moment()
            sent.poison_if_free()
            self._group.send([sent.read()], self._peer, 0).wait(_LONG)

        transfer = sent.transfer = self._worker.add(do)
        self._sent.append(sent)
        return transfer

    def receive(self, buffer: torch.Tensor) -> channels.PendingTransfer:
        self._look()
        _poison(buffer)

        def do() -> None:
            self._group.send([torch.zeros(1)], self._peer, 0).wait(_LONG)
            self._group.recv([buffer], self._peer, 0).wait(_LONG)

        return self._worker.add(do)

    def _look(self) -> None:
        """Poison what was sent and let go since the device came here last."""
        self._sent = [
            sent
            for sent in self._sent
            if not (sent.transfer and sent.transfer.is_completed() and sent.poison_if_free())
        ]


def install_if_asked() -> None:
    """Have this process' links use the double where the environment says so. Raises ValueError."""
    if mode := os.environ.get(VARIABLE):
        if mode not in MODES:
            raise ValueError(f"{VARIABLE} must be one of {', '.join(MODES)}, is {mode!r}")
        channels.OPENERS["gloo"] = DoubleChannel
