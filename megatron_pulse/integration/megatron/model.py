"""Construction of this rank's stages, for Megatron's ``model_provider`` hook."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.argument_utils import core_transformer_config_from_args
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_pulse.integration.megatron.stage import MegatronStage
from megatron_pulse.planner.program.plan import Plan
from megatron_pulse.runtime.parameters.fsdp import ShardedUnits
from megatron_pulse.runtime.tensor_settings import compute_device


class StageFloat16Module(Float16Module):
    """Megatron's half-precision wrapper without its casts.

    The original casts the input of one rank's first chunk and upcasts the output of another's last,
    by rules that a folded placement breaks. It would also cast timesteps to bf16. The executor
    casts every tensor by its declared dtype instead.
    """

    def forward(self, *inputs: Any, fp32_output: bool = True, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)


def make_model_provider(plan: Plan, args: argparse.Namespace) -> Callable[..., MegatronModule]:
    """Provider that ``megatron.training.pretrain`` calls once per virtual stage."""

    def provide(
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: TransformerConfig | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> MegatronModule:
        assert pg_collection is not None
        device = pg_collection.pp.rank()
        config = config or core_transformer_config_from_args(args)
        # Families build their own norms of queries and keys. This setting makes Megatron sum the
        # gradients of these norms over tensor-parallel ranks, each of which has its own heads.
        config.qk_layernorm = True
        # Weights are drawn in fp32 and then rounded, since main parameters start from fp32 values.
        dtype, config.params_dtype = config.params_dtype, torch.float32
        # Otherwise loading overwrites everything.
        config.perform_initialization &= args.load is None or args.pulse_frozen_weights is not None
        units = None
        if plan.fsdp is not None:
            mesh = fsdp_mesh(pg_collection.dp_cp, plan.fsdp.group)
            units = ShardedUnits(plan.fsdp, len(plan.backbone.layers), mesh, dtype)
        stage = MegatronStage(
            config,
            plan.backbone,
            plan.routes,
            plan.placement.stages_of_device(device)[vp_stage or 0],
            args.seed,
            pg_collection,
            activations=plan.activations,
            offloaded_weights=plan.offloaded_weights,
            token_slices=plan.token_slices,
            frozen_dtype=dtype,
            units=units,
        )
        config.params_dtype = dtype
        if args.pulse_frozen_weights is not None:
            stage.left_out = stage.frozen_names
        if dtype != torch.float32 and not args.skip_train and plan.fsdp is None:
            stage.drawn = {
                name: value
                for name, value in stage.state_dict().items()
                if isinstance(value, torch.Tensor)
                and value.is_floating_point()
                and name not in stage.frozen_names
            }
        return stage

    return provide


def fsdp_mesh(replicas: Any, group: int) -> DeviceMesh:
    """Mesh of the data- and context-parallel ranks of group ``replicas``: "shard", after "replica"
    if several groups of ``group`` ranks share the parameters.

    Several groups need all ranks of the job in the mesh, without tensor parallelism. They are of
    neighbours, so that ranks that share tokens are the first to share parameters.
    """
    device, size = compute_device().type, replicas.size()
    if group == size:
        return DeviceMesh.from_group(replicas, device, mesh_dim_names=("shard",))
    return init_device_mesh(device, (size // group, group), mesh_dim_names=("replica", "shard"))


def unwrap(chunk: torch.nn.Module) -> MegatronStage:
    """Stage inside Megatron's DDP and half-precision wrappers."""
    while not isinstance(chunk, MegatronStage):
        chunk = chunk.module
    return chunk
