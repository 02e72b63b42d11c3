"""Activation offload: saved tensors stay on the host between forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks

from megatron_pulse.runtime.activations.inplace_check import InplaceWatch, modified_inplace

LEAST_BYTES = 1 << 12
"""Smaller storages stay on the device: starting a copy costs more than the memory saved."""


@dataclass
class _Moved:
    """A storage on the device, on the host, or in transit.

    ``left`` counts the saved tensors that backward has not taken.
    """

    here: UntypedStorage | None
    host: Tensor | None = None
    arrived: torch.cuda.Event | None = None
    left: int = 0


@dataclass(frozen=True)
class _Stays:
    """A saved tensor of ``layer`` that stays on the device."""

    layer: str
    tensor: Tensor
    version: int


@dataclass(frozen=True)
class _View:
    """A saved tensor of ``layer``, as a view of an offloaded storage."""

    layer: str
    watched: InplaceWatch
    number: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    conjugated: bool
    negated: bool

    @classmethod
    def of(cls, layer: str, tensor: Tensor, number: int) -> _View:
        shape = tensor.storage_offset(), tensor.size(), tensor.stride()
        turned = tensor.is_conj(), tensor.is_neg()
        return cls(layer, InplaceWatch(tensor), number, tensor.dtype, *shape, *turned)

    def on(self, storage: UntypedStorage) -> Tensor:
        """Rebuild the tensor on ``storage``, the storage copied back."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        tensor = tensor.conj() if self.conjugated else tensor
        return torch._neg_view(tensor) if self.negated else tensor


@dataclass(frozen=True)
class Streams:
    """CUDA streams of a device for copies to the host (``out``) and from the host (``back``)."""

    out: torch.cuda.Stream
    back: torch.cuda.Stream

    @classmethod
    def on(cls, device: torch.device) -> Streams | None:
        """Create both streams; None on a CPU, which copies synchronously."""
        if device.type != "cuda":
            return None
        return cls(torch.cuda.Stream(device), torch.cuda.Stream(device))


class ActivationOffload:
    """Activation offload of the offloaded layers of a stage on one microbatch.

    ::

        F  forward           each saved storage is recorded once
           start_offload()   copies to pinned memory begin
        O  finish_offload()  copies have ended: device memory is free for later operations
              ...            other microbatches
        L  start_load()      copies back begin
        B  backward          takes views of the returned storages: same bits, same strides
           close()           no copy is in flight

    The host never waits for a copy. The compute stream waits instead, so memory is freed and reused
    in stream order. On a CPU copies are synchronous. Small storages stay on the device. So do the
    storages in ``kept`` (see ``storages``), because other owners hold them anyway. Backward raises
    PulseError for a saved tensor that was modified in place before the copy-out.
    """

    def __init__(self, kept: Set[int], streams: Streams | None = None) -> None:
        self._kept, self._streams = kept, streams
        self._numbers: dict[int, int] = {}
        self._moved: list[_Moved] = []
        self._watched: list[InplaceWatch] = []
        self._left = False
        self._last: torch.cuda.Event | None = None

    def saving(self, layer: str) -> AbstractContextManager[Any]:
        """Record the storages of tensors that the layer saves within the context."""
        note = partial(self._note, layer)
        within: AbstractContextManager[Any] = saved_tensors_hooks(note, self._take)
        return within

    def start_offload(self) -> None:
        """Start the copy-out of all recorded storages."""
        self._left = True
        self._numbers.clear()
        for each in self._watched:
            each.settle()
        self._watched.clear()
        stream = None if self._streams is None else self._streams.out
        for moved in self._moved:
            assert moved.here is not None
            source = _bytes_of(moved.here)
            moved.host = torch.empty(source.shape, dtype=torch.uint8, pin_memory=stream is not None)
            with _copying(stream):
                moved.host.copy_(source, non_blocking=True)
        self._last = None if stream is None else stream.record_event()

    def finish_offload(self) -> None:
        """Free the device memory of all offloaded storages, in stream order."""
        self._wait(self._last)
        for moved in self._moved:
            moved.here = None

    def start_load(self) -> None:
        """Start the copy-in of offloaded storages that backward still needs."""
        for moved in self._moved:
            if moved.here is None and moved.left:
                self._bring(moved)

    def close(self) -> None:
        """Wait, after backward, for the last copy; memory copied back but never taken may be
        reused.
        """
        self._wait(self._last)

    @property
    def num_bytes(self) -> int:
        """Bytes on the host."""
        return sum(0 if m.host is None else m.host.numel() for m in self._moved)

    def _bring(self, moved: _Moved) -> UntypedStorage:
        assert moved.host is not None
        stream = None if self._streams is None else self._streams.back
        device = "cpu" if stream is None else stream.device
        found = torch.empty(moved.host.shape, dtype=torch.uint8, device=device)
        with _copying(stream):
            found.copy_(moved.host, non_blocking=True)
        self._last = moved.arrived = None if stream is None else stream.record_event()
        moved.here = found.untyped_storage()
        return moved.here

    def _wait(self, event: torch.cuda.Event | None) -> None:
        if event is not None and self._streams is not None:
            torch.cuda.current_stream(self._streams.out.device).wait_event(event)

    def _note(self, layer: str, tensor: Tensor) -> _Stays | _View:
        if (
            self._left
            or (storage := _storage_of(tensor)) is None
            or storage.nbytes() < LEAST_BYTES
            or storage.data_ptr() in self._kept
            or (self._streams is not None and tensor.device != self._streams.out.device)
        ):
            return _Stays(layer, tensor, tensor._version)
        number = self._numbers.setdefault(storage.data_ptr(), len(self._moved))
        if number == len(self._moved):
            self._moved.append(_Moved(storage))
        self._moved[number].left += 1
        view = _View.of(layer, tensor, number)
        self._watched.append(view.watched)
        return view

    def _take(self, saved: _Stays | _View) -> Tensor:
        if isinstance(saved, _Stays):
            if saved.tensor._version != saved.version:
                raise modified_inplace(saved.layer)
            return saved.tensor
        if saved.watched.is_written:
            raise modified_inplace(saved.layer)
        moved = self._moved[saved.number]
        here = self._bring(moved) if moved.here is None else moved.here
        self._wait(moved.arrived)
        moved.left -= 1
        if moved.left <= 0 and moved.host is not None:
            moved.here = None  # a second use copies the storage back again
        return saved.on(here)


def storages(tensors: Iterable[Tensor]) -> set[int]:
    """Data pointers that identify the storages of tensors."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _storage_of(tensor: Tensor) -> UntypedStorage | None:
    """Storage of a tensor; None for a sparse, jagged or unmaterialised zero tensor."""
    if tensor.layout is not torch.strided:
        return None
    try:
        storage = tensor.untyped_storage()
        storage.data_ptr()
    except RuntimeError:
        return None
    return storage


def _copying(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    """Context that copies on ``stream``, after the work queued on the current stream."""
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
    within: AbstractContextManager[Any] = torch.cuda.stream(stream)
    return within


def _bytes_of(storage: UntypedStorage) -> Tensor:
    tensor = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return tensor.set_(storage, 0, (storage.nbytes(),), (1,))
