"""What a built layer holds, and what tensor parallelism makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.profile.measuring.building import count_module_parameters
from megatron_pulse.profile.record.layers import ShardSums


@dataclass(frozen=True)
class ModuleSizes:
    """What a built layer holds, and what tensor parallelism does to it (see ``ProfiledLayer``)."""

    parameters: int
    sharded: int = 0
    sums: ShardSums = ShardSums()
    frozen: int = 0


def sharded_time(whole_s: float, half_s: float) -> float:
    """The share of a layer's time that tensor-parallel ranks divide (Amdahl's law), of what it
    takes whole and on one of two ranks."""
    return min(1.0, max(0.0, 2 * (1 - half_s / whole_s))) if whole_s else 1.0


def can_halve(backbone: Backbone, sizes: ModuleSizes) -> bool:
    """Whether two tensor-parallel ranks share the layer of ``sizes``."""
    even = not any(heads % 2 for heads in backbone.num_heads)
    return even and sizes.sharded > 0 and sizes.sharded % 2 == 0


def module_sizes(module: Any, forward: Callable[[], object], samples: int) -> ModuleSizes:
    """The sizes of one layer, built whole; ``forward`` runs it on ``samples``."""
    sharded = (p for p in module.parameters() if getattr(p, "tensor_model_parallel", False))
    sums = _shard_sums(module, forward, samples)
    whole, trained = count_module_parameters(module), count_module_parameters(module, True)
    return ModuleSizes(whole, sum(p.numel() for p in sharded), sums, whole - trained)


def _shard_sums(module: Any, forward: Callable[[], object], samples: int) -> ShardSums:
    """What Megatron's row- and column-parallel linears within ``module`` give and take.

    A row-parallel linear saves what it multiplies before its sum: where a layer saves nothing
    after, recomputation ends before the sum.
    """
    from torch.autograd.graph import saved_tensors_hooks

    rows: list[int] = []
    saved_before: list[int] = []
    num_saved = 0

    def count_saved(tensor: Any) -> Any:
        nonlocal num_saved
        num_saved += 1
        return tensor

    def add_row(made: Any) -> None:
        rows.append(made[0].nbytes // samples)
        saved_before.append(num_saved)

    columns: list[int] = []
    contexts: list[int] = []
    hooks = []
    for name, part in module.named_modules():
        kind = type(part).__name__
        if "RowParallel" in kind:
            hooks.append(part.register_forward_hook(lambda _, given, made: add_row(made)))
        elif "ColumnParallel" in kind:
            # Keys and values of Megatron's CrossAttention are of a context.
            found = contexts if name.endswith("linear_kv") else columns
            hooks.append(
                part.register_forward_pre_hook(
                    lambda _, given, found=found: found.append(given[0].nbytes // samples)
                )
            )
    if hooks:
        with saved_tensors_hooks(count_saved, lambda tensor: tensor):
            forward()
    for hook in hooks:
        hook.remove()
    repeated = sum(before < num_saved for before in saved_before)
    return ShardSums(tuple(rows), tuple(columns), tuple(contexts), repeated)
