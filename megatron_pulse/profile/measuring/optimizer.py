"""What the optimizer takes for a layer's parameters, measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from megatron_pulse.profile.measuring.clock import Patience, median_and_spread, repeat


def optimizer_seconds(
    parameters: Iterable[torch.nn.Parameter], device: torch.device, patience: Patience
) -> float:
    """Seconds of a step, over fp32 masters of ``parameters``, of the Adam that trains, and of what
    goes with it: the gradients' norm, clipping by it, zeroing, and rounding to the parameters."""
    from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER, Adam

    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        return 0.0
    masters = [torch.nn.Parameter(p.detach().float().clone()) for p in trained]
    for master in masters:
        master.grad = torch.full_like(master, 1e-3)
    # Where it would be torch's, training has one that is fused on GPUs.
    fused = {"fused": True} if USING_PYTORCH_OPTIMIZER and device.type == "cuda" else {}
    adam = Adam(masters, lr=1e-9, **fused)
    rounded = [(p, m) for p, m in zip(trained, masters, strict=True) if p.dtype != m.dtype]

    def work(mark: Callable[[], None]) -> None:
        mark()
        torch.nn.utils.clip_grad_norm_(masters, 1e9)
        adam.step()
        with torch.no_grad():
            for parameter, master in rounded:
                parameter.copy_(master)
        for master in masters:
            assert master.grad is not None
            master.grad.zero_()
        mark()

    return median_and_spread([row[0] for row in repeat(work, device, patience)])[0]
