"""Names with a colon."""

from __future__ import annotations

from model_specs.derived import diffusers_modules, own
from model_specs.derived.code import allow as allow_code
from model_specs.derived.family import DerivedFamily


def is_module(name: str) -> bool:
    """Whether ``name`` is not that of a family's configuration."""
    return ":" in name


def is_code(name: str) -> bool:
    """Whether ``name`` is that of code of one's own."""
    return is_module(name) and not name.startswith(diffusers_modules.PREFIX)


def allow(name: str) -> None:
    """Let ``name`` be run if it is code: who started this process has named it."""
    if is_code(name):
        allow_code(name)


def family_of(name: str) -> DerivedFamily:
    """See ``diffusers_modules`` and ``own``."""
    return own.family_of(name) if is_code(name) else diffusers_modules.family_of(name)
