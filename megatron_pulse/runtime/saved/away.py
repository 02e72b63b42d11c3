"""What layers save for their backward pass, on the host from its forward to its backward."""

from __future__ import annotations

from collections.abc import Iterable, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks

from megatron_pulse.runtime.saved.written import Watched, written

LEAST_BYTES = 1 << 12
"""What is smaller stays: starting a copy takes longer than it."""


@dataclass
class _Moved:
    """A storage that is here, or on the host, or on its way; ``left`` counts the tensors of it that
    the backward has not taken."""

    here: UntypedStorage | None
    host: Tensor | None = None
    arrived: torch.cuda.Event | None = None
    left: int = 0


@dataclass(frozen=True)
class _Stays:
    """A saved tensor of ``layer`` that does not move."""

    layer: str
    tensor: Tensor
    version: int


@dataclass(frozen=True)
class _View:
    """A saved tensor of ``layer``, of a storage that moves."""

    layer: str
    watched: Watched
    number: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    conjugated: bool
    negated: bool

    @classmethod
    def of(cls, layer: str, tensor: Tensor, number: int) -> _View:
        """As ``tensor`` is of its storage."""
        shape = tensor.storage_offset(), tensor.size(), tensor.stride()
        turned = tensor.is_conj(), tensor.is_neg()
        return cls(layer, Watched(tensor), number, tensor.dtype, *shape, *turned)

    def on(self, storage: UntypedStorage) -> Tensor:
        """The tensor, of what came back."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        tensor = tensor.conj() if self.conjugated else tensor
        return torch._neg_view(tensor) if self.negated else tensor


@dataclass(frozen=True)
class Streams:
    """On which a device copies ``out`` to the host, and ``back``."""

    out: torch.cuda.Stream
    back: torch.cuda.Stream

    @classmethod
    def on(cls, device: torch.device) -> Streams | None:
        """New ones; a CPU has none, and copies at once."""
        if device.type != "cuda":
            return None
        return cls(torch.cuda.Stream(device), torch.cuda.Stream(device))


class Away:
    """What some layers of a stage save on one microbatch, while nothing needs it.

    ::

        F  forward        layers save tensors: their storages are noted, each once
           leave()        copies to pinned memory begin
        O  let_go()       they have ended: the device's memory is free for what comes after
              ...             other microbatches
        L  fetch()        copies back begin
        B  backward       takes tensors as views of what came back, the same bits and strides
           close()        nothing is on its way any more

    The host waits for no copy: the stream that computes does, so that memory is free, and taken, in
    its own order. On a CPU copies are done at once, into other memory. What is small stays, and the
    storages ``kept``, which somebody else holds anyway (``storages``). The backward raises
    PulseError where it takes what was written into before it left.
    """

    def __init__(self, kept: Set[int], streams: Streams | None = None) -> None:
        self._kept, self._streams = kept, streams
        self._numbers: dict[int, int] = {}
        self._moved: list[_Moved] = []
        self._watched: list[Watched] = []
        self._left = False
        self._last: torch.cuda.Event | None = None

    def saving(self, layer: str) -> AbstractContextManager[Any]:
        """Within, what the layer saves is noted."""
        note = partial(self._note, layer)
        within: AbstractContextManager[Any] = saved_tensors_hooks(note, self._take)
        return within

    def leave(self) -> None:
        """Begin to copy all that was noted."""
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

    def let_go(self) -> None:
        """What comes after has the memory of all that left."""
        self._wait(self._last)
        for moved in self._moved:
            moved.here = None

    def fetch(self) -> None:
        """Begin to copy back what is not here."""
        for moved in self._moved:
            if moved.here is None and moved.left:
                self._bring(moved)

    def close(self) -> None:
        """After the backward: memory that came back and was not taken may be used again."""
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
                raise written(saved.layer)
            return saved.tensor
        if saved.watched.is_written:
            raise written(saved.layer)
        moved = self._moved[saved.number]
        here = self._bring(moved) if moved.here is None else moved.here
        self._wait(moved.arrived)
        moved.left -= 1
        if moved.left <= 0 and moved.host is not None:
            moved.here = None  # one that is taken again is brought again
        return saved.on(here)


def storages(tensors: Iterable[Tensor]) -> set[int]:
    """What tells the storages of tensors from others."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _storage_of(tensor: Tensor) -> UntypedStorage | None:
    """Where its numbers are; None for one that is sparse, jagged, or zeros that nobody wrote."""
    if tensor.layout is not torch.strided:
        return None
    try:
        storage = tensor.untyped_storage()
        storage.data_ptr()
    except RuntimeError:
        return None
    return storage


def _copying(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    """On ``stream``, behind what was begun on the current one."""
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
    within: AbstractContextManager[Any] = torch.cuda.stream(stream)
    return within


def _bytes_of(storage: UntypedStorage) -> Tensor:
    tensor = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return tensor.set_(storage, 0, (storage.nbytes(),), (1,))
