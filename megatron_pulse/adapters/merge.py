"""Weights with the effect of an adapter in them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megatron_pulse.adapters.kronecker import change_of
from megatron_pulse.adapters.low_rank import factor_names, magnitude_name


def merged(
    weights: Mapping[str, Tensor], factors: Mapping[str, Tensor], scale: float
) -> dict[str, Tensor]:
    """Those of ``weights`` that have ``factors``, with the effect: ``W + scale B A``, in fp64.

    With DoRA's magnitudes, rows have these norms. LoKr's change is a Kronecker product.
    """
    found = {}
    for name, weight in weights.items():
        a, b = (factors.get(factor) for factor in factor_names(name))
        if a is not None and b is not None:
            change = b.double().flatten(1) @ a.double().flatten(1)
            whole = weight.double() + scale * change.view(weight.shape)
            if (magnitude := factors.get(magnitude_name(name))) is not None:
                ratio = magnitude.double().flatten() / whole.flatten(1).norm(dim=1)
                whole = whole * ratio.view(-1, *(1 for _ in weight.shape[1:]))
            found[name] = whole.to(weight.dtype)
        elif (change := change_of(weight, factors, name.removesuffix(".weight"))) is not None:
            found[name] = (weight.double() + scale * change).to(weight.dtype)
    return found
