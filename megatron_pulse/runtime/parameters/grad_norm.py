"""The norm of gradients that are spread over processes, with the same bits at every layout.

A layer's norm is computed where the layer is, in fp64. All layers' norms are combined in the
chain's order and rounded once, on every process alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn

from megatron_pulse.runtime.failures import PulseError

EPSILON = 1e-6
"""Added to a norm that is divided by, as in torch's ``clip_grad_norm_``."""


def norm_of(parameters: Iterable[nn.Parameter], norm_type: float, device: torch.device) -> Tensor:
    """The norm of these parameters' gradients, as a number in fp64; 0 where there is none."""
    gradients = [p.grad.detach() for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(gradients, norm_type, dtype=torch.float64)
    return combined(torch.stack([norm.to(device) for norm in norms]), norm_type)


def combined(norms: Tensor, norm_type: float) -> Tensor:
    """The norm of a vector whose parts have these."""
    return torch.linalg.vector_norm(norms, norm_type, dtype=torch.float64)


def require_norm_type(norm_type: object) -> float:
    """``norm_type`` as a number; raises PulseError unless it is positive, or infinite."""
    if _is_number(norm_type) and norm_type > 0:
        return float(norm_type)
    raise PulseError(f"norm_type must be a positive number, or inf, is {norm_type!r}")


def require_max_norm(max_norm: object) -> float:
    """``max_norm`` as a number; raises PulseError unless it is from 0 on."""
    if _is_number(max_norm) and max_norm >= 0:
        return float(max_norm)
    raise PulseError(f"max_norm must be a number from 0 on, is {max_norm!r}")


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def require_finite(total: Tensor, norms: Tensor, names: Sequence[str]) -> None:
    """Raise PulseError with the layers whose gradients have no finite norm, if ``total`` is none;
    ``norms`` are those of all layers."""
    if math.isfinite(value := total.item()):
        return
    values = zip(names, norms.tolist(), strict=True)
    at = [name for name, norm in values if not math.isfinite(norm)]
    raise PulseError(
        f"the norm of all gradients is {value}: those of {', '.join(at) or 'all layers'} are not "
        "finite; nothing was clipped (error_if_nonfinite=False scales them all the same)"
    )


def clip(parameters: Iterable[nn.Parameter], max_norm: float, total: Tensor) -> None:
    """Scale gradients whose norm is ``total`` to ``max_norm``, where theirs is larger."""
    scale = torch.clamp(max_norm / (total + EPSILON), max=1.0)
    if gradients := [p.grad.detach() for p in parameters if p.grad is not None]:
        torch._foreach_mul_(gradients, scale)
