"""Measurement of the optimizer step for a layer's parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from megatron_pulse.profile.measurement.clock import RepetitionLimits, median_and_spread, repeat


def optimizer_seconds(
    parameters: Iterable[torch.nn.Parameter], device: torch.device, patience: RepetitionLimits
) -> float:
    """Seconds of an optimizer step on fp32 main parameters of ``parameters``.

    Includes training's Adam, gradient norm, clipping, zeroing, and rounding to the parameters.
    """
    from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER, Adam

    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        return 0.0
    masters = [torch.nn.Parameter(p.detach().float().clone()) for p in trained]
    for master in masters:
        master.grad = torch.full_like(master, 1e-3)
    # Where Adam is torch's own, training uses its fused form on GPUs.
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
