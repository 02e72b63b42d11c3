"""Forward-backward function that Megatron's training loop calls for every step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor, nn

from megatron_pulse.backbone.build_context import LayerContext
from megatron_pulse.backbone.layer_selection import tell_layers
from megatron_pulse.backbone.shape_buckets import shape_of
from megatron_pulse.diffusion.preference import PreferenceLoss
from megatron_pulse.integration.loop.diagnosis.nan_check import GradientCheck, losses_not_finite
from megatron_pulse.integration.loop.diagnosis.sdc_check import SdcCheck
from megatron_pulse.integration.loop.encoded_batches import EncodedBatches, EncodedChains, taken
from megatron_pulse.integration.loop.validation import ValidationLosses
from megatron_pulse.integration.loop_encoders import DeviceEncoders
from megatron_pulse.integration.megatron.fsdp import FullyShardedDataParallel
from megatron_pulse.integration.megatron.model import unwrap
from megatron_pulse.planner.program.plan import Plan, StepPlan
from megatron_pulse.runtime.encoding.encoding import Encoding
from megatron_pulse.runtime.executor import Executor
from megatron_pulse.runtime.failure_board import FailureBoard, PulseError
from megatron_pulse.runtime.measure.recorder import StepRecorder, StepTime, UtilizationMeter
from megatron_pulse.runtime.measure.tracer import TracedRun, Tracer
from megatron_pulse.runtime.p2p.transfers import Links
from megatron_pulse.runtime.parameters.replicated_embedders import Replicas
from megatron_pulse.runtime.pipeline import replicate
from megatron_pulse.runtime.predictions import ReturnedPredictions
from megatron_pulse.runtime.protocols import Carrier, SliceFunction
from megatron_pulse.runtime.self_conditioning import PredictionCarrier, SelfConditioning, joined
from megatron_pulse.runtime.tensor_settings import Batch, LossFunction, RunSettings, compute_device
from megatron_pulse.runtime.watchdog.progress import PROGRESS

IMPLICIT_ACCURACY = "implicit accuracy"
"""Name in logs of the share of pairs whose winner the model prefers more than the reference."""


@dataclass(frozen=True)
class TraceOptions:
    """Folder of ``trace.json``, and the traced steps, counted from 1 in this run."""

    folder: Path
    steps: range


@dataclass(frozen=True)
class _Call:
    """Arguments of one call by Megatron's loop, and the plan of its step.

    The plan is that of the step's shape, the ``bucket``, if shapes have plans of their own.
    """

    chunks: list[nn.Module]
    config: Any
    groups: Any
    plan: Plan
    num_microbatches: int
    forward_only: bool
    bucket: str = ""


class PulseSchedule:
    """Forward-backward function that runs ``plan`` instead of Megatron's pipeline schedules.

    Called with the keyword arguments of ``megatron.core.pipeline_parallel`` schedules. Returns one
    ``{"loss": tensor}`` per microbatch on every rank, averaged over data-parallel replicas. For a
    cascade these are ``{"base loss": tensor, "upper loss": tensor}``, by its chains.

    ``encoders(device)`` loads the encoders of a pipeline device if samples are encoded in the loop;
    a cascade has one such function per chain. With ``self_conditioning``, some training steps run
    an additional forward pass first, and evaluations never do. With ``preference``, which is then
    the loss, every step runs a forward pass of the reference first. ``verifier`` lets another rank
    repeat the computation of one rank and compares. ``validation`` takes the losses of samples in
    evaluations. With ``tracing``, the first pipeline (data- and
    tensor-parallel rank 0) is traced.

    If the plan's shapes have schedules of their own, a training step runs by that of its first
    microbatch. All microbatches of the step have its shape, on all replicas. Their number and size
    are then the schedule's, not Megatron's; Megatron counts the same samples.
    """

    def __init__(
        self,
        plan: Plan,
        loss: LossFunction | Mapping[str, LossFunction],
        board: FailureBoard,
        timeout_s: float,
        encoders: Callable[[int], DeviceEncoders]
        | Mapping[str, Callable[[int], DeviceEncoders]]
        | None = None,
        tracing: TraceOptions | None = None,
        self_conditioning: SelfConditioning | None = None,
        verifier: SdcCheck | None = None,
        validation: ValidationLosses | None = None,
        preference: PreferenceLoss | None = None,
    ) -> None:
        self._plan = plan
        self._loss = loss
        self._board = board
        self._timeout_s = timeout_s
        self._encoders = encoders
        self._encoding: Encoding | None = None
        self._encoded: EncodedBatches | EncodedChains | None = None
        self._tracing = tracing
        self._tracer: Tracer | None = None
        self._traced: dict[Plan, TracedRun] = {}
        self._self_conditioning = self_conditioning
        self._verifier = verifier
        self._validation = validation
        self._preference = preference
        self._predictions: PredictionCarrier | None = None
        self._returned = ReturnedPredictions(plan.backbone)
        self._executors: dict[tuple[Plan, int, bool, bool], Executor] = {}
        self._samplers: dict[int, Executor] = {}
        self._links: Links | None = None
        self._replicas: Replicas | None = None
        self._settings: RunSettings | None = None
        self._meter: UtilizationMeter | None = None
        self._last: _Call | None = None
        self.step_time: StepTime | None = None
        """Time of the last training step on this device; None if it was traced."""

    def __call__(
        self,
        *,
        data_iterator: Any,
        model: list[nn.Module] | nn.Module,
        num_microbatches: int,
        micro_batch_size: int,
        forward_only: bool = False,
        force_all_reduce: bool = False,
        collect_non_loss_data: bool = False,
        **unused: Any,
    ) -> list[dict[str, Tensor]]:
        if collect_non_loss_data:
            raise PulseError("collecting non-loss data is not supported by this schedule")
        chunks = model if isinstance(model, list) else [model]
        config = get_model_config(chunks[0])
        groups = get_attr_wrapped_model(chunks[0], "pg_collection")
        validation = self._validation if forward_only else None
        batches = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
        plan, bucket = self._plan, ""
        if plan.shapes and not forward_only:
            first = next(batches)
            whole = first if self._self_conditioning is None else joined(first)
            shape_index = shape_of(plan.backbone, whole)
            shape, plan = plan.shapes[shape_index], plan.at_shape(shape_index)
            num_microbatches, micro_batch_size = shape.num_microbatches, shape.micro_batch_size
            bucket = shape.name
            batches = _behind(first, batches)
        settings = self._settings = RunSettings(
            micro_batch_size=micro_batch_size,
            dtype=config.params_dtype,
            device=compute_device(),
            loss=self._loss if validation is None else validation.keeping(),
            grad_scale=config.grad_scale_func,
        )
        call = _Call(chunks, config, groups, plan, num_microbatches, forward_only, bucket)
        executor = self._executor(call)
        batches = self._ready(batches, self._encoded, call)
        recorder = meter = None
        if self._tracing is not None and not forward_only:
            recorder = self._begin_trace(call, settings)
        if recorder is None and not forward_only:
            meter = self._meter = self._meter or UtilizationMeter(settings.device)
            meter.start()
        with self._verified(call):
            losses = executor.run(
                batches, settings, forward_only=forward_only, recorder=recorder or meter
            )
        if self._encoded is not None and not forward_only:
            self._encoded.end()
        if recorder is not None and self._tracer is not None:
            self._tracer.end(recorder)
        if meter is not None:
            meter.stop()
        if not forward_only:
            self._last = call
            if config.finalize_model_grads_func is not None:
                config.finalize_model_grads_func(
                    chunks, None, pg_collection=groups, force_all_reduce=force_all_reduce
                )
        shared = self._share_losses(losses, call, settings.device)
        if validation is not None:
            owners = dict(zip(self._plan.backbone.parts or ("",), self._owners(), strict=True))
            validation.share(owners, groups, num_microbatches * micro_batch_size, settings.device)
        if not forward_only:  # reading the losses has synchronised with the GPU
            self.step_time = None if meter is None else meter.read()
        return shared

    def predict(
        self, chunks: list[nn.Module], noisy: Tensor, fields: Batch, micro_batch_size: int
    ) -> Tensor:
        """Predictions for ``noisy [n, ...]`` in fp32, in the place of ``noisy`` (collective).

        The rows, and those of ``fields``, are whole microbatches. All ranks of the pipeline pass
        the same fields; only the first stage's device reads ``noisy`` and gets the predictions.
        The others get zeros.
        """
        config = get_model_config(chunks[0])
        groups = get_attr_wrapped_model(chunks[0], "pg_collection")
        device = compute_device()
        settings = RunSettings(micro_batch_size, config.params_dtype, device, self._returned.keep)
        self._settings = self._settings or settings
        rows = {name: value.split(micro_batch_size) for name, value in fields.items()}
        batches: list[Batch] = [
            {"noisy": part, **{name: parts[i] for name, parts in rows.items()}}
            for i, part in enumerate(noisy.split(micro_batch_size))
        ]
        call = _Call(chunks, config, groups, self._plan, len(batches), True)
        executor = self._sampler(call)
        executor.run(self._returned.of(batches), settings, forward_only=True)
        if found := self._returned.taken():
            return torch.cat(found).to(noisy.device)
        return noisy.new_zeros((len(noisy), *self._plan.backbone.output_spec.shape))

    def not_finite(self, batches: Iterator[Batch], loss_scale: float | None = None) -> str:
        """Origin of the non-finite gradients of the last step, in words (collective).

        Empty if the gradients of each microbatch alone are finite. The step is repeated on
        ``batches``, which must be the same, with unchanged weights, and at ``loss_scale`` if given.
        No gradient is left.
        """
        call, encoded = self._last, self._encoded
        if call is None:
            raise PulseError("no training step has run")
        executor = self._executor(call)
        if encoded is not None:
            encoded = encoded.without_results()
        own = self._plan.placement.stages_of_device(call.groups.pp.rank())
        check = GradientCheck(dict(zip(own, call.chunks, strict=True)))
        settings = self._settings_or_fail()
        if loss_scale is not None:
            settings = replace(settings, grad_scale=lambda loss: loss * loss_scale)
        with contextlib.ExitStack() as stack:
            for chunk in call.chunks:
                if isinstance(chunk, FullyShardedDataParallel):
                    stack.enter_context(chunk.checking_each())
            executor.run(
                self._ready(batches, encoded, call),
                settings,
                recorder=check,
                reduces=False,
            )
        sharded = self._plan.fsdp is not None
        return check.found(None if sharded else call.groups.dp_cp.rank())

    def close(self) -> None:
        """Write the trace of a run that ended before the last step to trace."""
        if self._tracer is not None:
            self._tracer.close()
            if self._tracer.missed and dist.get_rank() == 0:
                print(f"warning: {self._tracer.missed} (--pulse-trace-steps)", flush=True)

    def _verified(self, call: _Call) -> contextlib.AbstractContextManager[None]:
        """Context of a step that may be verified."""
        if self._verifier is None or call.forward_only:
            return contextlib.nullcontext()
        group = call.groups.pp if call.groups.pp.size() > 1 else call.groups.dp_cp
        replicated = frozenset(self._plan.routes.replicated)
        return self._verifier.verifying(call.chunks, group, call.num_microbatches, replicated)

    def _ready(
        self, batches: Iterator[Batch], encoded: EncodedBatches | EncodedChains | None, call: _Call
    ) -> Iterator[Batch]:
        """Microbatches of a step, encoded, after its first forward pass, if there is one."""
        count, training = call.num_microbatches, not call.forward_only
        if encoded is not None:
            step = call.plan.step(count, forward_only=call.forward_only)
            batches = encoded.begin(batches, step.schedule, training=training)
        if self._preference is not None:
            return self._compared(self._preference, taken(batches, count), call)
        if (own := self._self_conditioning) is None:
            return batches
        if training and own.is_now:
            predicting = self._executor(replace(call, forward_only=True), predicts=True)
            return self._predicted(predicting, taken(batches, count))
        # Megatron's iterators have only __next__
        return (joined(next(batches)) for _ in range(count))

    def _compared(
        self, preference: PreferenceLoss, batches: list[Batch], call: _Call
    ) -> Iterator[Batch]:
        """``batches``, after a forward pass of the reference model."""
        executor = self._executor(replace(call, forward_only=True))
        preference.begin()
        with contextlib.ExitStack() as stack:
            for chunk in call.chunks:
                stack.enter_context(unwrap(chunk).as_reference())
            settings = replace(self._settings_or_fail(), loss=preference.keep)
            executor.run(iter(batches), settings, forward_only=True)
        return iter(batches)

    def _predicted(self, executor: Executor, batches: list[Batch]) -> Iterator[Batch]:
        """``batches`` with the predictions of a forward pass concatenated behind the samples."""
        assert self._predictions is not None  # set by _executor
        executor.run(
            self._predictions.of(batches),
            replace(self._settings_or_fail(), loss=self._predictions.keep),
            forward_only=True,
        )
        return self._predictions.joined()

    def _begin_trace(self, call: _Call, settings: RunSettings) -> StepRecorder | None:
        """Recorder of the step if it is traced (collective over the first pipeline)."""
        groups = call.groups
        if groups.dp_cp.rank() or groups.tp.rank():
            self._tracing = None
            return None
        assert self._tracing is not None
        if (traced := self._traced.get(call.plan)) is None:
            traced = self._traced[call.plan] = self._describe_traced(call, settings)
        if self._tracer is None:
            pipeline = groups.pp if groups.pp.size() > 1 else None
            steps, folder = self._tracing.steps, self._tracing.folder
            of = steps, traced, pipeline, settings.device, self._timeout_s, folder
            self._tracer = Tracer(*of)
        return self._tracer.begin(self._links, traced)

    def _describe_traced(self, call: _Call, settings: RunSettings) -> TracedRun:
        plan, groups = call.plan, call.groups
        layers, num_layers = plan.activations, len(plan.backbone.layers)
        sizes = {"tensor": groups.tp.size(), "data": groups.dp_cp.size()}
        run = {
            "micro_batch_size": str(settings.micro_batch_size),
            "dtype": str(settings.dtype).removeprefix("torch."),
            "recompute": tell_layers(layers.recompute, num_layers),
            "selective": tell_layers(layers.selective, num_layers),
        }
        if call.bucket:
            run["bucket"] = call.bucket
        return TracedRun(
            plan.digest(call.num_microbatches),
            plan.backbone.record,
            plan.step(call.num_microbatches).schedule,
            {"size": dist.get_world_size(), "pipeline": groups.pp.size(), **sizes},
            tuple(map(tuple, plan.summary()["stages"])),
            run,
        )

    def _executor(self, call: _Call, predicts: bool = False) -> Executor:
        plan, count = call.plan, call.num_microbatches
        key = (plan, count, call.forward_only, predicts)
        if key not in self._executors:
            device = call.groups.pp.rank()
            step = plan.step(count, forward_only=call.forward_only, predicts=predicts)
            self._connect(call)
            if self._encoded is None and self._encoders is not None:
                with PROGRESS.during("loading encoders", patient=True):
                    self._encoded = self._load_encoders(device)
            if predicts and self._predictions is None:
                assert self._self_conditioning is not None
                self._predictions = PredictionCarrier(
                    plan.backbone, self._self_conditioning.estimate, self._settings_or_fail()
                )
            tasks = self._encoding.workloads(step.schedule) if self._encoding is not None else ()
            carrier = self._predictions if predicts else self._encoding
            self._executors[key] = self._make_executor(call, step, tasks, carrier)
        return self._executors[key]

    def _sampler(self, call: _Call) -> Executor:
        """Executor of a pass whose predictions return to the first stage's device."""
        count = call.num_microbatches
        if count not in self._samplers:
            self._connect(call)
            step = self._plan.predicting_step(count)
            self._samplers[count] = self._make_executor(call, step, (), self._returned)
        return self._samplers[count]

    def _stages(self, call: _Call) -> dict[int, nn.Module]:
        own = self._plan.placement.stages_of_device(call.groups.pp.rank())
        return dict(zip(own, call.chunks, strict=True))

    def _connect(self, call: _Call) -> None:
        """Make the links of the pipeline, and the copies of replicated embedders, once."""
        pipeline = call.groups.pp
        if self._links is not None or pipeline.size() == 1:
            return
        # NCCL makes the group's communicator in its first call, which all ranks must join.
        here = self._settings_or_fail().device
        dist.all_reduce(torch.zeros(1, device=here), group=pipeline)
        self._links = Links(pipeline, self._board, self._timeout_s, here)
        if self._plan.routes.replicated:
            self._replicas = self._replicate(self._stages(call), pipeline.rank())

    def _make_executor(
        self,
        call: _Call,
        step: StepPlan,
        bubble_tasks: Sequence[SliceFunction],
        carrier: Carrier | None,
    ) -> Executor:
        plan, device, stages = self._plan, call.groups.pp.rank(), self._stages(call)
        if self._links is not None:
            self._links.connect(step.communication)
        return Executor(
            plan.backbone,
            plan.routes,
            step.schedule,
            step.programs[device],
            device,
            stages,
            self._links,
            self._board,
            _no_sync(call.config.no_sync_func, stages),
            self._replicas,
            bubble_tasks,
            carrier,
        )

    def _load_encoders(self, device: int) -> EncodedBatches | EncodedChains:
        where = self._settings_or_fail().device

        def load(of_device: Callable[[int], DeviceEncoders]) -> EncodedBatches:
            encoders = of_device(device)
            encoding = Encoding(encoders.components, where, device, self._links)
            return EncodedBatches(encoders, encoding)

        if isinstance(self._encoders, Mapping):
            return EncodedChains({chain: load(one) for chain, one in self._encoders.items()})
        assert self._encoders is not None
        encoded = load(self._encoders)
        self._encoding = encoded.encoding
        return encoded

    def _replicate(self, chunks: dict[int, nn.Module], device: int) -> Replicas:
        """Copies of the replicated embedders for this device's stages, some of which own them."""
        stages = {number: unwrap(chunk) for number, chunk in chunks.items()}
        chunk_of = {
            layer: chunk
            for number, chunk in chunks.items()
            for _, layer in stages[number].named_layers()  # modules() does not list derived layers
        }
        first = next(iter(stages.values()))
        context = LayerContext(first.config, first.pg_collection)
        assert self._links is not None
        return replicate(
            self._plan,
            device,
            stages,
            context,
            self._links,
            self._settings_or_fail(),
            lambda master: finish_gathering(chunk_of[master], master),
        )

    def _settings_or_fail(self) -> RunSettings:
        if self._settings is None:
            raise PulseError("no step has started")
        return self._settings

    def _owners(self) -> list[int]:
        """Pipeline device where each chain ends."""
        placement = self._plan.placement
        return [placement.device_of_stage[stage] for stage in placement.ends]

    def _share_losses(
        self, losses: list[Tensor], call: _Call, device: torch.device
    ) -> list[dict[str, Tensor]]:
        """Average the losses over replicas and send them to the whole pipeline.

        Megatron reads losses on the pipeline's last rank. Training with a preference loss adds the
        implicit accuracy.
        """
        owners, groups, num_microbatches = self._owners(), call.groups, call.num_microbatches
        names = [f"{chain} loss" for chain in self._plan.backbone.parts] or ["loss"]
        if self._preference is not None and not call.forward_only:
            owners, names = [*owners, owners[-1]], [*names, IMPLICIT_ACCURACY]
            losses = [*losses, *self._preference.accuracies()]
        shape = len(owners), num_microbatches
        values = torch.zeros(shape, dtype=torch.float64, device=device)
        mine = [chain for chain, owner in enumerate(owners) if owner == groups.pp.rank()]
        if mine:
            own = torch.stack(losses).double()
            dist.all_reduce(own, group=groups.dp_cp)
            values[mine] = own.view(len(mine), num_microbatches) / groups.dp_cp.size()
        if groups.pp.size() > 1:
            for chain, owner in enumerate(owners):
                source = dist.get_global_rank(groups.pp, owner)
                dist.broadcast(values[chain], src=source, group=groups.pp)
        if not math.isfinite(values.sum().item()):
            own = torch.stack(losses).view(len(mine), -1).tolist() if mine else []
            by_chain = dict(zip(mine, own, strict=True))
            amiss = [] if self._encoded is None else self._encoded.not_finite()
            raise PulseError(losses_not_finite(names, by_chain, groups.dp_cp.rank(), amiss))
        columns = values.float().unbind(1)
        return [dict(zip(names, column.unbind(), strict=True)) for column in columns]


def _behind(first: Batch, others: Iterator[Batch]) -> Iterator[Batch]:
    """``first``, then ``others``; Megatron's iterators have only __next__."""
    yield first
    while True:
        try:
            yield next(others)
        except StopIteration:
            return


def _no_sync(
    no_sync_func: Any, stages: dict[int, nn.Module]
) -> dict[int, Callable[[], contextlib.AbstractContextManager[object]]]:
    """Map each stage to its ``no_sync``; Megatron sets one function, a list by chunk, or none."""
    if no_sync_func is None:
        return {}
    functions = no_sync_func if isinstance(no_sync_func, list) else [no_sync_func] * len(stages)
    return dict(zip(stages, functions, strict=True))


def finish_gathering(chunk: nn.Module, module: nn.Module) -> None:
    """Wait until the parameters of ``module`` in ``chunk`` are gathered.

    With overlapped parameter gathering, Megatron's DDP waits in a module's forward. Code that reads
    parameters before any forward has to wait itself, in the same way.
    """
    if not getattr(chunk, "remove_forward_pre_hook_handles", None):
        return
    for part in module.modules():
        chunk._make_forward_pre_hook()(part)
