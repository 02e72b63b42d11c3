"""Detection of encoder outputs that are not finite, mostly from fp16 overflow (above 65504)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

CHECK = "Encode in fp32 or bf16 (--encoders-dtype, in training --pulse-encoders-dtype)."
"""Advice appended to the error."""


def not_finite(name: str, dtype: torch.dtype) -> str:
    """Error text for an encoder with infinite or NaN outputs."""
    kind = str(dtype).removeprefix("torch.")
    return f"{name}, in {kind}, returns values that are not finite"


def all_finite(states: Mapping[str, Tensor]) -> bool:
    """True if all numbers are finite; synchronizes with the GPU."""
    return all(bool(value.isfinite().all()) for value in states.values())


def any_broken(states: Mapping[str, Tensor]) -> Tensor:
    """Bool tensor on the states' device, true if any number is not finite; does not synchronize."""
    return torch.stack([~value.isfinite().all() for value in states.values()]).any()
