"""Small modules that every family shares."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import sharded_state_dict_default


class LayerModule(MegatronModule):
    """A Megatron module that knows its tensor-parallel group, which its checkpoints need.

    Containers must be of this class, or ``ShardedModuleList``: Megatron takes everything inside
    any other container to be replicated.
    """

    def __init__(
        self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None
    ) -> None:
        super().__init__(config)
        if pg_collection is not None:
            self.tp_group = pg_collection.tp


class ShardedModuleList(torch.nn.ModuleList):
    """A ModuleList whose children keep their own sharding in distributed checkpoints."""

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The children's sharded state dicts, under ``prefix`` and their index."""
        return {
            key: value
            for name, child in self.named_children()
            for key, value in sharded_state_dict_default(
                child, f"{prefix}{name}.", sharded_offsets, metadata
            ).items()
        }


class LayerNorm(torch.nn.LayerNorm):
    """torch's LayerNorm that works under sequence parallelism (Megatron's wrapper refuses it).

    Its parameters are marked, so that Megatron sums their gradients over the sequence's shards.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


def timestep_embedding(timesteps: torch.Tensor, dim: int) -> torch.Tensor:
    """Sinusoids of ``timesteps`` [b] in fp32: [b, dim], cosines first (Ho et al. 2020).

    Frequencies are 10000^(-i / (dim/2)): U-ViT's, and diffusers' with ``flip_sin_to_cos`` and
    ``freq_shift`` 0.
    """
    half = dim // 2
    exponents = torch.arange(half, dtype=torch.float32, device=timesteps.device)
    frequencies = torch.exp(-math.log(10000) * exponents / half)
    angles = timesteps.float()[:, None] * frequencies[None, :]
    return torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)
