"""Sequence whose items are made when they are asked for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import overload


class LazySequence[T](Sequence[T]):
    """Base of sequences with an item for each index from 0; slices are lists."""

    @abstractmethod
    def make(self, index: int) -> T:
        """Item at ``index``, which is from 0 to below the length."""

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self.make(i) for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.make(index)
