"""Gradient norm that does not depend on the cuts of the pipeline.

Megatron adds fp32 sums of squares rank by rank. The last bit of the norm, and with clipping the
last bit of every weight, then depends on the layout. Summation in fp64 with one rounding to fp32
makes runs of every placement equal bit for bit (decision 7 of the architecture).
"""

from __future__ import annotations

import math
from typing import Any

import megatron.core.optimizer.optimizer as optimizer
import torch
import torch.distributed as dist
from torch import Tensor


class NotFinite(Exception):
    """Norm of the gradients that is NaN or infinite."""


_megatron_grad_norm = optimizer.get_grad_norm_fp32


def get_grad_norm(
    grads_for_norm: list[Tensor] | Tensor,
    norm_type: int | float = 2,
    grad_stats_parallel_group: dist.ProcessGroup | None = None,
) -> Any:
    """Norm of all gradients of the model, as Megatron's ``get_grad_norm_fp32`` returns it."""
    if norm_type != 2:
        return _megatron_grad_norm(grads_for_norm, norm_type, grad_stats_parallel_group)
    grads = [grads_for_norm] if isinstance(grads_for_norm, Tensor) else grads_for_norm
    total = torch.zeros(1, dtype=torch.float64, device=torch.cuda.current_device())
    if grads:
        norms = torch._foreach_norm(grads, 2, dtype=torch.float64)
        total += torch.stack(norms).square().sum()
    dist.all_reduce(total, group=grad_stats_parallel_group)
    return total.sqrt().float().item()


def clip_chains_separately(chains: tuple[str, ...]) -> None:
    """Let Megatron clip the gradients of each of these chains of a cascade by a norm of its own.

    The log shows the norm of the first chain.
    """
    optimizer.SEPARATE_GRAD_NORM_GROUPS = (*optimizer.SEPARATE_GRAD_NORM_GROUPS, *chains)


def use_layout_independent_grad_norm(checks: bool) -> None:
    """Make Megatron's optimizers call ``get_grad_norm``.

    With ``checks``, all ranks raise NotFinite for a non-finite norm before any weight is changed.
    """

    def checked(*args: Any, **kwargs: Any) -> Any:
        norm = get_grad_norm(*args, **kwargs)
        if checks and not math.isfinite(norm):
            raise NotFinite(norm)
        return norm

    optimizer.get_grad_norm_fp32 = checked
