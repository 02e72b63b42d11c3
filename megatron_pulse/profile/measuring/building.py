"""Layers built alone: the context they need, and what a built one holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron_pulse.backbone.context import LayerContext
from megatron_pulse.profile.profile import ShardSums


class _SingleRank:
    """Stands in for a process group of one rank, whatever groups this process is really in."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def meta_context(dtype: str = "float32") -> LayerContext:
    """A context in which layers build whole (no tensor parallelism) and without initialisation.

    Use under ``torch.device("meta")``, or fill the parameters before use. Needs no process group,
    and ignores those there are. ``dtype`` is that of parameters.
    """
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    groups = ProcessGroupCollection()
    groups.tp = groups.cp = _SingleRank()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        use_cpu_initialization=True,
        perform_initialization=False,
        transformer_impl="local",
        params_dtype=getattr(torch, dtype),
    )
    return LayerContext(config, groups)


@contextmanager
def some_process_group() -> Iterator[None]:
    """Megatron's layers hand no group on where torch.distributed is not running."""
    import torch.distributed as dist

    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def count_module_parameters(module: Any) -> int:
    """Number of parameters of one built layer."""
    return sum(parameter.numel() for parameter in module.parameters())


@dataclass(frozen=True)
class Sizes:
    """What a built layer holds, and what tensor parallelism does to it (see ``ProfiledLayer``)."""

    parameters: int
    sharded: int = 0
    sums: ShardSums = ShardSums()


def module_sizes(module: Any, forward: Callable[[], object], samples: int) -> Sizes:
    """The sizes of one layer, built whole; ``forward`` runs it on ``samples``."""
    sharded = (p for p in module.parameters() if getattr(p, "tensor_model_parallel", False))
    sums = _shard_sums(module, forward, samples)
    return Sizes(count_module_parameters(module), sum(p.numel() for p in sharded), sums)


def _shard_sums(module: Any, forward: Callable[[], object], samples: int) -> ShardSums:
    """What Megatron's row- and column-parallel linears within ``module`` give and take."""
    import torch

    rows: list[int] = []
    columns: list[int] = []
    contexts: list[int] = []
    hooks = []
    for name, part in module.named_modules():
        kind = type(part).__name__
        if "RowParallel" in kind:
            hooks.append(
                part.register_forward_hook(
                    lambda _, given, made: rows.append(made[0].nbytes // samples)
                )
            )
        elif "ColumnParallel" in kind:
            # Keys and values of Megatron's CrossAttention are of a context.
            found = contexts if name.endswith("linear_kv") else columns
            hooks.append(
                part.register_forward_pre_hook(
                    lambda _, given, found=found: found.append(given[0].nbytes // samples)
                )
            )
    if hooks:
        with torch.no_grad():
            forward()
    for hook in hooks:
        hook.remove()
    return ShardSums(tuple(rows), tuple(columns), tuple(contexts))
