"""Encoders whose results are not finite: fp16 ends at 65504, which many do not keep to."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

CHECK = "Encode in fp32 or bf16 (--encoders-dtype, in training --pulse-encoders-dtype)."
"""The remedy."""


def not_finite(name: str, dtype: torch.dtype) -> str:
    """The fault of an encoder."""
    kind = str(dtype).removeprefix("torch.")
    return f"{name}, in {kind}, gives numbers that are not finite"


def all_finite(states: Mapping[str, Tensor]) -> bool:
    """True if all numbers are; waits for a GPU."""
    return all(bool(value.isfinite().all()) for value in states.values())


def any_broken(states: Mapping[str, Tensor]) -> Tensor:
    """The opposite, as a bool tensor on their device; waits for nothing."""
    return torch.stack([~value.isfinite().all() for value in states.values()]).any()
