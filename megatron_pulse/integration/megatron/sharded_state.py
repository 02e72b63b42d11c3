"""Sharded state of a stage: tensor-parallel layers below plain containers, and the EMA."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn


def sharded_module_state(
    module: nn.Module, prefix: str, metadata: dict[str, Any] | None
) -> dict[str, Any]:
    """Sharded state of everything below ``module``.

    Modules with a ``sharded_state_dict`` (Megatron's layers) return their own. Plain torch modules
    are walked, because Megatron's default treats everything below them as replicated.
    """
    state: dict[str, Any] = {}
    for name, child in module.named_children():
        child_prefix = f"{prefix}{name}."
        if hasattr(child, "sharded_state_dict"):
            state.update(child.sharded_state_dict(child_prefix, (), metadata))
        else:
            state.update(sharded_module_state(child, child_prefix, metadata))
    own = {
        name: tensor
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and name not in module._non_persistent_buffers_set
    }
    if own:
        state.update(
            make_sharded_tensors_for_checkpoint(
                own, prefix, dp_cp_group=(metadata or {}).get("dp_cp_group")
            )
        )
    return state


def like_parameters(
    state: dict[str, Any], prefix: str, tensors: Mapping[str, torch.Tensor], kind: str = ""
) -> dict[str, Any]:
    """Entries ``kind + name`` of whole ``tensors``, sharded like the parameters of ``state``."""
    entries = {}
    for name, tensor in tensors.items():
        sharded = state[prefix + name]
        changes: dict[str, Any] = {"key": f"{kind}{sharded.key}", "data": tensor}
        if isinstance(sharded, ShardedTensor):
            changes["dtype"] = tensor.dtype
        elif not isinstance(sharded, ShardedTensorFactory):
            continue
        entries[f"{prefix}{kind}{name}"] = dataclasses.replace(sharded, **changes)
    return entries
