"""Faults common to configurations of several families, in the same words."""

from __future__ import annotations

from typing import Protocol

from model_specs.common.options import FamilyConfig


def below(config: FamilyConfig, least: int, *keys: str, **others: int) -> list[str]:
    """Faults of int fields below ``least``, or below a minimum of their own in ``others``.

    Only the fields ``keys`` are checked, or all fields if none is given.
    """
    return [
        f"{key}: must be at least {others.get(key, least)}, is {value}"
        for key in keys or config.__dataclass_fields__
        if type(value := getattr(config, key)) is int and value < others.get(key, least)
    ]


def indivisible(config: FamilyConfig, **divisors: int | str) -> list[str]:
    """Faults of fields not divisible by their divisor, a number or another field."""
    found = []
    for key, divisor in divisors.items():
        value, named = getattr(config, key), ""
        if isinstance(divisor, str):
            divisor, named = getattr(config, divisor), f"{divisor}="
        if value is not None and value % divisor:
            found.append(f"{key}: must be divisible by {named}{divisor}, is {value}")
    return found


class _Sized(FamilyConfig, Protocol):
    @property
    def patch_size(self) -> int: ...
    def bucket_faults(self, divisor: int, divisor_text: str) -> list[str]: ...


class _Patched(_Sized, Protocol):
    @property
    def dim(self) -> int: ...
    @property
    def sample_size(self) -> int: ...
    @property
    def base_sample_size(self) -> int | None: ...


def unfit_for_patches(config: _Patched, divisor: int = 4) -> list[str]:
    """Faults of patch tokens with sinusoidal positions.

    The width must be divisible by ``divisor``, and the sizes by the patch size.
    """
    found = []
    if config.dim % divisor:
        found.append(
            "attention_head_dim: num_attention_heads * attention_head_dim must be divisible "
            f"by {divisor}, is {config.dim}"
        )
    if config.base_sample_size != config.sample_size:
        found += indivisible(config, base_sample_size="patch_size")
    return [*found, *unfit_sizes(config)]


def unfit_sizes(config: _Sized) -> list[str]:
    """Faults of ``sample_size`` and ``buckets``, which must be divisible by ``patch_size``."""
    patch = config.patch_size
    is_option = "patch_size" in config.__dataclass_fields__
    return [
        *indivisible(config, sample_size="patch_size" if is_option else patch),
        *config.bucket_faults(patch, f"patch_size={patch}" if is_option else str(patch)),
    ]
