"""Layers built alone: the context they need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_pulse.backbone.context import LOCAL, LayerContext


class _SingleRank:
    """Stands in for a process group of one rank, whatever groups this process is really in."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def meta_context(
    dtype: str = "float32", tensor: int = 1, transformer_impl: str = LOCAL
) -> LayerContext:
    """A context in which layers build whole (no tensor parallelism) and without initialisation.

    Use under ``torch.device("meta")``, or fill the parameters before use. Needs no process group,
    and ignores those there are. ``dtype`` is that of parameters. With ``tensor`` above 1 layers are
    the first of so many tensor-parallel ranks', whose sums over ranks do nothing and take no time.
    """
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    groups = ProcessGroupCollection()
    groups.tp = groups.cp = _SingleRank()
    if tensor > 1:
        from torch.testing._internal.distributed.fake_pg import FakeProcessGroup

        groups.tp = FakeProcessGroup._create_internal(0, tensor)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=tensor,
        tensor_model_parallel_size=tensor,
        use_cpu_initialization=True,
        perform_initialization=False,
        transformer_impl=transformer_impl,
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


def count_module_parameters(module: Any, trained: bool = False) -> int:
    """Number of parameters of one built layer, or of those that ask for a gradient."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained)
