"""Weight offload: frozen weights stay in host memory and are copied to the device before use."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatron_pulse.runtime.activations.inplace_check import modified_inplace

_ALIGNMENT = 256
"""Bytes at whose multiples parameters begin in a block."""


class _HostBlock:
    """Frozen parameters of a layer, in one block of host memory.

    The block is pinned where there is a GPU, so that one asynchronous copy moves it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parameters = [p for p in module.parameters() if not p.requires_grad]
        self.move([parameter.data for parameter in self.parameters])

    def move(self, values: list[Tensor]) -> None:
        """Move ``values`` of the parameters to the host."""
        self._kinds: list[tuple[int, torch.dtype, torch.Size, tuple[int, ...]]] = []
        end = 0
        for value in values:
            like = torch.empty_like(value, device="meta")  # with the strides, if they are dense
            self._kinds.append((end, like.dtype, like.size(), like.stride()))
            end += -(-like.numel() * like.element_size() // _ALIGNMENT) * _ALIGNMENT
        self.bytes = torch.empty(end, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        self.use(self.bytes)
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data.copy_(value)

    def use(self, block: Tensor) -> None:
        """Let the parameters have the values in ``block``, a copy of ``bytes``."""
        for parameter, kind in zip(self.parameters, self._kinds, strict=True):
            parameter.data = _view(block.untyped_storage(), *kind)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Context in which casts of the parameters apply to the host's values, and moves do not."""
        values = [parameter.data for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.data = parameter.data.new_empty(0)
        yield
        dtypes = [parameter.dtype for parameter in self.parameters]
        if dtypes == [value.dtype for value in values]:
            self.use(self.bytes)
        else:
            self.move([v.to(dtype) for v, dtype in zip(values, dtypes, strict=True)])


@dataclass(frozen=True)
class _Copied:
    """Copy of a block on the device, complete once ``arrived``."""

    bytes: Tensor
    arrived: torch.cuda.Event | None

    def wait(self) -> Tensor:
        """The copy; the device's current stream waits for it."""
        if self.arrived is not None:
            torch.cuda.current_stream(self.bytes.device).wait_event(self.arrived)
        return self.bytes


@dataclass(frozen=True)
class _SavedWeight:
    """Saved tensor that is a view of a layer's block."""

    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True)
class _SavedTensor:
    """Any other saved tensor, with the number of writes into it."""

    tensor: Tensor
    version: int


class WeightOffload:
    """Weight offload of a stage's layers, by name in chain order.

    ::

        forward    copy 0 | run 0   | run 1   | run 2           a layer's weights are copied while
                          | copy 1  | copy 2  |                 its neighbour runs
        backward   copy 2 | run 2   | run 1   | run 0
                          | copy 1  | copy 0  |

    At most two layers' weights are on the device. Saved tensors that are weights are not kept from
    forward to backward, but copied again. On a CPU copies are synchronous.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, _HostBlock] = {}
        self._copies: dict[int, _Copied] = {}
        self._last: int | None = None
        self._stream: torch.cuda.Stream | None = None

    def add(self, name: str, module: nn.Module) -> None:
        """Move the frozen parameters of the next layer to the host."""
        block = _HostBlock(module)
        if block.parameters:
            self._blocks[name] = block

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Context of ``nn.Module._apply``: casts apply on the host, moves do not."""
        with ExitStack() as stack:
            for block in self._blocks.values():
                stack.enter_context(block.hidden())
            yield

    @contextmanager
    def on_device(self, name: str, device: torch.device) -> Iterator[None]:
        """Context in which the layer's weights are on the device."""
        if (block := self._blocks.get(name)) is None:
            yield
            return
        block.use(self._bring(name, device))
        try:
            yield
        finally:
            block.use(block.bytes)

    def saving(self, name: str, device: torch.device) -> AbstractContextManager[Any]:
        """Context in which saved tensors that are the layer's weights are dropped."""
        own = self._bring(name, device).untyped_storage().data_ptr()

        def pack(tensor: Tensor) -> _SavedWeight | _SavedTensor:
            is_strided = tensor.layout is torch.strided
            if not is_strided or tensor.untyped_storage().data_ptr() != own:
                return _SavedTensor(tensor, tensor._version)
            offset = tensor.storage_offset() * tensor.element_size()
            return _SavedWeight(tensor.dtype, offset, tensor.size(), tensor.stride())

        def unpack(saved: _SavedWeight | _SavedTensor) -> Tensor:
            if isinstance(saved, _SavedWeight):
                storage = self._bring(name, device).untyped_storage()
                return _view(storage, saved.offset, saved.dtype, saved.size, saved.stride)
            if saved.tensor._version != saved.version:
                raise modified_inplace(name)
            return saved.tensor

        within: AbstractContextManager[Any] = saved_tensors_hooks(pack, unpack)
        return within

    def offloads(self, name: str) -> bool:
        """True if the layer's weights are on the host."""
        return name in self._blocks

    def release(self) -> None:
        """Free the copies on the device; a forward or backward of the stage has ended."""
        self._keep(())
        self._last = None

    @property
    def num_bytes(self) -> int:
        """Bytes in host memory."""
        return sum(block.bytes.numel() for block in self._blocks.values())

    def _bring(self, name: str, device: torch.device) -> Tensor:
        """The layer's weights on the device; the copy of the next one's begins."""
        place, end = list(self._blocks).index(name), len(self._blocks)
        if place != self._last:
            is_back = place < self._last if self._last is not None else place + 1 == end
            following = place - 1 if is_back else place + 1
            self._last = place
            self._copy(place, device)
            self._keep((place, following))
            if 0 <= following < end:
                self._copy(following, device)
        return self._copies[place].wait()

    def _copy(self, place: int, device: torch.device) -> _Copied:
        if place not in self._copies:
            host = list(self._blocks.values())[place].bytes
            block = torch.empty_like(host, device=device, pin_memory=False)
            arrived = None
            if device.type == "cuda":
                self._stream = self._stream or torch.cuda.Stream(device)
                self._stream.wait_stream(torch.cuda.current_stream(device))
                with torch.cuda.stream(self._stream):
                    block.copy_(host, non_blocking=True)
                arrived = self._stream.record_event()
            else:
                block.copy_(host)
            self._copies[place] = _Copied(block, arrived)
        return self._copies[place]

    def _keep(self, places: Collection[int]) -> None:
        """Free all copies but those of the layers at ``places``."""
        for place in [place for place in self._copies if place not in places]:
            self._copies.pop(place).wait()  # its memory may be reused at once


def _view(
    storage: torch.UntypedStorage,
    offset: int,
    dtype: torch.dtype,
    size: torch.Size,
    stride: tuple[int, ...],
) -> Tensor:
    """Tensor at a byte ``offset`` of a storage."""
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, offset // empty.element_size(), size, stride)
