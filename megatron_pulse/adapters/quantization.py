"""Quantisation of frozen weights below an adapter (QLoRA, 2305.14314). Imports no torch."""

from __future__ import annotations

import importlib.util

QUANTIZATIONS = ("nf4", "int8", "fp8")
BLOCK = 64
"""Weights that share a scale in NF4."""


def installation_fault(kind: str | None) -> str | None:
    """Fault if what computes this quantisation is not installed."""
    if kind != "nf4" or importlib.util.find_spec("bitsandbytes") is not None:
        return None
    return "needs bitsandbytes: pip install 'megatron-pulse[quantization]', or take int8 or fp8"


def quantized_names(weight: str, kind: str) -> tuple[str, str]:
    """Names of the two parameters that hold ``weight``: its integers, and its scales."""
    return f"{weight}.{kind}", f"{weight}.absmax"
