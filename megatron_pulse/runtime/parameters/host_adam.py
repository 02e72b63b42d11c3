"""Adam on the processor, whose bits do not depend on where tensors are cut."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_pulse.runtime.parameters.adam import Lists, update

WHOLE = 64
"""Elements, a multiple of every processor's vectors."""


class HostAdam(torch.optim.AdamW):
    """AdamW on the processor in one pass, whose bits do not depend on where tensors are cut.

    torch's fused kernel rounds otherwise where the elements that are left at a tensor's end fill no
    vector, so that weights would depend on how many ranks share them. These are filled up::

        0                         n - n % 64      n
        |------- in place ------------|- a copy --|000000|
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update of every parameter that has a gradient; all are fp32 and contiguous."""
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
    """Adam's state before the first step."""
    state["step"] = torch.tensor(0.0)
    state["exp_avg"] = torch.zeros_like(parameter)
    state["exp_avg_sq"] = torch.zeros_like(parameter)
