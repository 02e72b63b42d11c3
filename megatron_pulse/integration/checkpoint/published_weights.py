"""Conversion of published weights to a checkpoint for training, and back."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import add_megatron_arguments
from torch import Tensor

from megatron_pulse.adapters.adapter import Adapter
from megatron_pulse.adapters.merge import merged
from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.published_weights import (
    Published,
    PublishedError,
    Renamed,
    adopted,
    require_fit,
    to_published,
    torn,
    untied,
)
from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.files import replacing_folder
from megatron_pulse.integration.checkpoint.folders import LATEST, RELEASE, CheckpointError
from megatron_pulse.integration.checkpoint.saved_run import SavedRun, load_weights, require_whole
from megatron_pulse.integration.checkpoint.saving import patch_saving
from megatron_pulse.integration.flags.pulse_options import add_pulse_arguments
from megatron_pulse.integration.megatron.compat import patch_megatron
from megatron_pulse.integration.megatron.stage import EMA, MegatronStage, like_parameters
from megatron_pulse.planner.layout.placement import Partition, sequential
from megatron_pulse.planner.layout.routes import trace_routes
from megatron_pulse.profile.parameters import meta_weights
from megatron_pulse.tracing.initial_weights.sources import altered
from model_specs import published_form
from model_specs.common.attach_adapter import adapter_names

_FAR = 4
"""Ratio of numbers of values from which a backbone is another model, whatever its tensor names."""


def one_process_groups() -> None:
    """Create model-parallel groups of a single process, unless groups exist."""
    if not dist.is_initialized():
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(0)


def whole_stage(backbone: Backbone, *, initialise: bool = False) -> MegatronStage:
    """Backbone as one stage in fp32 on the CPU, in a world of one process."""
    patch_megatron()
    patch_saving()
    one_process_groups()
    whole = Partition(sequential(1), (0, len(backbone.layers)))
    config = stage_config(initialise=initialise)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return MegatronStage(config, backbone, trace_routes(backbone, whole), 0, 0, groups)


def stage_config(*, initialise: bool = False) -> TransformerConfig:
    """Megatron's settings of a stage outside a training: fp32, without parallel layers."""
    return TransformerConfig(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=8,
        use_cpu_initialization=True,
        perform_initialization=initialise,
        transformer_impl="local",
    )


def load_whole(
    saved: SavedRun,
    *,
    averaged: bool,
    options: Mapping[str, str] = MappingProxyType({}),
    quantized: bool = True,
    frozen: bool = True,
) -> tuple[Backbone, MegatronStage]:
    """Load the backbone of a saved run (with other ``options``) as one stage with its weights.

    Without ``quantized``, frozen weights are as published. Without ``frozen``, they are not read,
    and their values are arbitrary.
    Raises CheckpointError if the weights are damaged or unreadable, if there is no EMA, or if the
    options make another model.
    """
    if averaged and not saved.has_ema:
        raise CheckpointError(f"{saved.folder} holds no EMA weights: use --raw")
    backbone = saved.load_backbone(options, quantized=quantized)
    require_whole(saved, frozen=frozen)
    stage = whole_stage(backbone, initialise=frozen and saved.frozen_weights is not None)
    load_weights(stage, saved, averaged=averaged, frozen=frozen)
    return backbone, stage


def export_weights(backbone: Backbone, stage: MegatronStage) -> tuple[Published, dict[str, Tensor]]:
    """Published form of the backbone, and its tensors by their published names.

    An adapter is merged into them.
    """
    published = _published(backbone)
    factors, weights = adapter_factors(backbone, stage), weights_of(stage)
    for name in adapter_names(backbone):
        del weights[name]
    tensors = {**to_published(published, weights), **published.constants()}
    if factors:
        tensors |= merged(tensors, factors, Adapter.from_record(backbone.record["adapter"]).scale)
    tensors |= {other: tensors[own] for other, own in published.tied().items()}
    part = published.part
    return published, {n.removeprefix(part): t for n, t in tensors.items() if n.startswith(part)}


def adapter_factors(backbone: Backbone, stage: MegatronStage) -> dict[str, Tensor]:
    """Factors of the adapter by their published names; empty without an adapter."""
    weights = weights_of(stage)
    return {name: weights[ours] for ours, name in adapter_names(backbone).items()}


def _published(backbone: Backbone) -> Published:
    if (published := published_form(backbone)) is None:
        raise CheckpointError(f"{backbone.name}: this family has no published format")
    return published


def weights_of(stage: MegatronStage) -> dict[str, Tensor]:
    """Parameters and persistent buffers, without the states of Transformer Engine's recipes."""
    state = stage.state_dict()
    return {name: tensor for name, tensor in state.items() if not name.endswith("_extra_state")}


def import_weights(
    backbone: Backbone,
    tensors: Mapping[str, Tensor],
    what: str,
    save: Path,
    process: DiffusionProcess,
    base: Path | None = None,
) -> None:
    """Write published ``tensors`` as a release checkpoint in ``save``.

    ``base`` is the folder of their pipeline, which runs and exports find in the checkpoint.
    Weights are fp32, and the EMA that training continues equals them. Raises PublishedError with
    every name that is missing, unexpected or of the wrong shape, before anything is built or read.
    A second check finds every name of the wrong dtype or with non-finite values. Memory: the
    weights in fp32 once, and one published tensor at a time.
    """
    published = _published(backbone)
    stored, tied = Renamed(tensors, published.on_load(tensors)), published.tied()
    tensors = untied(stored, tied)
    _require_fit(backbone, published, tensors, what)
    if faults := [*altered(published.constants(), tensors), *torn(stored, tied)]:
        raise PublishedError(what, faults)
    stage = whole_stage(backbone)
    weights = weights_of(stage)
    for name, tensor in adopted(published, weights, tensors, what):
        weights[name].copy_(tensor)
    model = stage.sharded_state_dict()
    parameters = {name: parameter.detach() for name, parameter in stage.named_parameters()}
    model.update(like_parameters(model, "", parameters, EMA))  # not copied
    with replacing_folder(save) as beside:
        state = {
            "args": _arguments(backbone, process, base),
            "checkpoint_version": 3.0,
            "iteration": 0,
            "model": model,
        }
        (beside / RELEASE).mkdir()
        dist_checkpointing.save(state, str(beside / RELEASE))
        (beside / LATEST).write_text(RELEASE)


def _require_fit(
    backbone: Backbone, published: Published, tensors: Mapping[str, Tensor], what: str
) -> None:
    """Raise PublishedError unless names and shapes are the backbone's, before it takes any memory.

    The description of a backbone far larger than the weights is cut off, so that the check is
    quick.
    """
    there = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    values = sum(tensor.numel() for tensor in there.values())
    like = meta_weights(backbone, most=_FAR * values)
    wanted = sum(tensor.numel() for tensor in like.values())
    if wanted > _FAR * values:
        names = ", ".join([*islice(there, 3), *["..."] * (len(there) > 3)])
        raise PublishedError(
            what,
            [
                f"its config describes at least {4 * wanted:,} bytes in fp32, but the "
                f"{len(there)} tensors there ({names}) have {4 * values:,}: config and weights "
                "are of different models"
            ],
        )
    require_fit(published, like, there, what)


def _arguments(
    backbone: Backbone, process: DiffusionProcess, base: Path | None
) -> argparse.Namespace:
    """Flags of a run on one process that would have written the checkpoint."""
    parser = add_pulse_arguments(add_megatron_arguments(argparse.ArgumentParser()))
    args = parser.parse_args(["--pulse-backbone", backbone.name])
    args.pulse_record = backbone.saved_record
    args.pulse_process = process.to_dict()
    args.pulse_base = None if base is None else str(base)
    args.pulse_data = None  # its training data are unknown
    args.world_size = 1
    return args
