"""Fully sharded stages in Megatron's training loop: wrappers, optimizer, checkpoint entries.

Megatron's own ``--use-torch-fsdp2`` gives its optimizers DTensors and reduces in bf16. Here
optimizers get this rank's rows as plain fp32 tensors, so norm, clipping, EMA and checkpoints are
those of every other layout.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from megatron_pulse.integration.megatron.compat import inner_optimizers
from megatron_pulse.integration.megatron.model import unwrap
from megatron_pulse.runtime.parameters.fsdp import FullyShardedStage


class FullPrecisionModule(MegatronModule):
    """Replacement of ``Float16Module`` that rounds buffers only.

    Parameters stay fp32 as main parameters; their gathered copies are rounded.
    """

    def __init__(self, config: Any, module: nn.Module) -> None:
        super().__init__(config)
        self.module = module
        for part in module.modules():
            for name, buffer in part._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    part._buffers[name] = buffer.to(config.params_dtype)

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Do nothing; Megatron's wrappers need the method."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """State of the wrapped module, without a prefix."""
        return self.module.state_dict(*args, **kwargs)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Sharded state of the wrapped module, without a prefix."""
        return self.module.sharded_state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the state of the wrapped module."""
        return self.module.load_state_dict(*args, **kwargs)


class FullyShardedDataParallel(_BaseDataParallel):
    """Replacement of Megatron's DDP whose stage is fully sharded.

    Calling it runs the stage below the root of ``fully_shard``.
    """

    def __init__(self, config: Any, ddp_config: Any, module: nn.Module) -> None:
        super().__init__(config=config, module=module)
        self.ddp_config = ddp_config
        self.checks_each = False
        stage = unwrap(module)
        assert stage.units is not None
        self.sharded = FullyShardedStage(stage, stage.units)
        stage.fully_sharded = self.sharded
        stage.main_params = self.sharded.main_params()
        config.no_sync_func = self.no_sync

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        results = self.sharded.root(*inputs, **kwargs)
        if not torch.is_grad_enabled():  # no backward will free them
            self.sharded.free_gathered()
        return results

    def no_sync(self) -> AbstractContextManager[None]:
        """Context of all microbatches of a step but the last; none if ``checks_each``."""
        if self.checks_each:
            return contextlib.nullcontext()
        return self.sharded.accumulating()

    @contextlib.contextmanager
    def checking_each(self) -> Iterator[None]:
        """Within, the gradients of each microbatch are reduced at its end."""
        self.checks_each = True
        try:
            yield
        finally:
            self.checks_each = False

    def finish_grad_sync(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing; gradients are reduced in backward."""

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Sharded state of the stage, without a prefix."""
        return self.module.sharded_state_dict(*args, **kwargs)


def wrap_fully_sharded(
    chunks: list[nn.Module], config: Any, ddp_config: Any, **unused: Any
) -> list[nn.Module]:
    """Replacement of ``wrap_model_chunks_with_ddp`` for the single stage of a pipeline device."""
    return [FullyShardedDataParallel(config, ddp_config, chunk) for chunk in chunks]


class _Rows(nn.Module):
    """Parameters for Megatron's optimizer: this rank's rows, without empty ones."""

    def __init__(self, chunk: FullyShardedDataParallel) -> None:
        super().__init__()
        self.ddp_config, self.config = chunk.ddp_config, chunk.config
        self.pg_collection = unwrap(chunk).pg_collection
        self._own = {name: own for name, own in chunk.sharded.own.items() if own.numel()}

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Rows by the names of their parameters."""
        yield from self._own.items()

    def parameters(self, *args: Any, **kwargs: Any) -> Iterator[nn.Parameter]:
        """Rows."""
        yield from self._own.values()


class FullyShardedOptimizer(FP32Optimizer):
    """Megatron's fp32 optimizer over rows, saved as the distributed optimizer saves its state."""

    fully_sharded: FullyShardedStage

    def prepare_grads(self) -> bool:
        """Take the rows' gradients; no overflow is possible."""
        self.fully_sharded.take_gradients()
        return False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        self.fully_sharded.zero_grad()

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
    ) -> dict[str, Any]:
        """State in the format "fully_reshardable" of Megatron's distributed optimizer."""
        self.init_state_fn(self.optimizer, self.config)
        entries = model_sharded_state_dict["model"]
        state: dict[int, dict[str, Any]] = {}
        for number, (name, own) in enumerate(self._trained()):
            entry = entries[name]
            key, kinds = entry.key, {"param": own.detach(), **self.optimizer.state[own]}
            state[number] = {
                kind: _with_data(entry, f"optimizer.state.{kind}.{key}", values)
                for kind, values in kinds.items()
            }
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        return {
            "optimizer": {"param_groups": groups},
            "param_state": state,
            "param_state_sharding_type": "fully_reshardable",
        }

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the settings of parameter groups, and the rows' state."""
        groups = self.optimizer.param_groups
        saved = [{"params": [], **group} for group in state_dict["optimizer"]["param_groups"]]
        matched = self._filter_and_reorder_param_groups([dict(group) for group in groups], saved)
        for group, values in zip(groups, matched, strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})
        with torch.no_grad():
            for number, (_, own) in enumerate(self._trained()):
                for kind, values in state_dict["param_state"][number].items():
                    to = own if kind == "param" else self.optimizer.state[own][kind]
                    to.copy_(values)

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Rows that the optimizer updates, by name."""
        for name, own in self.fully_sharded.own.items():
            if own.requires_grad and own.numel():
                yield name, own


def _with_data(entry: Any, key: str, values: Tensor) -> Any:
    """Entry of rows with other values under another key."""
    changes: dict[str, Any] = {"key": key, "data": values}
    if isinstance(entry, ShardedTensor):
        changes["dtype"] = values.dtype
    return dataclasses.replace(entry, **changes)


def fully_sharded_optimizer(
    get_optimizer: Callable[..., Any],
    config: Any,
    model: list[nn.Module],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Megatron's optimizer over the rows of the only chunk of ``model``, in fp32."""
    (chunk,) = model
    assert isinstance(chunk, FullyShardedDataParallel)
    sharded = chunk.sharded
    plain = dataclasses.replace(config, bf16=False, fp16=False, use_distributed_optimizer=False)
    optimizer = get_optimizer(plain, [_Rows(chunk)], *args, **kwargs)
    (inner,) = inner_optimizers(optimizer)
    assert type(inner) is FP32Optimizer, type(inner)
    inner.__class__ = FullyShardedOptimizer
    inner.fully_sharded = sharded
    # Replicas of a row are counted once in the norm; other ranks hold other rows.
    inner.grad_stats_parallel_group = sharded.group if sharded.has_replicas else None
    return optimizer
