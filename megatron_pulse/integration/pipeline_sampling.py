"""Sampling from a checkpoint on several ranks: each loads the weights of its own stages.

Rank 0 reads the request (encoders, files, flags) and sends it to the others. All ranks then run the
sampler in lockstep, as pictures of a run are drawn.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor, nn

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.costs import weighted_costs
from megatron_pulse.diffusion.process_flags import ProcessChoice
from megatron_pulse.diffusion.sampling import Fields
from megatron_pulse.errors import UserError
from megatron_pulse.integration.checkpoint.folders import CheckpointError
from megatron_pulse.integration.checkpoint.published_weights import stage_config
from megatron_pulse.integration.checkpoint.saved_run import (
    load_weights,
    read_saved_run,
    require_whole,
)
from megatron_pulse.integration.checkpoint.saving import patch_saving
from megatron_pulse.integration.loop.forward_backward import PulseSchedule
from megatron_pulse.integration.megatron.compat import patch_megatron
from megatron_pulse.integration.megatron.stage import MegatronStage
from megatron_pulse.integration.sampling import (
    Parts,
    Predict,
    Request,
    Sampler,
    TrainedModel,
    sample_parts,
    trained_model,
)
from megatron_pulse.planner.layout.placement import make_placement
from megatron_pulse.planner.partition.find import default_placement
from megatron_pulse.planner.program.make_plan import make_plan
from megatron_pulse.planner.program.plan import Plan
from megatron_pulse.profile.parameters import count_parameters
from megatron_pulse.runtime.failure_board import FailureBoard, PulseError
from megatron_pulse.runtime.rendezvous import Job
from megatron_pulse.runtime.tensor_settings import compute_device

TIMEOUT_S = 1800.0
"""Longest wait for another rank, which may be loading text encoders."""
_LEAVE_S = 10.0


@dataclass(frozen=True)
class _Order:
    """Request of rank 0 to all ranks."""

    request: Request
    sampler: Sampler
    batch_size: int


class SamplingJob:
    """This rank of a job that samples; rank 0 orders, and the others serve."""

    def __init__(self, job: Job, board: FailureBoard) -> None:
        self.rank, self.num_ranks = job.rank, job.world_size
        self._job, self._board = job, board
        self._is_over = True  # until the model is loaded, on all ranks or on none

    def say_once(self, text: str) -> None:
        """Print an error unless another rank has printed the same."""
        self._job.say_once(text)

    def load_model(
        self,
        load: str | Path,
        iteration: int | None = None,
        *,
        averaged: bool,
        data: str | None = None,
        options: Mapping[str, str],
        choice: ProcessChoice | None = None,
        chain: str | None = None,
        frozen_folder: Path | None = None,
    ) -> TrainedModel:
        """Load this rank's stages (collective); otherwise as ``sampling.load_model``."""
        saved = read_saved_run(load, iteration, frozen_folder).of_chain(chain)
        if averaged and not saved.has_ema:
            raise CheckpointError(f"{saved.folder} holds no EMA weights: use --raw")
        backbone = saved.load_backbone(options)
        require_whole(saved)
        plan = plan_for_sampling(backbone, self.num_ranks)
        stages = self._stages(plan, initialise=saved.frozen_weights is not None)
        for stage in stages:
            load_weights(stage, saved, averaged=averaged)
            stage.to(_device()).eval()
        model = trained_model(saved, backbone, self._predict(plan, stages), data, choice)
        self._is_over = False
        return model

    def draw(self, model: TrainedModel, request: Request, sampler: Sampler, size: int) -> Tensor:
        """Samples of ``request``, on rank 0, in forward passes of ``size`` samples."""
        order = _Order(request, sampler, size)
        self._send(order)
        return self._drawn(model, order, progress=True)

    def serve(self, model: TrainedModel) -> None:
        """Draw with rank 0, on every other rank, until it has no request."""
        answer: list[Any] = [None]
        dist.broadcast_object_list(answer, src=0)
        if answer[0] is not None:
            self._drawn(model, answer[0])

    def release(self) -> None:
        """Let the other ranks end without a request, if rank 0 has none."""
        if self.rank == 0 and not self._is_over:
            self._send(None)

    def _send(self, order: _Order | None) -> None:
        self._is_over = True
        dist.broadcast_object_list([order], src=0)

    def _drawn(self, model: TrainedModel, order: _Order, progress: bool = False) -> Tensor:
        parts = Parts.of(order.request.count, order.batch_size)
        try:
            numbers = parts.numbers
            drawn = sample_parts(model, order.request, parts, numbers, order.sampler, progress)
        except ValueError:  # after all passes: samples that are not finite
            if self.rank == 0:
                raise
            return torch.empty(0)
        return drawn[: order.request.count]

    def _stages(self, plan: Plan, *, initialise: bool) -> list[MegatronStage]:
        patch_megatron()
        patch_saving()
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(pipeline_model_parallel_size=self.num_ranks)
            model_parallel_cuda_manual_seed(0)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        config = stage_config(initialise=initialise)
        return [
            MegatronStage(config, plan.backbone, plan.routes, number, 0, groups)
            for number in plan.placement.stages_of_device(self.rank)
        ]

    def _predict(self, plan: Plan, stages: list[MegatronStage]) -> Predict:
        schedule = PulseSchedule(plan, {}, self._board, TIMEOUT_S)
        chunks: list[nn.Module] = [*stages]

        def predict(
            noisy: Tensor, timesteps: Tensor, conditioning: Fields, batch_size: int | None = None
        ) -> Tensor:
            given = {"timesteps": timesteps, **conditioning}
            fields = {name: given[name] for name in {"timesteps", *plan.backbone.batch_fields}}
            return schedule.predict(chunks, noisy, fields, batch_size or len(noisy))

        return predict


def plan_for_sampling(backbone: Backbone, num_devices: int) -> Plan:
    """Plan whose devices hold about equally many parameters; the first stage is on device 0.

    Raises UserError if there are more devices than stages that the backbone has.
    """
    default = default_placement(len(backbone.layers), backbone.skips, collocate=True)
    weights = [1.0 + count for count in count_parameters(backbone)]
    try:
        placement = make_placement(default.kind.name, num_devices, 2)
        return make_plan(backbone, weighted_costs(backbone, weights), placement)
    except ValueError as error:
        raise UserError(f"--devices {num_devices}: {error}") from error


def _device() -> torch.device:
    return compute_device()


@contextmanager
def joined_job() -> Iterator[SamplingJob]:
    """Job of this rank's launcher, in whose process group it samples; left at the end."""
    job = Job()
    store = job.assemble(TIMEOUT_S)
    board = job.board()
    assert board is not None  # the ranks have met
    if torch.cuda.is_available():
        local_rank, number = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local_rank >= number:
            raise UserError(f"--devices: local rank {local_rank} has no GPU, {number} are visible")
        torch.cuda.set_device(local_rank)
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        store=store,
        rank=job.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    sampling = SamplingJob(job, board)
    try:
        yield sampling
    except PulseError:
        raise  # the others have failed, or wait for nothing
    except BaseException:
        sampling.release()
        raise
    finally:
        dist.destroy_process_group()
        job.part(_LEAVE_S)
