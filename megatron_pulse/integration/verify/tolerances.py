"""Differences between two tensors, and the bounds that a layout's documented design allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pulse.integration.verify.adam import LEARNING_RATE
from megatron_pulse.planner.plan_file.certificate import Allowance
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.planner.program.plan import Plan

_SUMS, _PARTIAL = 1e-6, 1e-5
"""fp32 bounds relative to the layer's largest gradient: reordered sums, and partial products."""
_HALF_EPS = 4


@dataclass(frozen=True)
class Distance:
    """Largest distance of two tensors; ``ulp`` counts the numbers of the dtype in between."""

    absolute: float
    relative: float
    ulp: int


def allowances(given: PlanFile, plan: Plan, dtype: torch.dtype) -> list[Allowance]:
    """Bounds of rounding by which gradients of the layout may differ, and their layers."""
    found, eps = [], torch.finfo(dtype).eps * _HALF_EPS
    if given.pipeline > 1 and plan.routes.replicated:
        found.append(
            Allowance(
                "embedders are replicated: their gradients are summed over the pipeline in "
                "another order",
                max(_SUMS, 0 if dtype == torch.float32 else eps),
                tuple(sorted(plan.routes.replicated)),
            )
        )
    if given.data > 1:
        wide = given.state.gradient_bytes(str(dtype).removeprefix("torch.")) == 4
        found.append(
            Allowance(
                f"gradients are averaged over {given.data} replicas, so microbatches are summed "
                "in another order",
                _SUMS if wide else eps,
            )
        )
    if given.tensor > 1:
        found.append(
            Allowance(
                f"{given.tensor} tensor-parallel ranks sum parts of products, each rounded first",
                max(_PARTIAL, 0 if dtype == torch.float32 else eps),
                forward=True,
            )
        )
    return found


def bound_of(allowed: list[Allowance], layer: str) -> float:
    """Bound of the distance of a layer's gradients, relative to its largest; 0: equal bits."""
    return max((a.bound for a in allowed if a.layers is None or layer in a.layers), default=0.0)


def distance(mine: Tensor, theirs: Tensor, scale: float) -> Distance:
    """Distance of ``mine`` from ``theirs``, relative to ``scale``."""
    difference = (mine.double() - theirs.double()).abs()
    if not torch.isfinite(difference).all():
        return Distance(float("inf"), float("inf"), 2**62)
    absolute = float(difference.max()) if difference.numel() else 0.0
    relative = absolute / scale if scale else float("inf") if absolute else 0.0
    ulp = int((_ordered(mine) - _ordered(theirs)).abs().max()) if difference.numel() else 0
    return Distance(absolute, relative, ulp)


def _ordered(tensor: Tensor) -> Tensor:
    """Position of each number in the dtype's order, from zero, as int64."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    number = tensor.contiguous().view(bits).long()
    sign = -(1 << (8 * tensor.element_size() - 1))
    return torch.where(number < 0, sign - number, number)


def largest(gradients: Mapping[str, Tensor], layer_of: Mapping[str, str]) -> dict[str, float]:
    """Largest absolute gradient of each layer."""
    found: dict[str, float] = {}
    for name, gradient in gradients.items():
        most = float(gradient.abs().max()) if gradient.numel() else 0.0
        found[layer_of[name]] = max(found.get(layer_of[name], 0.0), most)
    return found


def weights_within(mine: Tensor, theirs: Tensor, square: Tensor, slack: float) -> bool:
    """True if weights differ no more than gradients within ``slack`` of each other explain.

    Adam divides a gradient by the root of ``square``, its mean square. A gradient that is zero
    except for rounding therefore makes a whole step.
    """
    size = square.double().sqrt()
    most = LEARNING_RATE * torch.clamp(4 * slack / size.clamp(min=1e-300), max=2.0)
    rounding = 4 * torch.finfo(mine.dtype).eps * theirs.double().abs()
    return bool(((mine.double() - theirs.double()).abs() <= most + rounding).all())
