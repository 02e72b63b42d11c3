"""Reference step of a plan in one process: a plain loop over layers and microbatches.

Neither the executor nor Megatron runs here, so that errors of either, in any layout, are seen. If
run by stages, only one stage is in memory at a time::

  forward    stage 0 on every microbatch, stage 1, ...       a stage's results are kept
  backward   the last stage on every microbatch, ... 0       each recomputed from its inputs

Otherwise the whole chain is one stage, and nothing is recomputed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron_pulse.backbone.cast_floats import cast_floats
from megatron_pulse.backbone.chain import COMPUTE, Backbone, TensorSpec
from megatron_pulse.backbone.dropout_key import first_position
from megatron_pulse.backbone.shape_buckets import own_fields, sample_field, shape_of
from megatron_pulse.errors import UserError
from megatron_pulse.integration.verify.adam import AdamWeights, unrounded
from megatron_pulse.integration.verify.job import (
    Digests,
    Pass,
    VerifiedLoss,
    VerifyJob,
    perturb,
)
from megatron_pulse.planner.layout.placement import Partition, make_placement
from megatron_pulse.planner.layout.routes import Payload, Routes, batch_fields_of, trace_routes
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.profile.measurement.layer_context import meta_context, some_process_group
from megatron_pulse.runtime.parameters.replicated_embedders import moves_gradient
from megatron_pulse.runtime.stage import Stage, summed

type _Key = tuple[int, Payload, str, int]
"""Key of a stage's result: stage, kind, name, microbatch."""


class TimeLimitReached(UserError):
    """Expiry of the verification's time limit."""


@dataclass
class PassResult:
    """Results of one pass of the reference or of a rank."""

    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[tuple[str, int], tuple[str, float]] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the results to ``path``."""
        torch.save(vars(self), path)

    @classmethod
    def load(cls, path: Path) -> PassResult:
        """Read a file of ``save``; tensors are read when they are used."""
        return cls(**torch.load(path, mmap=True))


class Reference:
    """Reference computation of a job's passes, one stage after another if ``by_stages``.

    ``progress`` is called for every microbatch of a stage. Raises TimeIsUp after ``deadline``, by
    ``time.monotonic``.
    """

    def __init__(
        self,
        job: VerifyJob,
        given: PlanFile,
        backbone: Backbone,
        by_stages: bool,
        deadline: float,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._job, self._given, self._backbone = job, given, backbone
        self._device = torch.device(job.device)
        whole = Partition(make_placement("sequential", 1, 1), (0, len(backbone.layers)))
        self._routes: Routes = trace_routes(backbone, given.partition if by_stages else whole)
        self._deadline, self._progress = deadline, progress
        self._folder = Path(job.folder)
        self._loss = VerifiedLoss()
        self._number: int | None = None
        self._digests = Digests(lambda: self._number)
        self._computed = {edge.name: edge.spec for edge in backbone.conditioning}
        self._hooks: list[RemovableHandle] = []
        self.layer_of: dict[str, str] = {}
        """Layer of each trained parameter, in chain order."""

    @property
    def stages(self) -> range:
        """Numbers of the stages."""
        return range(self._routes.partition.placement.num_stages)

    def run(self, made: Pass, prefix: str = "reference") -> None:
        """Run one pass, and write its results and the weights after it."""
        self._loss.found.clear()
        self._digests.found.clear()
        self._kept: dict[_Key, Tensor] = {}
        self._gradients: dict[_Key, Tensor] = {}
        every = self._job.weighted(made)
        numbers = [m for m in range(len(every)) if made.only in (None, m)]
        last = self.stages[-1]
        for stage in self.stages[:-1]:
            with self._built(stage, made.step) as (module, _), torch.no_grad():
                for number in numbers:
                    self._forward(module, stage, number, every[number])
        for stage in reversed(self.stages):
            with self._built(stage, made.step) as (module, weights):
                sums = self._sums(module)
                for number in numbers:
                    self._backward(module, stage, number, every[number], len(every))
                found = PassResult(gradients=sums)
                if stage == last:
                    found.losses = dict(self._loss.found)
                if made.updates:
                    weights.step(sums, self._job.loss_scale)
                    dtype = self._job.torch_dtype
                    found.weights = {n: w.to(dtype) for n, w in weights.main.items()}
                    self._save_weights(stage, made.step + 1, weights)
                found.outputs = dict(self._digests.found)
                self._digests.found.clear()
                if (names := self._job.names) is not None:
                    found.gradients = {n: g for n, g in sums.items() if n in names}
                found.save(self._folder / f"{prefix}_{stage}.pt")

    def keep_only(self, names: tuple[str, ...]) -> None:
        """Write only the gradients of these parameters from now on."""
        self._job = replace(self._job, names=names)

    @contextmanager
    def _built(self, stage: int, step: int) -> Iterator[tuple[Stage, AdamWeights]]:
        """Build a stage with its weights before ``step``."""
        with some_process_group():
            context = meta_context("float32", 1, self._given.profile.transformer_impl)
            context.config.perform_initialization = True
            of = self._backbone, self._routes, stage, self._job.seed, context
            module = Stage(*of, token_slices=self._given.token_slices)
            named = {n: p for n, p in module.named_parameters() if p.requires_grad}
            self._note_layers(module, named)
            path = weights_file(self._folder, stage, step)
            every = dict(module.named_parameters())
            if path.exists():  # a factory may return a module a second time, already perturbed
                weights = AdamWeights.restored(torch.load(path))
                with torch.no_grad():
                    for name, value in {**weights.main, **weights.frozen}.items():
                        every[name].copy_(value)
            else:
                perturb(self._job.seed, every, {})
                values = {n: unrounded(p) for n, p in every.items()}
                frozen = {n: values.pop(n) for n in every if n not in named}
                weights = AdamWeights(values, frozen)
                self._save_weights(stage, 0, weights)
            try:
                yield cast_floats(module, self._job.torch_dtype, self._device), weights
            finally:
                for hook in self._hooks:
                    hook.remove()
                self._hooks.clear()
        del module, weights
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _save_weights(self, stage: int, step: int, weights: AdamWeights) -> None:
        torch.save(weights.record(), weights_file(self._folder, stage, step))

    def _note_layers(self, module: Stage, named: Mapping[str, nn.Parameter]) -> None:
        own = layers_of(module)
        self.layer_of.update((name, own[id(p)]) for name, p in named.items())

    def _sums(self, module: Stage) -> dict[str, Tensor]:
        """Sums into which backwards from now on accumulate their gradients."""
        dtype = self._job.gradient_dtype(self._given)
        sums: dict[str, Tensor] = {}
        for name, layer in module.named_layers():
            self._hooks.append(self._digests.watch(name, layer))
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                sums[name] = torch.zeros_like(parameter, dtype=dtype)
                adder = parameter.register_post_accumulate_grad_hook(moves_gradient(sums[name]))
                self._hooks.append(adder)
        return sums

    def _forward(
        self, module: Stage, stage: int, number: int, batch: Mapping[str, Tensor]
    ) -> tuple[dict[_Key, Tensor], dict[_Key, Tensor], Tensor | None]:
        """(inputs that want a gradient, results, loss at a chain's end) of a stage's forward.

        Without gradients, the results are kept for later stages.
        """
        if time.monotonic() > self._deadline:
            raise TimeLimitReached(
                f"the reference reached the time limit ({self._job.timeout_s:g} s, --timeout-s) in "
                f"stage {stage}, microbatch {number}"
            )
        routes, placement = self._routes, self._routes.partition.placement
        head = self._backbone.layers[routes.partition.cuts[stage]]
        taken: dict[_Key, Tensor] = {}
        for to in routes.given_to(stage):
            if to.payload is not Payload.CONDITIONING:
                key: _Key = (to.source, to.payload, to.name, number)
                taken[key] = self._leaf(self._kept[key], to.needs_grad)
        for edge in routes.conditioning_into(stage):
            key = edge.source_stage, Payload.CONDITIONING, edge.name, number
            taken[key] = self._leaf(summed(self._kept[key]), edge.needs_grad)
        fields = {
            name: self._cast(batch[name], self._backbone.batch_fields[name])
            for name in batch_fields_of(self._backbone, routes, stage)
        }
        boundary = tuple(t for (_, kind, _, _), t in taken.items() if kind is Payload.BOUNDARY)
        if placement.before[stage] is None:
            boundary = (self._cast(batch[sample_field(head)], head.inputs[0]),)
        skips = {name: t for (_, kind, name, _), t in taken.items() if kind is Payload.SKIP}
        fields |= {n: t for (_, kind, n, _), t in taken.items() if kind is Payload.CONDITIONING}
        self._number = number
        outputs, pushed, provided = module(
            boundary,
            skips,
            fields,
            shape_index=shape_of(self._backbone, batch),
            position=first_position(self._backbone, head.chain, batch),
        )
        self._number = None
        given: dict[_Key, Tensor] = {}
        given |= {(stage, Payload.SKIP, name, number): t for name, t in pushed.items()}
        given |= {(stage, Payload.CONDITIONING, name, number): t for name, t in provided.items()}
        loss = None
        if placement.after[stage] is None:
            loss = self._loss(outputs[0], own_fields(self._backbone, head.chain, batch))
        else:
            given |= {(stage, Payload.BOUNDARY, str(i), number): t for i, t in enumerate(outputs)}
        for key, tensor in () if torch.is_grad_enabled() else given.items():
            _, payload, name, _ = key
            if payload is Payload.CONDITIONING:
                tensor = self._cast(tensor, self._computed[name])
            self._kept[key] = tensor.detach().cpu()
        return {key: t for key, t in taken.items() if t.requires_grad}, given, loss

    def _backward(
        self, module: Stage, stage: int, number: int, batch: Mapping[str, Tensor], count: int
    ) -> None:
        """Forward and backward of a stage; gradients of its inputs are kept for their sources."""
        taken, given, loss = self._forward(module, stage, number, batch)
        if loss is not None:
            (loss / count * self._job.loss_scale).backward()
        edges = [
            (tensor, self._gradients.pop(key).to(tensor))
            for key, tensor in given.items()
            if tensor.requires_grad and key in self._gradients
        ]
        if edges:
            torch.autograd.backward(*map(list, zip(*edges, strict=True)))
        for key, leaf in taken.items():
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            before = self._gradients.get(key)
            self._gradients[key] = gradient.cpu() + (0 if before is None else before)
        self._progress()

    def _leaf(self, tensor: Tensor, needs_grad: bool) -> Tensor:
        tensor = tensor.to(self._device).detach()
        return tensor.requires_grad_(needs_grad and torch.is_grad_enabled())

    def _cast(self, tensor: Tensor, spec: TensorSpec) -> Tensor:
        compute = self._job.torch_dtype
        dtype = compute if spec.dtype == COMPUTE else getattr(torch, spec.dtype)
        return tensor.to(self._device, dtype)


def weights_file(folder: Path, stage: int, step: int) -> Path:
    """Path of the reference's weights of a stage before a step."""
    return folder / f"weights_{step}_{stage}.pt"


def layers_of(stage: Stage) -> dict[int, str]:
    """Name of each parameter's layer, by the parameter's identity."""
    return {id(p): name for name, layer in stage.named_layers() for p in layer.parameters()}
