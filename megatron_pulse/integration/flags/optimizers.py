"""Optimizers that are not supported, with the reason and the nearest one. Imports nothing slow."""

from __future__ import annotations

import importlib.util
import re

SUPPORTED = ("adam", "sgd", "muon", "lion")
EMERGING = ("muon", "lion")
"""Optimizers of the package emerging-optimizers."""
_ADAM = "adam"
_8BIT = "its blocks of 8-bit state would follow the layout"
_GLOBAL = "its step size is estimated over all parameters, which no stage has"
_FACTORS = "its factored state has no counterpart in Megatron's checkpoints"
_UNSUPPORTED = {
    "adamw": ("its name here is adam", _ADAM),
    "soap": ("its state is not planned for", "muon"),
    "adaptivemuon": ("its state is not planned for", "muon"),
    "distmuon": ("its state would be sharded by layers", "muon"),
    "prodigy": (_GLOBAL, f"{_ADAM} with lr and a schedule"),
    "dadapt": (_GLOBAL, f"{_ADAM} with lr and a schedule"),
    "adafactor": (_FACTORS, "lion, or adam on the host (cpu_offload)"),
    "came": (_FACTORS, "lion, or adam on the host (cpu_offload)"),
    "8bit": (_8BIT, f"{_ADAM}, sharded or on the host (cpu_offload)"),
    "schedulefree": ("its weights of training and evaluation differ", f"{_ADAM} with an EMA"),
}
"""Reason and nearest optimizer by a part of the name; the last that fits counts."""


def unsupported_optimizer(name: str) -> str:
    """Reason why ``name`` is no optimizer here, and the nearest that is; empty if it is one."""
    if name in SUPPORTED:
        return ""
    if name.lower() in SUPPORTED:
        return f"did you mean {name.lower()}?"
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    found = [why for part, why in _UNSUPPORTED.items() if part in plain]
    if not found:
        return f"it is unknown: give {', '.join(SUPPORTED[:-1])} or {SUPPORTED[-1]}"
    reason, nearest = found[-1]
    return f"{reason}. Give {nearest}"


def missing_package(name: str) -> str:
    """Fault if the package of an optimizer is not installed; else empty."""
    if name not in EMERGING or importlib.util.find_spec("emerging_optimizers") is not None:
        return ""
    return (
        "the package emerging-optimizers is not installed. Install it (pip install "
        "emerging-optimizers), or give adam"
    )
