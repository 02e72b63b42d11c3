"""Job of a verification: plan, backbone, batches; read alike by the reference and all ranks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron_pulse.backbone.chain import COMPUTE, Backbone, TensorSpec
from megatron_pulse.backbone.shape_buckets import fields_of
from megatron_pulse.diffusion.objectives import predicted_mean
from megatron_pulse.diffusion.process_flags import ProcessChoice
from megatron_pulse.diffusion.process_from_flags import chosen_process
from megatron_pulse.integration.flags.pulse_options import PulseOptions
from megatron_pulse.integration.planning.run_plan import plan_of_file
from megatron_pulse.integration.training_data import DiffusionData
from megatron_pulse.planner.bubble_fill.filled_schedule import without_bubble_tasks
from megatron_pulse.planner.layout.embedder_choice import Policy
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.planner.program.plan import Plan
from megatron_pulse.planner.tune.plans.verify_figures import load_checked
from megatron_pulse.profile.trainable import trained_part
from megatron_pulse.runtime.stage import layer_seed
from megatron_pulse.runtime.tensor_settings import Batch
from model_specs import allow, load_backbone, trained_as

NUMBER, WEIGHT = "verify.number", "verify.weight"
"""Fields of a microbatch: its number in the step, and the factor of its loss."""
LOSS_SCALE = 1024.0
"""Factor for float16, which keeps gradients of small losses out of its subnormal numbers."""
_NOISE = 0.02


class Pass(NamedTuple):
    """Forward and backward of step ``step``, of all microbatches or of ``only`` one.

    With ``only``, the losses of the others are multiplied by zero. The optimizer steps afterwards
    if ``updates``.
    """

    step: int
    only: int | None = None
    updates: bool = True


@dataclass(frozen=True)
class VerifyJob:
    """Job of one verification; ``folder`` holds its batches and all results.

    ``plan`` is the plan's file. ``backbone`` and ``options`` define the chain. ``conditioning``
    says whether embedders are sent or replicated, as --pulse-conditioning. With ``resync`` every
    step except the first begins with the reference's weights and moments. If ``names`` are given,
    only gradients of these parameters are kept.
    """

    plan: str
    backbone: str
    options: Mapping[str, Any]
    dtype: str
    device: str
    seed: int
    timeout_s: float
    folder: str
    passes: tuple[Pass, ...]
    conditioning: Policy = "auto"
    resync: bool = False
    names: tuple[str, ...] | None = None

    def save(self) -> None:
        """Write the job for the ranks."""
        (Path(self.folder) / "job.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> VerifyJob:
        """Read a job that ``save`` wrote."""
        record = json.loads((folder / "job.json").read_text())
        names = None if record["names"] is None else tuple(record["names"])
        passes = tuple(Pass(*each) for each in record["passes"])
        return cls(**{**record, "names": names, "passes": passes})

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of parameters and activations."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def loss_scale(self) -> float:
        """Factor of losses before their backward."""
        return LOSS_SCALE if self.dtype == "float16" else 1.0

    def gradient_dtype(self, given: PlanFile) -> torch.dtype:
        """Dtype in which gradients are summed."""
        wide = given.state.gradient_bytes(self.dtype) == 4
        return torch.float32 if wide else self.torch_dtype

    def batches(self, step: int) -> list[dict[str, Tensor]]:
        """Microbatches of a step, of all replicas, each with its number."""
        loaded: list[dict[str, Tensor]] = torch.load(Path(self.folder) / f"batches_{step}.pt")
        return loaded

    def weighted(self, made: Pass) -> list[dict[str, Tensor]]:
        """Microbatches of a pass."""
        return [
            {**batch, WEIGHT: torch.tensor(float(made.only in (None, number)))}
            for number, batch in enumerate(self.batches(made.step))
        ]


def read_plan_of(job: VerifyJob) -> tuple[PlanFile, Backbone]:
    """Plan of the job's file, and its chain as the job names it."""
    given = load_checked(job.plan)
    allow(job.backbone)
    backbone = load_backbone(job.backbone, job.options)
    return given, trained_as(backbone, trained_part(given.backbone))


def planned(job: VerifyJob, given: PlanFile, backbone: Backbone) -> Plan:
    """Plan as it is verified, without the encoders among its bubble tasks."""
    plan = plan_of_file(given, backbone, job.conditioning)
    return replace(plan, schedules=tuple(map(without_bubble_tasks, plan.schedules)))


def write_batches(job: VerifyJob, given: PlanFile, backbone: Backbone, data: str | None) -> None:
    """Write the microbatches of every step of the job: the first of ``data``, or random numbers."""
    steps = 1 + max(made.step for made in job.passes)
    if data is None:
        made = _random_batches(job, given, backbone)
    else:
        options = PulseOptions(backbone=job.backbone, data=data)
        process = chosen_process(ProcessChoice())
        opened = DiffusionData(options, backbone, process, job.seed)
        plan = planned(job, given, backbone)
        made = opened.first_microbatches(plan, given.micro_batch_size, given.global_batch_size)
    for step in range(steps):
        batches = list[dict[str, Tensor]]()
        while sum(len(batch["positions"]) for batch in batches) < given.global_batch_size:
            batches.append(next(made))
        numbered = [{**batch, NUMBER: torch.tensor(m)} for m, batch in enumerate(batches)]
        torch.save(numbered, Path(job.folder) / f"batches_{step}.pt")


def _random_batches(
    job: VerifyJob, given: PlanFile, backbone: Backbone
) -> Iterator[dict[str, Tensor]]:
    """Endless microbatches of random numbers.

    Several shapes alternate: from step to step if they have plans of their own, else from
    microbatch to microbatch.
    """
    number = 0
    for step in itertools.count():
        shape_index, own = step % backbone.num_shapes, given
        if given.shapes:
            own = given.shapes[shape_index].plan
        for _ in range(own.num_microbatches * own.data):
            at = shape_index if given.shapes else number % backbone.num_shapes
            yield _random(backbone, at, own.micro_batch_size, job, number)
            number += 1


def _random(
    backbone: Backbone, shape_index: int, size: int, job: VerifyJob, number: int
) -> dict[str, Tensor]:
    """Microbatch of random numbers."""
    generator = torch.Generator().manual_seed(layer_seed(job.seed, f"microbatch {number}"))

    def made(name: str, spec: TensorSpec) -> Tensor:
        shape = spec.at(shape_index).full_shape(size)
        if name == "timesteps":
            return torch.rand(shape, generator=generator) * 1000
        kind = torch.float32 if spec.dtype == COMPUTE else getattr(torch, spec.dtype)
        if kind.is_floating_point:
            return torch.randn(shape, generator=generator).to(kind)
        most = backbone.num_classes or 2 if name == "labels" else 2
        values = torch.randint(0, most, shape, generator=generator)
        if values.ndim > 1:
            values[..., 0] = 1  # a mask keeps at least one position
        return values.to(kind)

    specs = {**fields_of(backbone), "target": backbone.output_spec}
    positions = torch.arange(number * size, (number + 1) * size)
    return {name: made(name, spec) for name, spec in sorted(specs.items())} | {
        "positions": positions
    }


class VerifiedLoss:
    """Training loss of a microbatch, in fp32, recorded by its number."""

    def __init__(self) -> None:
        self.found: dict[int, Tensor] = {}

    def __call__(self, prediction: Tensor, batch: Batch) -> Tensor:
        target = batch["target"].to(prediction.device)
        mean = predicted_mean(prediction, target.shape[1])
        loss = nn.functional.mse_loss(mean.float(), target.float())
        self.found[int(batch[NUMBER])] = loss.detach().cpu().clone()
        return loss * batch[WEIGHT].to(loss)


class TensorShard(NamedTuple):
    """Tensor-parallel shard of a parameter.

    The shard is part ``rank`` of ``size`` along ``dim``, of each of ``stride`` blocks.
    """

    dim: int
    stride: int
    rank: int
    size: int

    def of(self, tensor: Tensor) -> Tensor:
        """Shard of a whole ``tensor``."""
        parts = tensor.chunk(self.size * self.stride, self.dim)[self.rank :: self.size]
        return torch.cat(parts, self.dim)

    def whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the whole tensor with shards of ``shape``."""
        return tuple(n * self.size if i == self.dim else n for i, n in enumerate(shape))


@torch.no_grad()
def perturb(
    seed: int, named: Mapping[str, nn.Parameter], shares: Mapping[str, TensorShard]
) -> None:
    """Add small random numbers to all weights.

    Gates and projections initialised to zero would hide the gradients of everything behind them.
    """
    for name, parameter in named.items():
        if not parameter.is_floating_point():  # quantised
            continue
        generator = torch.Generator().manual_seed(layer_seed(seed, name))
        share = shares.get(name)
        shape = tuple(parameter.shape) if share is None else share.whole(parameter.shape)
        noise = torch.randn(shape, generator=generator)
        parameter += _NOISE * (noise if share is None else share.of(noise)).to(parameter)


class Digests:
    """Hash and norm of every layer's results for every microbatch.

    ``microbatch()`` is the number of the microbatch of the running forward; None in a
    recomputation.
    """

    def __init__(self, microbatch: Callable[[], int | None]) -> None:
        self.found: dict[tuple[str, int], tuple[str, float]] = {}
        self._microbatch = microbatch

    def watch(self, name: str, module: nn.Module) -> RemovableHandle:
        """Record the results of ``module``, the layer ``name``, until the hook is removed."""

        def note(layer: nn.Module, given: Any, results: Any) -> None:
            if (number := self._microbatch()) is not None and isinstance(results, tuple):
                self.found[name, number] = _digest(results)

        return module.register_forward_hook(note)


def _digest(results: tuple[Tensor, ...]) -> tuple[str, float]:
    digest, squares = xxhash.xxh3_128(), 0.0
    for tensor in results:
        values = tensor.detach().contiguous().cpu()
        digest.update(values.flatten().view(torch.uint8).numpy())
        squares += float(values.double().square().sum())
    return digest.hexdigest(), squares**0.5


@contextmanager
def deterministic() -> Iterator[None]:
    """Within, torch uses deterministic algorithms where it has them."""
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
