"""Small modules shared by all families."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_pg_rank, get_pg_size

from megatron_pulse.backbone.token_shares import share_of
from megatron_pulse.tracing.context_parallel.collectives import gather
from megatron_pulse.tracing.context_parallel.division import Division
from model_specs.common.megatron_config import InitMethod

Tensors = tuple[torch.Tensor, ...]
"""Tensors passed from layer to layer."""
Named = Mapping[str, torch.Tensor]
"""A layer's skips, or its conditioning."""


class LayerModule(MegatronModule):
    """Megatron module with access to its process groups (checkpoints need ``tp_group``).

    Containers must be of this class: Megatron treats the contents of any other class as replicated.
    """

    def __init__(
        self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None
    ) -> None:
        super().__init__(config)
        self.groups = pg_collection
        if pg_collection is not None:
            self.tp_group = pg_collection.tp

    def enter_sequence(self, tokens: torch.Tensor) -> torch.Tensor:
        """Narrow tokens [s, b, d] to the context-parallel rank's share, and scatter those to this
        rank's part under sequence parallelism.

        The producer of ``tokens`` gets full gradients, so ``works_on_shards`` must not mark it.
        """
        group = cp_group(self.groups)
        if (size := get_pg_size(group)) > 1:
            first, count = share_of(len(tokens), get_pg_rank(group), size)
            tokens = tokens.narrow(0, first, count).clone()  # a view would keep the whole
        if not self.config.sequence_parallel:
            return tokens
        return scatter_to_sequence_parallel_region(tokens, group=tp_group(self.groups))

    def leave_sequence(self, tokens: torch.Tensor, length: int) -> torch.Tensor:
        """Inverse of ``enter_sequence`` for ``length`` tokens of all ranks.

        Later operations compute the same on every rank.
        """
        if self.config.sequence_parallel:
            tokens = gather_from_sequence_parallel_region(
                tokens, tensor_parallel_output_grad=False, group=tp_group(self.groups)
            )
        group = cp_group(self.groups)
        if (size := get_pg_size(group)) == 1:
            return tokens
        return gather(tokens, 0, Division(0, (length,)).counts(size), group)


def tp_group(groups: ProcessGroupCollection | None) -> Any:
    """The tensor-parallel group; None means Megatron's global one."""
    return groups.tp if groups is not None else None


def cp_group(groups: ProcessGroupCollection | None) -> Any:
    """The context-parallel group; None if Megatron has no groups."""
    if groups is not None:
        return groups.cp
    return parallel_state.get_context_parallel_group(check_initialized=False)


class LayerNorm(torch.nn.LayerNorm):
    """torch's LayerNorm that works under sequence parallelism (Megatron's wrapper refuses it)."""

    def __init__(self, config: TransformerConfig, width: int) -> None:
        super().__init__(width, eps=config.layernorm_epsilon, dtype=config.params_dtype)
        works_on_shards(self, config)


def works_on_shards(module: torch.nn.Module, config: TransformerConfig) -> None:
    """Mark replicated parameters that see a part of the sequence under sequence parallelism.

    Megatron then sums their gradients over the tensor-parallel ranks.
    """
    for parameter in module.parameters():
        parameter.sequence_parallel = config.sequence_parallel


def linear(
    inputs: int, outputs: int, config: TransformerConfig, draw: InitMethod
) -> torch.nn.Linear:
    """A replicated linear whose weight is drawn by ``draw`` in fp32; bias 0."""
    made = torch.nn.Linear(inputs, outputs)
    if config.perform_initialization:
        draw(made.weight)
        torch.nn.init.zeros_(made.bias)
    return made.to(dtype=config.params_dtype)


class VectorMlp(torch.nn.Module):
    """Vectors through linear, SiLU, linear."""

    def __init__(self, linear_1: torch.nn.Linear, linear_2: torch.nn.Linear) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = linear_1, linear_2

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """[b, inputs] to [b, outputs]."""
        embedded: torch.Tensor = self.linear_2(F.silu(self.linear_1(vectors)))
        return embedded


class Table:
    """Constant fp32 tensor (positions, frequencies), made once per device.

    A buffer would be cast with its module to bf16, so the tensor is no buffer.
    """

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        self._make = make
        self._made: dict[torch.device, torch.Tensor] = {}

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Table:
        """Table of a function of the tensor, computed on the CPU."""
        return Table(lambda: change(self._make()))

    def on(self, device: torch.device) -> torch.Tensor:
        """The tensor on ``device``."""
        if device not in self._made:
            with torch.device("meta" if device.type == "meta" else "cpu"):
                table = self._make()
            self._made[device] = table.float().to(device)
        return self._made[device]


def timestep_embedding(timesteps: torch.Tensor, dim: int, freq_shift: int = 0) -> torch.Tensor:
    """Sinusoids of ``timesteps`` [b] in fp32: [b, dim], cosines first (Ho et al. 2020).

    Frequencies are 10000^(-i / (dim/2 - freq_shift)). U-ViT uses a ``freq_shift`` of 0. diffusers
    uses ``downscale_freq_shift`` with ``flip_sin_to_cos``.
    """
    half = dim // 2
    exponents = torch.arange(half, dtype=torch.float32, device=timesteps.device)
    frequencies = torch.exp(-math.log(10000) * exponents / (half - freq_shift))
    angles = timesteps.float()[:, None] * frequencies[None, :]
    return torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)


class TimestepEmbedder(VectorMlp):
    """Timesteps [b] to [b, dim]: 256 sinusoids, linear, SiLU, linear (DiT, section 3.2).

    Names are those of diffusers' ``TimestepEmbedding``; weights are drawn as DiT's: N(0, 0.02).
    """

    def __init__(self, dim: int, freq_shift: int = 0, initialize: bool = True) -> None:
        super().__init__(torch.nn.Linear(256, dim), torch.nn.Linear(dim, dim))
        self.freq_shift = freq_shift
        if initialize:
            for linear in (self.linear_1, self.linear_2):
                torch.nn.init.normal_(linear.weight, std=0.02)
                torch.nn.init.zeros_(linear.bias)

    def forward(self, timesteps: torch.Tensor) -> torch.Tensor:
        """``timesteps`` in fp32; the sinusoids are cast to the weights' dtype."""
        sinusoids = timestep_embedding(timesteps, self.linear_1.in_features, self.freq_shift)
        return super().forward(sinusoids.to(self.linear_1.weight.dtype))
