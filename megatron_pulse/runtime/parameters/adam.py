"""Adam update with a parameter group's settings, on any device."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim._functional import adam

type Lists = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]
"""Parameters, gradients, first moments and second moments."""


def update(
    group: dict[str, Any],
    lists: Lists,
    counts: list[Tensor],
    fused: bool,
    decoupled_weight_decay: bool = True,
) -> None:
    """Update ``lists`` in place; ``counts`` holds each parameter's number of steps before.

    ``fused`` updates all parameters in one kernel.
    """
    adam(
        *lists,
        [],
        counts,
        fused=fused,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
        decoupled_weight_decay=decoupled_weight_decay,
    )
