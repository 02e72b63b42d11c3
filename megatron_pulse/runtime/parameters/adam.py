"""Adam: one update on any device, and an optimizer on the CPU.

The CPU optimizer's bits do not depend on how tensors are cut.
"""

from __future__ import annotations

from typing import Any

import torch
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


WHOLE = 64
"""Number of elements, a multiple of every CPU's vector width."""


class HostAdam(torch.optim.AdamW):
    """AdamW on the CPU in one fused pass, bitwise independent of how tensors are cut.

    torch's fused kernel rounds differently for trailing elements that do not fill a vector. Weights
    would then depend on the number of ranks that share them. Trailing elements are therefore
    padded::

        0                         n - n % 64      n
        |------- in place ------------|- a copy --|000000|
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every parameter that has a gradient; all must be fp32 and contiguous."""
        for group in self.param_groups:
            steps: list[float] = []
            lists: Lists = ([], [], [], [])
            ends: list[tuple[Tensor, Tensor]] = []
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "step" not in state:
                    begin(state, parameter)
                held = parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]
                split = parameter.numel() - parameter.numel() % WHOLE
                for whole, several in zip(held, lists, strict=True):
                    flat = whole.view(-1)
                    if split:
                        several.append(flat[:split])
                    if split < flat.numel():
                        filled = torch.zeros(WHOLE)
                        filled[: flat.numel() - split] = flat[split:]
                        several.append(filled)
                        if whole is not parameter.grad:
                            ends.append((flat[split:], filled))
                pieces = bool(split) + bool(parameter.numel() % WHOLE)
                steps += [float(state["step"])] * pieces
                state["step"] += 1
            update(group, lists, [torch.tensor(done) for done in steps], fused=True)
            for end, filled in ends:
                end.copy_(filled[: end.numel()])


def begin(state: dict[str, Any], parameter: Tensor) -> None:
    """Initialise Adam's state of a parameter."""
    state["step"] = torch.tensor(0.0)
    state["exp_avg"] = torch.zeros_like(parameter)
    state["exp_avg_sq"] = torch.zeros_like(parameter)
