"""Context for building single layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_pulse.backbone.build_context import LOCAL, LayerContext


class _SingleRank:
    """Stand-in for a process group of one rank, whatever the groups of this process."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def meta_context(
    dtype: str = "float32", tensor: int = 1, transformer_impl: str = LOCAL, context: int = 1
) -> LayerContext:
    """Context for building layers whole (without tensor parallelism) and without initialisation.

    Use under ``torch.device("meta")``, or fill the parameters before use. Existing process groups
    are neither needed nor used. ``dtype`` is that of parameters. With ``tensor`` above 1 the layer
    is that of the first of so many tensor-parallel ranks, whose collectives do nothing; ``context``
    says the same of context-parallel ranks.
    """
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    groups = ProcessGroupCollection()
    groups.tp = groups.cp = _SingleRank()
    if tensor > 1:
        groups.tp = _silent_backend(tensor)
    if context > 1:
        groups.cp = _silent_group(context)
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


def _silent_backend(size: int) -> Any:
    """First of ``size`` ranks, whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeProcessGroup

    return FakeProcessGroup._create_internal(0, size)


def _silent_group(size: int) -> Any:
    """``_silent_backend`` as a group on every device, also for all-to-alls."""
    import torch
    from torch.distributed import ProcessGroup

    group = ProcessGroup(0, size)
    for device in ("cpu", "cuda", "meta"):
        kind = ProcessGroup.BackendType.CUSTOM
        group._register_backend(torch.device(device), kind, _silent_backend(size))
    return group


@contextmanager
def some_process_group() -> Iterator[None]:
    """Initialise a process group of one rank if there is none: Megatron's layers require one."""
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
    """Number of parameters of one built layer; with ``trained`` only those with
    ``requires_grad``.
    """
    from megatron_pulse.adapters.quantized_linear import num_values

    return sum(num_values(p) for p in module.parameters() if p.requires_grad or not trained)


def count_quantized(module: Any) -> tuple[int, int]:
    """Number of a built layer's quantised parameters, and their bytes."""
    from megatron_pulse.adapters.quantized_linear import is_quantized, num_values

    found = [p for p in module.parameters() if is_quantized(p)]
    return sum(map(num_values, found)), sum(p.nbytes for p in found)
