"""Packing of several tensors into one message, each aligned to 16 bytes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

_ALIGNED = 16


@dataclass(frozen=True)
class PackedLayout:
    """Names, shapes and dtypes of the tensors of one sample."""

    entries: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> PackedLayout:
        """Layout of ``tensors``, sorted by name, without names that begin with ``_``."""
        sent = (item for item in sorted(tensors.items()) if not item[0].startswith("_"))
        return cls(tuple((n, tuple(t.shape), t.dtype) for n, t in sent))

    @property
    def num_bytes(self) -> int:
        """Bytes of one sample."""
        return sum(_padded(prod(shape) * dtype.itemsize) for _, shape, dtype in self.entries)


def packed_bytes(layouts: Sequence[PackedLayout]) -> int:
    """Bytes of samples with these layouts."""
    return sum(layout.num_bytes for layout in layouts)


def pack(
    layouts: Sequence[PackedLayout],
    samples: Sequence[Mapping[str, Tensor]],
    device: torch.device,
    beside: Collection[str] = (),
) -> Tensor:
    """Pack samples, each with its layout, into uint8, without the names in ``beside``.

    Raises ValueError if names, shapes or dtypes differ from the layout's.
    """
    buffer = torch.empty(packed_bytes(layouts), dtype=torch.uint8, device=device)
    for layout, sample, views in zip(layouts, samples, unpack(layouts, buffer), strict=True):
        names = {name for name, _, _ in layout.entries}
        if other := {n for n in sample if not n.startswith("_")} - {*beside} ^ names:
            raise ValueError(f"samples differ in their encoder states: {', '.join(sorted(other))}")
        for name, view in views.items():
            given = sample[name]
            if given.shape != view.shape or given.dtype != view.dtype:
                raise ValueError(
                    f"{name} is {given.dtype} {tuple(given.shape)}, was "
                    f"{view.dtype} {tuple(view.shape)} in the first sample of its shape"
                )
            view.copy_(given)
    return buffer


def unpack(layouts: Sequence[PackedLayout], buffer: Tensor) -> list[dict[str, Tensor]]:
    """Tensors of samples with these layouts, as views of ``buffer``."""
    found: list[dict[str, Tensor]] = []
    at = 0
    for layout in layouts:
        views = {}
        for name, shape, dtype in layout.entries:
            size = prod(shape) * dtype.itemsize
            views[name] = buffer[at : at + size].view(dtype).view(shape)
            at += _padded(size)
        found.append(views)
    return found


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
