"""Rank of the plan's layout: the stages, schedule and gradient sums of a training.

``PulseSchedule`` runs on ``MegatronStage`` in Megatron's DistributedDataParallel, with Megatron's
finalize_model_grads afterwards, as in training. Gradients are all-reduced even if the plan's
optimizer is distributed, so that every rank has whole gradients.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.integration.loop.forward_backward import PulseSchedule
from megatron_pulse.integration.megatron.linear_wgrad import defer_wgrad
from megatron_pulse.integration.megatron.model import StageFloat16Module
from megatron_pulse.integration.megatron.stage import MegatronStage
from megatron_pulse.integration.verify.adam import AdamWeights, unrounded
from megatron_pulse.integration.verify.job import (
    Digests,
    Pass,
    TensorShard,
    VerifiedLoss,
    VerifyJob,
    deterministic,
    perturb,
    planned,
    read_plan_of,
)
from megatron_pulse.integration.verify.reference import PassResult
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.planner.program.device_program import Run
from megatron_pulse.planner.schedule.operations import OpType
from megatron_pulse.runtime.failure_board import default_board
from megatron_pulse.runtime.watchdog.progress import PROGRESS


@dataclass(frozen=True)
class RankPlace:
    """Position of a rank in the plan, and its shard of each divided parameter."""

    pipeline: int
    data: int
    tensor: int
    shares: Mapping[str, TensorShard]


def result_file(folder: Path, rank: int, number: int) -> Path:
    """Path of a rank's results of pass ``number``."""
    return folder / f"rank_{rank}_{number}.pt"


def place_file(folder: Path, rank: int) -> Path:
    """Path of a rank's ``RankPlace`` and first weights."""
    return folder / f"rank_{rank}.pt"


def run_rank(job: VerifyJob) -> None:
    """Run this rank's part of all passes; the default process group has the plan's ranks."""
    given, backbone = read_plan_of(job)
    with deterministic():
        rank = LayoutRank(job, given, backbone)
        for number, made in enumerate(job.passes):
            rank.run(made).save(result_file(Path(job.folder), dist.get_rank(), number))
        if rank.place.pipeline == 0:
            rank.schedule.close()


class LayoutRank:
    """Model chunks of one rank, as in training. All ranks create theirs together."""

    def __init__(self, job: VerifyJob, given: PlanFile, backbone: Backbone) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads
        from megatron.core.process_groups_config import ProcessGroupCollection

        self._job, self._given = job, given
        if not parallel_state.model_parallel_is_initialized():
            _join_groups(given)
        defer_wgrad()
        if given.sequence_parallel:
            backbone = backbone.divide_sequences(given.tensor)
        self._plan = planned(job, given, backbone)
        self._groups = ProcessGroupCollection.use_mpu_process_groups()
        self._device = torch.device(job.device)
        if self._device.type == "cuda":
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._config = _config_of(job, given)
        device = self._groups.pp.rank()
        own = self._plan.placement.stages_of_device(device)
        self._digests = Digests(self._microbatch)
        self._chunks: list[nn.Module] = []
        self._parameters: dict[str, nn.Parameter] = {}
        shares: dict[str, TensorShard] = {}
        frozen: dict[str, Tensor] = {}
        main: dict[str, Tensor] = {}
        for stage in map(self._stage, own):
            every = dict(stage.named_parameters())
            shares |= {n: s for n, p in every.items() if (s := self._share(p)) is not None}
            perturb(job.seed, every, shares)
            for name, parameter in every.items():
                kind = main if parameter.requires_grad else frozen
                kind[name] = unrounded(parameter)
            if given.tensor == 1:
                for name, layer in stage.named_layers():
                    self._digests.watch(name, layer)
            self._chunks.append(self._wrapped(stage))
            self._parameters |= {n: p for n, p in every.items() if p.requires_grad}
        self.place = RankPlace(device, self._groups.dp_cp.rank(), self._groups.tp.rank(), shares)
        self._weights = AdamWeights(main, frozen)
        place = {**vars(self.place), "shares": {n: tuple(s) for n, s in shares.items()}}
        record = {"place": place, "weights": {**main, **frozen}}
        torch.save(record, place_file(Path(job.folder), dist.get_rank()))
        self._finish(finalize_model_grads)
        self.loss = VerifiedLoss()
        self.schedule = PulseSchedule(self._plan, self.loss, default_board(), job.timeout_s)

    def run(self, made: Pass) -> PassResult:
        """Run one pass, and return the results of this rank's layers and parameters."""
        job = self._job
        if job.resync and made.step:
            self._take_weights(made.step)
        self.loss.found.clear()
        self._digests.found.clear()
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        every = job.weighted(made)
        self.schedule(
            data_iterator=iter(every[self.place.data :: self._given.data]),
            model=self._chunks,
            num_microbatches=self._given.num_microbatches,
            micro_batch_size=self._given.micro_batch_size,
        )
        gradients = {name: self._gradient(name, p) for name, p in self._parameters.items()}
        found = PassResult(dict(self.loss.found), dict(self._digests.found), gradients)
        if made.updates:
            self._weights.step(gradients, job.loss_scale)
            self._put_weights()
            found.weights = {n: p.detach().cpu().clone() for n, p in self._parameters.items()}
        if (names := job.names) is not None:
            found.gradients = {n: g for n, g in gradients.items() if n in names}
        return found

    def _gradient(self, name: str, parameter: nn.Parameter) -> Tensor:
        gradient: Tensor = parameter.main_grad
        return gradient.detach().cpu().clone()

    def _microbatch(self) -> int | None:
        """Number, among those of all replicas, of the running forward's microbatch."""
        event = PROGRESS.event
        if not isinstance(event, Run) or event.operation.kind is not OpType.FORWARD:
            return None
        return event.operation.microbatch * self._given.data + self.place.data

    def _stage(self, stage: int) -> MegatronStage:
        plan, dtype = self._plan, self._config.params_dtype
        self._config.params_dtype = torch.float32  # weights are drawn in fp32, then rounded
        try:
            return MegatronStage(
                self._config,
                plan.backbone,
                plan.routes,
                stage,
                self._job.seed,
                self._groups,
                activations=plan.activations,
                offloaded_weights=plan.offloaded_weights,
                token_slices=plan.token_slices,
            )
        finally:
            self._config.params_dtype = dtype

    def _share(self, parameter: nn.Parameter) -> TensorShard | None:
        if self._given.tensor == 1 or not getattr(parameter, "tensor_model_parallel", False):
            return None
        dim, stride = parameter.partition_dim, parameter.partition_stride
        return TensorShard(dim, stride, self._groups.tp.rank(), self._given.tensor)

    def _wrapped(self, stage: MegatronStage) -> nn.Module:
        """Stage in Megatron's wrappers, as in training."""
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.tensor_parallel import (
            set_defaults_if_not_set_tensor_model_parallel_attributes,
        )

        for parameter in stage.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        module: nn.Module = stage.to(self._device)
        if self._job.dtype != "float32":
            module = StageFloat16Module(self._config, module)
        how = DistributedDataParallelConfig(
            grad_reduce_in_fp32=self._job.gradient_dtype(self._given) == torch.float32,
            overlap_grad_reduce=self._given.overlap_grad_reduce,
        )
        wrapped: nn.Module = DistributedDataParallel(
            self._config, how, module, disable_bucketing=bool(self._chunks)
        )
        return wrapped

    def _finish(self, finalize: Any) -> None:
        """Set the functions by which Megatron reduces gradients, as its training loop does."""
        config = self._config
        config.finalize_model_grads_func = finalize
        if self._job.loss_scale != 1:
            config.grad_scale_func = lambda loss: loss * self._job.loss_scale
        if self._given.overlap_grad_reduce:
            config.no_sync_func = [chunk.no_sync for chunk in self._chunks]

    @torch.no_grad()
    def _put_weights(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(self._weights.main[name])

    def _take_weights(self, step: int) -> None:
        """Begin the step with the reference's weights, so that only its gradients are compared."""
        for path in sorted(Path(self._job.folder).glob(f"weights_{step}_*.pt")):
            theirs = AdamWeights.restored(torch.load(path, mmap=True))
            for kind in ("main", "first", "second"):
                mine, given = getattr(self._weights, kind), getattr(theirs, kind)
                for name in mine.keys() & given.keys():
                    share = self.place.shares.get(name)
                    mine[name].copy_(given[name] if share is None else share.of(given[name]))
        self._put_weights()


def _config_of(job: VerifyJob, given: PlanFile) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=given.pipeline,
        hidden_size=8 * given.tensor,
        num_attention_heads=given.tensor,
        tensor_model_parallel_size=given.tensor,
        pipeline_model_parallel_size=given.pipeline,
        pipeline_dtype=job.torch_dtype,
        sequence_parallel=given.sequence_parallel,
        use_cpu_initialization=True,
        transformer_impl=given.profile.transformer_impl,
        params_dtype=job.torch_dtype,
        bf16=job.dtype == "bfloat16",
        fp16=job.dtype == "float16",
        qk_layernorm=True,  # tensor-parallel ranks then sum its gradients
    )


def _join_groups(given: PlanFile) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    inside = given.rank_order == "tp-pp-dp"
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=given.tensor,
        pipeline_model_parallel_size=given.pipeline,
        order="tp-cp-ep-pp-dp" if inside else "tp-cp-ep-dp-pp",
        get_embedding_ranks=lambda ranks, *rest: [ranks[0]],
        get_position_embedding_ranks=lambda ranks, *rest: [ranks[0]],
    )
    model_parallel_cuda_manual_seed(1)


def main(folder: Path) -> int:
    """Run one rank, with RANK and WORLD_SIZE in the environment; failures are written to a file."""
    job = VerifyJob.load(folder)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options: dict[str, Any] = {}
    meeting = "store" if job.names is None else "store_again"
    if job.device == "cuda":
        torch.cuda.set_device(rank)
        options["device_id"] = torch.device("cuda", rank)
    else:
        torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "nccl" if job.device == "cuda" else "gloo",
            store=dist.FileStore(str(folder / meeting), world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=job.timeout_s),
            **options,
        )
        run_rank(job)
        dist.barrier()
    except Exception as error:
        traceback.print_exc()
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        (folder / f"failure_{rank}").write_text(f"{type(error).__name__}: {error}{notes}")
        return 1
    dist.destroy_process_group()
    return 0
