"""A plan on torch's process groups, for a training loop of one's own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_pulse.backbone.chain import Backbone, TensorSpec
from megatron_pulse.backbone.check import BackboneError
from megatron_pulse.backbone.context import LayerContext
from megatron_pulse.backbone.derived.from_module import buffers_of, tied_names
from megatron_pulse.backbone.derived.refused.telling import alike
from megatron_pulse.backbone.derived.weights.first import altered
from megatron_pulse.backbone.generators import generators_kept
from megatron_pulse.backbone.published import torn, untied
from megatron_pulse.backbone.shapes import ShapeError, fields_of, shape_of
from megatron_pulse.faults import told, wrong_count, wrong_kinds
from megatron_pulse.planner.layout.routes import Payload, batch_fields_of
from megatron_pulse.planner.step.plan import Plan
from megatron_pulse.runtime.called import Recorder, Workload
from megatron_pulse.runtime.encoding.encoding import Encoding, Frozen
from megatron_pulse.runtime.executor import Executor
from megatron_pulse.runtime.failures import PulseError, default_board
from megatron_pulse.runtime.messages.links import Links
from megatron_pulse.runtime.modules import attributes_kept, buffers_kept, built_elsewhere, unsound
from megatron_pulse.runtime.parameters.grad_norm import (
    clip,
    combined,
    norm_of,
    require_finite,
    require_max_norm,
    require_norm_type,
)
from megatron_pulse.runtime.parameters.replicas import Replicas
from megatron_pulse.runtime.settings import Batch, LossFunction, RunSettings
from megatron_pulse.runtime.stage import Stage, summed


class Pipeline:
    """This process's stages of ``plan``, and steps that run on those of all.

    Process i of ``group`` (default: all processes of the job, or this one where it is alone) is
    pipeline device i. ``loss(prediction, batch)`` is called where the chain ends; of a cascade it
    may be one for each chain by name, and is given the chain's own fields. A layer's initial
    weights depend on ``seed`` and its name alone. ``context`` is what layers are built with, which
    those of ``model_specs`` need, ``fillers`` what the plan's fillers run. All processes call it.
    Raises PulseError for arguments of other kinds, if the plan is for another number of processes,
    and where layers of other processes could not be built.
    """

    def __init__(
        self,
        plan: Plan,
        loss: LossFunction | Mapping[str, LossFunction],
        micro_batch_size: int,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        group: dist.ProcessGroup | None = None,
        context: LayerContext | None = None,
        fillers: Sequence[Workload] = (),
        timeout_s: float = 600.0,
    ) -> None:
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        given: list[tuple[str, object, type, str]] = [
            ("plan", plan, Plan, ", as make_plan returns one"),
            ("seed", seed, int, ""),
            ("dtype", dtype, torch.dtype, ""),
        ]
        if group is not None:
            given.append(("group", group, dist.ProcessGroup, ""))
        if context is not None:
            given.append(("context", context, LayerContext, ""))
        faults = [*wrong_kinds(given), *wrong_count("micro_batch_size", micro_batch_size)]
        faults += _loss_faults(loss, plan.backbone.parts if isinstance(plan, Plan) else None)
        if faults:
            raise PulseError(told("Pipeline", faults))
        num_processes = 1 if group is None else group.size()
        if num_processes != plan.placement.num_devices:
            raise PulseError(
                f"the plan is for {plan.placement.num_devices} devices, the group has "
                f"{num_processes} processes: start as many, or make a plan for these"
            )
        self.plan = plan
        self.rank = 0 if group is None else group.rank()
        self._group = group if num_processes > 1 else None
        self._context = context
        self._settings = RunSettings(micro_batch_size, dtype, torch.device(device), loss)
        self._board = default_board() if group is not None else None
        fault: Exception | None = None
        try:
            self.stages = {
                s: Stage(
                    plan.backbone,
                    plan.routes,
                    s,
                    seed,
                    context,
                    plan.recompute,
                    plan.offload,
                    plan.selective,
                ).to(device, dtype)
                for s in plan.placement.stages_of_device(self.rank)
            }
            _require_sound(plan, self.stages, context)
        except Exception as error:
            fault = error
        self._require_none(fault, "building layers")
        self.links: Links | None = None
        if self._group is not None and self._board is not None:
            self.links = Links(self._group, self._board, timeout_s, self._settings.device)
        self._replicas: Replicas | None = None
        if self.links is not None and plan.routes.replicated:
            self._replicas = replicate(
                plan, self.rank, self.stages, context, self.links, self._settings
            )
        self._fillers = tuple(fillers)
        self._encoding: Encoding | None = None
        self._executors: dict[tuple[int, bool], Executor] = {}
        self._tried = False

    def encode_with(self, components: Sequence[Frozen]) -> Encoding:
        """Have frozen components encode samples: in front of a step (``front``), or by the fillers
        of the plan's schedule while another one runs (``fill``, the step, ``filled``)."""
        self._encoding = Encoding(components, self._settings.device, self.rank, self.links)
        self._executors.clear()
        return self._encoding

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of this process's layers, by their layers' names."""
        for stage in self.stages.values():
            yield from stage.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of this process's layers, for its optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the gradients of all processes' layers, as one number on each.

        In fp32, or fp64 where parameters are. Frozen parameters have none, and replicated embedders
        count once. The bits are the same at every layout. All processes call it. Raises PulseError
        for a ``norm_type`` that is neither positive nor inf.
        """
        return self._norms(norm_type)[0]

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale all gradients so that their ``grad_norm`` is at most ``max_norm``; returns what it
        was.

        As torch's ``clip_grad_norm_`` does on one process, which on several would scale the layers
        of each by a norm of their own. All processes call it, with the same arguments. With
        ``error_if_nonfinite`` raises PulseError that names the layers whose gradients are not
        finite, on all processes, and scales nothing.
        """
        most = require_max_norm(max_norm)
        total, norms = self._norms(norm_type)
        if error_if_nonfinite:
            require_finite(total, norms, [layer.name for layer in self.plan.backbone.layers])
        clip(self.parameters(), most, total)
        return total

    def _norms(self, norm_type: float) -> tuple[Tensor, Tensor]:
        """The norm of all gradients, and in fp64 that of each layer's."""
        kind, device = require_norm_type(norm_type), self._settings.device
        layers = self.plan.backbone.layers
        own = dict(pair for stage in self.stages.values() for pair in stage.named_layers())
        none = torch.zeros((), dtype=torch.float64, device=device)
        norms = torch.stack(
            [
                norm_of(own[layer.name].parameters(), kind, device) if layer.name in own else none
                for layer in layers
            ]
        )
        if self.links is not None:
            self.links.total(norms, "the norms of all layers' gradients")  # one term is not 0
        wide = torch.promote_types(self._settings.dtype, torch.float32)
        return combined(norms, kind).to(wide), norms

    def state_dict(self) -> dict[str, Tensor]:
        """The weights of this process's layers; those of all processes make the whole model."""
        return {k: v for stage in self.stages.values() for k, v in stage.state_dict().items()}

    def full_state_dict(self, to: int | None = None) -> dict[str, Tensor]:
        """The weights and buffers of all layers, in the memory of the host: what ``state_dict``
        returns on one process.

        On every process, or on process ``to`` alone; the others get nothing. ``load_state_dict``
        takes it at any layout. All processes call it; one tensor at a time travels. Raises
        PulseError if there is no process ``to``.
        """
        placement = self.plan.placement
        if to is not None and to not in range(placement.num_devices):
            raise PulseError(f"to must be a process from 0 to {placement.num_devices - 1}, is {to}")
        whole: dict[str, Tensor] = {}
        for number, owner in enumerate(placement.device_of_stage):
            own = self.stages[number].state_dict() if owner == self.rank else {}
            for name in self._told(list(own), owner, "names of weights"):
                value = own[name].to("cpu", copy=True) if owner == self.rank else None
                value = self._told(value, owner, name)
                if to in (None, self.rank) and value is not None:
                    whole[name] = value
        return whole

    def _told[T](self, value: T, process: int, what: str) -> T:
        """Broadcast that process's ``value`` to all."""
        return value if self.links is None else self.links.tell(value, process, what)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the weights of this process's layers from those of a whole model.

        Of a derived chain the ``state_dict`` of its module will do: tied weights under all their
        names and buffers are compared. Raises PulseError that lists what is missing, unknown, of
        another shape or of other values than these, and for what maps
        no names to tensors; nothing is loaded then.
        """
        _require_weights(state)
        tied, constants = tied_names(self.plan.backbone), buffers_of(self.plan.backbone)
        given = state
        state = {k: v for k, v in untied(given, tied).items() if k not in constants}
        own = self.state_dict()
        layers = self.plan.backbone.layers
        prefixes = tuple(layer.prefix for layer in layers if not layer.qualified)
        qualified = built_elsewhere([la for la in layers if la.qualified], self._context)
        names = {name for _, module in qualified for name, _ in module.named_parameters()}
        faults = [f"{name} is missing" for name in own if name not in state]
        faults += [
            f"{name} belongs to no layer"
            for name in state
            if not name.startswith(prefixes) and name not in names
        ]
        faults += [
            f"{name} is {tuple(given[name].shape)}, not {tuple(value.shape)}"
            for name, value in {**own, **constants}.items()
            if name in given and given[name].shape != value.shape
        ]
        here = {name for s in self.stages.values() for name, _ in s.named_layers()}
        mine = tuple(la.prefix for la in layers if la.name in here and not la.qualified)
        faults += [
            f"{name} is nothing that its layer has"
            for name in state
            if name.startswith(mine) and name not in own
        ]
        if faults := faults or [*torn(given, tied), *altered(constants, given)]:
            raise PulseError(told("weights to load", faults))
        for stage in self.stages.values():
            stage.load_state_dict({name: state[name] for name in stage.state_dict()})
        if self._replicas is not None:
            self._replicas.load_buffers(state)

    def step(
        self,
        batches: Sequence[Batch],
        *,
        everywhere: bool = False,
        recorder: Recorder | None = None,
    ) -> list[Tensor]:
        """Forward and backward of one microbatch for each of ``batches``; all processes call it.

        Every process gives the same batches: ``noisy`` is what the first layer takes, the rest is
        for the loss and for layers that use fields of the batch. In a chain of several shapes each
        microbatch has one of them, by the shapes of its fields. Gradients of the mean loss are
        added to those of the parameters. Returns the microbatches' losses, ``everywhere`` or only
        where the chain ends (of a cascade, one chain's after another's). Raises PulseError if the
        processes have different plans or numbers of batches, if no layer is trained, and with
        everything that is missing in the batches or of another shape, or dtype in ``noisy``.
        """
        if not any(layer.trained for layer in self.plan.backbone.layers):
            raise PulseError(
                f"no parameter of {self.plan.backbone.name} asks for a gradient: evaluate() runs "
                "it without"
            )
        self._require_fit(batches)
        executor = self.executor(len(batches))
        losses = executor.run(iter(batches), self._settings, recorder=recorder)
        return self._spread(losses) if everywhere else losses

    def evaluate(self, batches: Sequence[Batch], *, everywhere: bool = False) -> list[Tensor]:
        """The losses alone, as ``step`` returns them, without gradients.

        Layers run in the mode that they are in (``train``); their buffers stay as they are.
        """
        self._require_fit(batches)
        executor = self.executor(len(batches), forward_only=True)
        losses = executor.run(iter(batches), self._settings, forward_only=True)
        return self._spread(losses) if everywhere else losses

    def train(self, mode: bool = True) -> None:
        """Put this process's layers in the mode of training, or of evaluation (``False``)."""
        copies = [] if self._replicas is None else self._replicas.modules()
        for module in (*self.stages.values(), *copies):
            module.train(mode)

    def _spread(self, losses: list[Tensor]) -> list[Tensor]:
        """The losses of all chains, on every process."""
        placement, device = self.plan.placement, self._settings.device
        ends = [placement.device_of_stage[stage] for stage in placement.ends]
        count = len(losses) // max(ends.count(self.rank), 1)
        own = iter(losses)
        found: list[Tensor] = []
        for owner in ends:
            mine = [next(own).cpu() for _ in range(count)] if owner == self.rank else []
            found += [loss.to(device) for loss in self._told(mine, owner, "the losses")]
        return found

    def executor(self, num_microbatches: int, *, forward_only: bool = False) -> Executor:
        """What runs a step of that many microbatches; all processes call it."""
        key = num_microbatches, forward_only
        if key not in self._executors:
            self._require_one_call(num_microbatches, forward_only)
            if not self._tried:
                self._try_layers()
            step = self.plan.step(num_microbatches, forward_only=forward_only)
            self._require_one_plan(num_microbatches)
            if self.links is not None:
                self.links.connect(step.communication)
            self._executors[key] = Executor(
                self.plan.backbone,
                self.plan.routes,
                step.schedule,
                step.programs[self.rank],
                self.rank,
                self.stages,
                self.links,
                self._board,
                replicas=self._replicas,
                fillers=self._fillers
                if self._encoding is None
                else self._encoding.workloads(step.schedule),
                carrier=self._encoding,
            )
        return self._executors[key]

    def _require_fit(self, batches: Sequence[Batch]) -> None:
        if not isinstance(batches, Sequence) or isinstance(batches, Tensor | str):
            raise PulseError(f"batches must be a list of mappings, is {type(batches).__name__}")
        faults = [
            f"microbatch {m}: {fault}"
            for m, batch in enumerate(batches)
            for fault in _misfits(self.plan.backbone, batch, self._settings)
        ]
        if faults or not batches:
            raise PulseError(told("batches", faults or ["a step needs at least one"]))

    def _try_layers(self) -> None:
        """Run every layer once: what fails does so before time is spent on a schedule, and on the
        process that has the layer."""
        fault: Exception | None = None
        found: dict[int, list[str]] = {}
        try:
            for which in range(self.plan.backbone.num_shapes):
                for number, stage in self.stages.items():
                    try:
                        _run_on_zeros(self.plan, stage, self._settings, which)
                    except BackboneError as error:
                        found.setdefault(number, error.faults)
                    except Exception as error:
                        error.add_note(f"pipeline device {self.rank}, trying stage {number}")
                        raise
        except Exception as error:
            fault = error
        self._require_none(fault, "trying layers on zeros")
        if self._group is not None:
            every = self._gathered(found, "trying layers on zeros")
            found = {number: faults for one in every for number, faults in one.items()}
        if found:
            faults = (fault for number in sorted(found) for fault in found[number])
            raise BackboneError(self.plan.backbone.name, list(alike(faults)))
        self._tried = True

    def _require_none(self, fault: Exception | None, doing: str) -> None:
        """Raise ``fault``, or say where another process has one and which."""
        said = None if fault is None else f"{type(fault).__name__}: {fault}"
        everybody = self._gathered(said, doing) if self._group is not None else []
        if fault is not None:
            raise fault
        if faults := [f"process {i}: {why}" for i, why in enumerate(everybody) if why is not None]:
            raise PulseError(told(doing, faults))

    def _gathered(self, own: object, doing: str) -> list[Any]:
        """What each process gives for ``own``."""
        assert self._group is not None and self._board is not None
        found: list[Any] = [None] * self._group.size()
        try:
            dist.all_gather_object(found, own, self._group)
        except RuntimeError as error:
            first = self._board.first_failure(wait_s=0.5)
            raise PulseError(
                f"{doing}, another process closed the connection (it died or failed)\n"
                f"first failure in this job: {first or error}"
            ) from error
        return found

    def _require_one_call(self, num_microbatches: int, forward_only: bool) -> None:
        """Raise PulseError where processes call different steps, before one is planned for them."""
        if self._group is None:
            return
        own = f"{'evaluate' if forward_only else 'step'} {num_microbatches} microbatch(es)"
        first, *others = self._gathered(own, "comparing steps")
        if faults := [
            f"process {i} is to {call}, process 0 to {first}"
            for i, call in enumerate(others, start=1)
            if call != first
        ]:
            raise PulseError(told("all processes make the same call with the same batches", faults))

    def _require_one_plan(self, num_microbatches: int) -> None:
        if self._group is None:
            return
        digests = self._gathered(self.plan.digest(num_microbatches), "comparing plans")
        if other := [i for i, digest in enumerate(digests) if digest != digests[0]]:
            raise PulseError(
                f"processes {', '.join(map(str, other))} have another plan than process 0 for "
                f"{num_microbatches} microbatches: measure and plan on one, and send the plan"
            )


def _loss_faults(loss: object, chains: Collection[str] | None) -> Iterator[str]:
    """Why this is no loss of a backbone of these chains (empty: one that is no cascade; None: they
    are not known)."""
    if not isinstance(loss, Mapping):
        if not callable(loss):
            yield (
                f"loss must be a function of prediction and batch, is {loss!r:.60}"
                + " (or one for each chain by name)" * bool(chains)
            )
        return
    yield from (
        f"loss: that of chain {name!r} must be a function of prediction and batch, is {own!r:.60}"
        for name, own in loss.items()
        if not callable(own)
    )
    if chains is not None and set(loss) != set(chains):
        there = f"are {', '.join(chains)}" if chains else "is but one: give a function"
        yield f"loss is given for chains {', '.join(map(str, loss)) or '(none)'}; there {there}"


def _require_weights(state: object) -> None:
    """Raise PulseError unless ``state`` maps names to tensors."""
    what = "weights to load must map names to tensors, as full_state_dict returns them"
    if isinstance(state, str | PathLike):
        path = str(state)
        raise PulseError(
            f"{what}, not name the file {path!r}: load_state_dict(torch.load({path!r})), or "
            "safetensors.torch.load_file for a .safetensors file"
        )
    if not isinstance(state, Mapping):
        raise PulseError(f"{what}; this is {type(state).__name__}")
    faults = [
        f"{name!r} is no name, but {type(name).__name__}"
        if not isinstance(name, str)
        else f"{name} must be a tensor, is {type(value).__name__}"
        for name, value in state.items()
        if not isinstance(name, str) or not isinstance(value, Tensor)
    ]
    if faults:
        raise PulseError(told(what, faults))


def _run_on_zeros(plan: Plan, stage: Stage, settings: RunSettings, which: int) -> None:
    """A forward of a stage on tensors like those of a step's microbatch of the shape ``which``; its
    buffers and attributes stay as they are."""
    routes, index = plan.routes, stage.stage

    def zeros(spec: TensorSpec) -> Tensor:
        return settings.make_empty(spec.at(which)).zero_()

    fields = batch_fields_of(plan.backbone, routes, index)
    taken = {name: zeros(plan.backbone.batch_fields[name]) for name in fields}
    taken |= {edge.name: summed(zeros(edge.spec)) for edge in routes.conditioning_into(index)}
    names = {to.name for to in routes.given_to(index) if to.payload is Payload.SKIP}
    skips = {skip.name: zeros(skip.spec) for skip in routes.skips if skip.name in names}
    with (
        generators_kept(),
        buffers_kept([stage]),
        attributes_kept(module for _, module in stage.named_layers()),
        torch.no_grad(),
    ):
        stage(tuple(map(zeros, routes.boundaries[index])), skips, taken, which=which)


def _misfits(backbone: Backbone, batch: object, settings: RunSettings) -> Iterator[str]:
    """What a microbatch lacks of the fields that the chain reads."""
    if not isinstance(batch, Mapping):
        yield f"must map names to tensors, is {type(batch).__name__}"
        return
    wanted, samples = fields_of(backbone), set(fields_of(backbone)) - set(backbone.batch_fields)
    present = {name: batch[name] for name in wanted if isinstance(batch.get(name), Tensor)}
    for name in (name for name in wanted if name not in present):
        value = batch.get(name)
        what = "is missing" if value is None else f"must be a tensor, is {type(value).__name__}"
        yield f"{name} {what}"
    try:
        which = shape_of(backbone, present)
    except ShapeError as error:
        if len(present) == len(wanted):
            yield str(error)
        return
    for name, value in present.items():
        spec = wanted[name].at(which)
        if tuple(value.shape) != (shape := spec.full_shape(settings.micro_batch_size)):
            yield f"{name} is {tuple(value.shape)}, not {shape}"
        elif name in samples and value.dtype != settings.dtype_of(spec):
            yield f"{name} is of {value.dtype}, the first layer takes {settings.dtype_of(spec)}"


def _require_sound(plan: Plan, stages: Mapping[int, Stage], context: LayerContext | None) -> None:
    """Raise BackboneError, on every process alike, for layers that no pipeline can run."""
    own = {i for s in stages for i in plan.partition.layers_of_stage(s)}
    layers = plan.backbone.layers
    modules = [(name, m) for stage in stages.values() for name, m in stage.named_layers()]
    modules += built_elsewhere([la for i, la in enumerate(layers) if i not in own], context)
    place = {layer.name: i for i, layer in enumerate(layers)}
    frozen = {layer.name for layer in layers if not layer.trained}
    if faults := unsound(sorted(modules, key=lambda pair: place[pair[0]]), frozen):
        raise BackboneError(plan.backbone.name, faults)


def replicate(
    plan: Plan,
    device: int,
    stages: Mapping[int, Stage],
    context: LayerContext | None,
    links: Links,
    settings: RunSettings,
    before_reading: Callable[[nn.Module], None] = lambda master: None,
) -> Replicas:
    """Give ``stages``, those of ``device``, their copies of the embedders that all devices run."""
    masters = {
        name: module
        for stage in stages.values()
        for name, module in stage.named_layers()
        if name in plan.routes.replicated
    }
    replicas = Replicas(
        plan.backbone,
        plan.routes,
        device,
        context,
        masters,
        links,
        settings.dtype,
        settings.device,
        before_reading,
    )
    for stage in stages.values():
        stage.replicas = replicas
    return replicas
