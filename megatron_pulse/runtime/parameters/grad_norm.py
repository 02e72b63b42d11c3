"""Norm of gradients spread over processes, bitwise equal for every layout.

Each layer's norm is computed in fp64 on the device of the layer. All processes combine the layers'
norms in chain order and round once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn

from megatron_pulse.runtime.failure_board import PulseError

EPSILON = 1e-6
"""Added to the norm before division, as in torch's ``clip_grad_norm_``."""


def norm_of(parameters: Iterable[nn.Parameter], norm_type: float, device: torch.device) -> Tensor:
    """Norm of the parameters' gradients as an fp64 scalar; 0 without gradients."""
    gradients = [p.grad.detach() for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(gradients, norm_type, dtype=torch.float64)
    return combined(torch.stack([norm.to(device) for norm in norms]), norm_type)


def combined(norms: Tensor, norm_type: float) -> Tensor:
    """Norm of a vector, from the norms of its parts."""
    return torch.linalg.vector_norm(norms, norm_type, dtype=torch.float64)


def require_norm_type(norm_type: object) -> float:
    """Return ``norm_type`` as a float; PulseError unless positive or infinite."""
    if _is_number(norm_type) and norm_type > 0:
        return float(norm_type)
    raise PulseError(f"norm_type must be a positive number, or inf, is {norm_type!r}")


def require_max_norm(max_norm: object) -> float:
    """Return ``max_norm`` as a float; PulseError if negative."""
    if _is_number(max_norm) and max_norm >= 0:
        return float(max_norm)
    raise PulseError(f"max_norm must be a number from 0 on, is {max_norm!r}")


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def require_finite(total: Tensor, norms: Tensor, names: Sequence[str]) -> None:
    """Raise PulseError naming the layers with non-finite gradients, unless ``total`` is finite.

    ``norms`` are the norms of all layers, in the order of ``names``.
    """
    if math.isfinite(value := total.item()):
        return
    values = zip(names, norms.tolist(), strict=True)
    at = [name for name, norm in values if not math.isfinite(norm)]
    raise PulseError(
        f"the norm of all gradients is {value}: gradients of {', '.join(at) or 'all layers'} are "
        "not finite. Nothing was clipped (error_if_nonfinite=False clips regardless)"
    )


def clip(parameters: Iterable[nn.Parameter], max_norm: float, total: Tensor) -> None:
    """Scale gradients of total norm ``total`` down to at most ``max_norm``, in place."""
    scale = torch.clamp(max_norm / (total + EPSILON), max=1.0)
    if gradients := [p.grad.detach() for p in parameters if p.grad is not None]:
        torch._foreach_mul_(gradients, scale)
