"""Parameter counts of a built layer, and the effects of tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.profile.layer_records import ShardSums
from megatron_pulse.profile.measurement.layer_context import (
    count_module_parameters,
    count_quantized,
)


@dataclass(frozen=True)
class ModuleSizes:
    """Sizes of a built layer, with effects of tensor parallelism (see ``ProfiledLayer``).

    ``quantized`` of the frozen parameters take ``quantized_bytes``.
    """

    parameters: int
    sharded: int = 0
    sums: ShardSums = ShardSums()
    frozen: int = 0
    quantized: int = 0
    quantized_bytes: int = 0


def sharded_time(whole_s: float, half_s: float) -> float:
    """Fraction of a layer's time that tensor-parallel ranks divide (Amdahl's law).

    Derived from the time of the whole layer and that on one of two ranks.
    """
    return min(1.0, max(0.0, 2 * (1 - half_s / whole_s))) if whole_s else 1.0


def can_halve(backbone: Backbone, sizes: ModuleSizes) -> bool:
    """True if two tensor-parallel ranks can share the layer of ``sizes``."""
    even = not any(heads % 2 for heads in backbone.num_heads)
    return even and sizes.sharded > 0 and sizes.sharded % 2 == 0


def module_sizes(module: Any, forward: Callable[[], object], samples: int) -> ModuleSizes:
    """Sizes of one layer, built whole; ``forward`` runs it on ``samples``."""
    sharded = (p for p in module.parameters() if getattr(p, "tensor_model_parallel", False))
    sums = _shard_sums(module, forward, samples)
    whole, trained = count_module_parameters(module), count_module_parameters(module, True)
    num_sharded = sum(p.numel() for p in sharded)
    return ModuleSizes(whole, num_sharded, sums, whole - trained, *count_quantized(module))


def _shard_sums(module: Any, forward: Callable[[], object], samples: int) -> ShardSums:
    """Bytes of inputs and outputs of Megatron's row- and column-parallel linears in ``module``.

    A row-parallel linear saves its input before its sum. If the layer saves nothing afterwards,
    recomputation ends before the sum.
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
            # Keys and values of Megatron's CrossAttention are computed from a context.
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
