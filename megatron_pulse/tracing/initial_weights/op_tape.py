"""Tape of recorded operations on a module's tensors, and partial replay."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_UNFILLED = ("empty", "new_empty")


@dataclass(frozen=True)
class StorageView:
    """A tensor as a view of the storage numbered ``storage``."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    def of(self, memory: torch.UntypedStorage) -> Tensor:
        """The tensor in ``memory``."""
        view = torch.empty(0, dtype=self.dtype, device="cpu")
        view = view.set_(memory, self.offset, self.shape, self.stride)
        view = view.conj() if self.is_conj else view
        return torch._neg_view(view) if self.is_neg else view


class FromGenerator:
    """Placeholder for an operation's generator argument."""


@dataclass(frozen=True)
class TapedCall:
    """One operation, with storage views for tensors; ``state`` is its generator's state before."""

    call: Callable[..., Any]
    args: Any
    kwargs: Any
    results: tuple[StorageView, ...]
    dtype: torch.dtype
    state: Tensor | None = None

    @property
    def storages(self) -> set[int]:
        """Storages that the operation reads or writes."""
        leaves = (*pytree.tree_leaves((self.args, self.kwargs)), *self.results)
        return {leaf.storage for leaf in leaves if isinstance(leaf, StorageView)}

    @property
    def leaves_unfilled(self) -> bool:
        """True if the operation allocates uninitialised memory."""
        return name_of(self.call).startswith(_UNFILLED)


class Tape:
    """Operations in order, with the writers of each storage."""

    def __init__(self) -> None:
        self.steps: list[TapedCall] = []
        self._writers: dict[int, list[int]] = defaultdict(list)

    def add(self, step: TapedCall, writes: Iterable[int]) -> None:
        """Record ``step``, which writes to the storages ``writes``."""
        for storage in set(writes):
            self._writers[storage].append(len(self.steps))
        self.steps.append(step)

    def begin(self, storage: int) -> None:
        """Register ``storage`` as new, without writers."""
        self._writers[storage] = []

    def knows(self, storage: int) -> bool:
        """True if ``storage`` was registered or written."""
        return storage in self._writers

    def fills(self, storage: int) -> bool:
        """True if ``storage`` was written."""
        return bool(self._writers.get(storage))

    def keep(self, storages: Iterable[int]) -> None:
        """Drop all operations on which ``storages`` do not depend."""
        needed = {i for storage in set(storages) for i in self._history(storage)}
        order = {i: new for new, i in enumerate(sorted(needed))}
        self.steps = [self.steps[i] for i in order]
        for storage, writers in self._writers.items():
            self._writers[storage] = [order[i] for i in writers if i in order]

    def history(self, storage: int) -> list[TapedCall]:
        """All operations on which ``storage`` depends, in order."""
        return [self.steps[i] for i in self._history(storage)]

    def _history(self, storage: int) -> list[int]:
        queue = [-i for i in self._writers[storage]]
        heapq.heapify(queue)
        found: list[int] = []
        while queue:
            index = -heapq.heappop(queue)
            if found and found[-1] == index:
                continue
            found.append(index)
            for other in self.steps[index].storages:
                writers = self._writers[other]
                for i in writers[: bisect_left(writers, index)]:
                    heapq.heappush(queue, -i)
        return found[::-1]

    def play(self, place: StorageView) -> Tensor:
        """Replay the tensor at ``place``; torch's generator state is restored."""
        memory: dict[int, torch.UntypedStorage] = {}
        before = torch.get_rng_state(), torch.get_default_dtype()
        try:
            with torch.no_grad(), torch.device("cpu"):
                for step in self.history(place.storage):
                    _play(step, memory)
                return place.of(memory[place.storage])
        finally:
            torch.set_rng_state(before[0])
            torch.set_default_dtype(before[1])


def _play(step: TapedCall, memory: dict[int, torch.UntypedStorage]) -> None:
    generator = torch.default_generator

    def given(leaf: Any) -> Any:
        nonlocal generator
        if isinstance(leaf, StorageView):
            return leaf.of(memory[leaf.storage])
        if isinstance(leaf, FromGenerator):
            generator = torch.Generator()
            return generator
        return leaf

    args, kwargs = pytree.tree_map(given, (step.args, step.kwargs))
    torch.set_default_dtype(step.dtype)
    if step.state is not None:
        generator.set_state(step.state)
    results = tensors_in(step.call(*args, **kwargs))
    for place, result in zip(step.results, results, strict=True):
        if place.storage not in memory:
            memory[place.storage] = _laid_out(result, place).untyped_storage()


def _laid_out(tensor: Tensor, place: StorageView) -> Tensor:
    """``tensor`` in the memory layout of ``place``, copied if necessary."""
    if (tensor.stride(), tensor.storage_offset()) == (place.stride, place.offset):
        return tensor
    size = (
        1 + place.offset + sum((n - 1) * s for n, s in zip(place.shape, place.stride, strict=True))
    )
    whole = torch.empty(max(size, 0), dtype=tensor.dtype, device="cpu")
    return whole.as_strided(place.shape, place.stride, place.offset).copy_(tensor)


def tensors_in(results: Any) -> list[Tensor]:
    """Tensors among an operation's arguments or results."""
    return [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)]


def name_of(func: Any) -> str:
    """Name of an operation without namespace."""
    schema = getattr(func, "_schema", None)
    return schema.name.split("::")[-1] if schema is not None else str(func.__name__)
