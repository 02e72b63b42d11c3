"""What layers save for their backward pass, on the host from its forward to its backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks

from megatron_pulse.planner.schedule.operations import BACKWARDS, Kind, Operation

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
class _View:
    """A saved tensor of a storage that moves."""

    number: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class Away:
    """What some layers of a stage save on one microbatch, while nothing needs it.

    ::

        forward        layers save tensors: their storages are noted, each once
        leave()        copies to pinned memory begin; the device's memory is let go
          ...          other microbatches
        fetch()        copies back begin, an operation before the backward
        backward       takes tensors as views of what came back, the same bits and strides

    Copies are on a stream of their own, on a CPU into other memory at once. What is small stays,
    and the storages ``kept``, which somebody else holds anyway (``storages``).
    """

    def __init__(self, kept: Set[int], stream: torch.cuda.Stream | None = None) -> None:
        self._kept, self._stream = kept, stream
        self._numbers: dict[int, int] = {}
        self._moved: list[_Moved] = []
        self._left = False

    def saving(self) -> AbstractContextManager[Any]:
        """Within, what layers save is noted."""
        within: AbstractContextManager[Any] = saved_tensors_hooks(self._note, self._take)
        return within

    def leave(self) -> None:
        """Begin to copy all that was noted, and let the device's memory go."""
        self._left = True
        self._numbers.clear()
        for moved in self._moved:
            assert moved.here is not None
            source = _bytes_of(moved.here)
            moved.host = torch.empty(
                source.shape, dtype=torch.uint8, pin_memory=self._stream is not None
            )
            with self._copying():
                moved.host.copy_(source, non_blocking=True)
            if self._stream is not None:
                source.record_stream(self._stream)
            moved.here = None

    def fetch(self) -> None:
        """Begin to copy back what is not here."""
        for moved in self._moved:
            if moved.here is None and moved.left:
                self._bring(moved)

    @property
    def num_bytes(self) -> int:
        """Bytes on the host."""
        return sum(0 if m.host is None else m.host.numel() for m in self._moved)

    def _bring(self, moved: _Moved) -> UntypedStorage:
        assert moved.host is not None
        device = "cpu" if self._stream is None else self._stream.device
        found = torch.empty(moved.host.shape, dtype=torch.uint8, device=device)
        with self._copying():
            found.copy_(moved.host, non_blocking=True)
        if self._stream is not None:
            found.record_stream(self._stream)
            moved.arrived = self._stream.record_event()
        moved.here = found.untyped_storage()
        return moved.here

    def _copying(self) -> AbstractContextManager[Any]:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        within: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return within

    def _note(self, tensor: Tensor) -> Tensor | _View:
        storage = tensor.untyped_storage()
        if (
            self._left
            or storage.nbytes() < LEAST_BYTES
            or storage.data_ptr() in self._kept
            or tensor.layout is not torch.strided
        ):
            return tensor
        number = self._numbers.setdefault(storage.data_ptr(), len(self._moved))
        if number == len(self._moved):
            self._moved.append(_Moved(storage))
        self._moved[number].left += 1
        offset = tensor.storage_offset()
        return _View(number, tensor.dtype, offset, tensor.size(), tensor.stride())

    def _take(self, saved: Tensor | _View) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        moved = self._moved[saved.number]
        here = self._bring(moved) if moved.here is None else moved.here
        if moved.arrived is not None:
            torch.cuda.current_stream(here.device).wait_event(moved.arrived)
        moved.left -= 1
        if moved.left <= 0 and moved.host is not None:
            moved.here = None  # one that is taken again is brought again
        tensor = torch.empty(0, dtype=saved.dtype, device=here.device)
        return tensor.set_(here, saved.offset, saved.size, saved.stride)


def storages(tensors: Iterable[Tensor]) -> set[int]:
    """What tells the storages of tensors from others."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def fetched_before(
    order: Sequence[Operation], offloads: Mapping[int, bool]
) -> dict[Operation, list[tuple[int, int]]]:
    """Whose activations begin to come back before each operation of a device: those that the one
    after it takes, or its own where it follows their forward."""
    found: dict[Operation, list[tuple[int, int]]] = {}
    for before, op in zip(order, order[1:], strict=False):
        if op.kind in BACKWARDS and offloads[op.stage]:
            key = op.stage, op.microbatch
            own = before == Operation(Kind.FORWARD, *key)
            found.setdefault(op if own else before, []).append(key)
    return found


def _bytes_of(storage: UntypedStorage) -> Tensor:
    tensor = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return tensor.set_(storage, 0, (storage.nbytes(),), (1,))
