"""Weights in float8 (e4m3) with a scale for each tensor, as ComfyUI's files hold them.

The scale of ``LAYER.weight`` is ``LAYER.scale_weight`` or ``LAYER.weight_scale``; without one it is
1. Scales of activations are left out: products are computed in the dtype of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
_SCALES = ("scale_weight", "weight_scale")
_HIDDEN = (*_SCALES, "scale_input", "input_scale", "scaled_fp8", "comfy_quant")


class _Stored(Protocol):
    def __getitem__(self, name: str) -> Tensor: ...

    def __iter__(self) -> Iterator[str]: ...

    def kind_of(self, name: str) -> tuple[tuple[int, ...], torch.dtype]: ...


class Float8Tensors(Mapping[str, Tensor]):
    """View of stored tensors with float8 ones dequantised to fp32, and without their scales.

    ``as_float8`` has them as stored. Files without float8 are seen as they are.
    """

    def __init__(self, stored: _Stored) -> None:
        self._stored = stored
        self._held = frozenset(name for name in stored if stored.kind_of(name)[1] == FLOAT8)
        self._names = {
            name: None
            for name in stored
            if not self._held or name.rpartition(".")[2] not in _HIDDEN
        }
        self._there = frozenset(stored)

    def as_float8(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Stored values of a tensor, and its scale (fp32, ``[1]``); None if it is no float8."""
        if name not in self._held:
            return None
        layer = name.removesuffix(".weight")
        scale = next((n for s in _SCALES if (n := f"{layer}.{s}") in self._there), None)
        found = torch.ones(1) if scale is None else self._stored[scale].float().reshape(1)
        return self._stored[name], found

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        if (held := self.as_float8(name)) is None:
            return self._stored[name]
        values, scale = held
        return values.float() * scale

    def kind_of(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a tensor, from the header alone."""
        shape, dtype = self._stored.kind_of(name)
        return shape, torch.float32 if name in self._held else dtype

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
