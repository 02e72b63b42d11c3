"""Adam's update with a group's settings, wherever its tensors are."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim._functional import adam

type Lists = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]
"""Parameters, gradients, first and second moments."""


def update(
    group: dict[str, Any],
    lists: Lists,
    counts: list[Tensor],
    fused: bool,
    decoupled_weight_decay: bool = True,
) -> None:
    """One update in place of ``lists``, each parameter with the steps that it has made before;
    ``fused`` in one pass over all of them."""
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
