"""Samples from a checkpoint, on one process."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.integration.arguments import pulse_options
from megatron_pulse.integration.checkpoints import (
    CheckpointError,
    checkpoint_folder,
    load_weights,
    saved_arguments,
)
from megatron_pulse.integration.compat import patch_megatron
from megatron_pulse.integration.data import make_process
from megatron_pulse.planner.placement import sequential
from megatron_pulse.planner.plan import make_plan
from megatron_pulse.runtime.stage import Stage
from model_specs import load_backbone

ModelFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class TrainedModel:
    """A backbone with the weights of a checkpoint: ``predict(x_t, timesteps, labels)``."""

    backbone: Backbone
    predict: ModelFunction
    arguments: argparse.Namespace
    folder: Path

    @property
    def null_label(self) -> int | None:
        """The label that stands for "no class"; None for an unconditional backbone."""
        return int(self.backbone.record["options"].get("num_classes") or 0) or None

    @property
    def makes_pixels(self) -> bool:
        """Whether it was trained on pixels in [-1, 1] (else on latents)."""
        return not self.arguments.pulse_data.startswith("latents:")


def one_process_groups() -> None:
    """Model-parallel groups of a single process, where none exist yet."""
    if not dist.is_initialized():
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(0)


def load_model(load: str | Path, iteration: int | None = None, *, averaged: bool) -> TrainedModel:
    """The backbone of a checkpoint on one process, with averaged or raw weights.

    Raises CheckpointError when there is no such checkpoint or it holds no averaged weights.
    """
    os.environ.setdefault("RANK", "0")
    folder = checkpoint_folder(load, iteration)
    args = saved_arguments(folder)
    if averaged and not args.pulse_ema_decay:
        raise CheckpointError(f"{folder} holds no averaged weights: use --raw")
    patch_megatron()
    one_process_groups()
    backbone = load_backbone(args.pulse_record["name"], args.pulse_record["options"])
    if unknown := set(backbone.batch_fields) - {"timesteps", "labels"}:
        raise CheckpointError(
            f"{folder} holds {backbone.name}, which also reads {', '.join(sorted(unknown))}: "
            "only class-conditional and unconditional backbones can be sampled here"
        )
    plan = make_plan(backbone, [1.0] * len(backbone.layers), sequential(1))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=8, use_cpu_initialization=True
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    stage = Stage(config, backbone, plan.routes, 0, args.seed, groups).to(device)
    load_weights(stage, folder, averaged=averaged)
    stage.eval()

    @torch.no_grad()
    def predict(noisy: Tensor, timesteps: Tensor, labels: Tensor) -> Tensor:
        given = {"timesteps": timesteps.float(), "labels": labels}
        conditioning = {name: given[name].to(device) for name in backbone.batch_fields}
        outputs, _, _ = stage((noisy.to(device).float(),), {}, conditioning)
        return outputs[0].to(noisy.device)

    return TrainedModel(backbone, predict, args, folder)


def sample_images(
    model: TrainedModel,
    labels: Sequence[int],
    *,
    num_steps: int,
    guidance: float,
    seed: int,
    batch_size: int = 100,
    progress: bool = True,
) -> Tensor:
    """Samples ``[n, c, h, w]`` of the asked classes: pixels in [-1, 1], or latents."""
    from megatron_pulse.diffusion.sampling import sample

    process = make_process(pulse_options(model.arguments))
    images = []
    for first in range(0, len(labels), batch_size):
        part = torch.tensor(labels[first : first + batch_size])
        images.append(
            sample(
                model.predict,
                process,
                model.backbone.input_spec.shape,
                part,
                num_steps=num_steps,
                guidance_scale=guidance,
                seed=seed,
                null_label=model.null_label,
                progress=progress,
                clip=1.0 if model.makes_pixels else None,
                first_index=first,
            )
        )
    return torch.cat(images)
