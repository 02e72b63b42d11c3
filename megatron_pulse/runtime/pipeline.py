"""A plan on torch's process groups, for a custom training loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_pulse.backbone.build_context import LayerContext
from megatron_pulse.backbone.cast_floats import cast_floats
from megatron_pulse.backbone.chain import Backbone, TensorSpec
from megatron_pulse.backbone.check import BackboneError
from megatron_pulse.backbone.published_weights import torn, untied
from megatron_pulse.backbone.rng_state import generators_kept
from megatron_pulse.backbone.shape_buckets import ShapeError, fields_of, shape_of
from megatron_pulse.errors import format_faults, wrong_count, wrong_kinds
from megatron_pulse.planner.layout.routes import Payload, batch_fields_of
from megatron_pulse.planner.program.plan import Plan
from megatron_pulse.runtime.encoding.encoding import Encoding, FrozenComponent
from megatron_pulse.runtime.executor import Executor
from megatron_pulse.runtime.failure_board import PulseError, default_board
from megatron_pulse.runtime.module_checks import (
    attributes_kept,
    buffers_kept,
    built_elsewhere,
    shared_buffers,
    unsound,
)
from megatron_pulse.runtime.p2p.transfers import Links
from megatron_pulse.runtime.parameters.grad_norm import (
    clip,
    combined,
    norm_of,
    require_finite,
    require_max_norm,
    require_norm_type,
)
from megatron_pulse.runtime.parameters.replicated_embedders import Replicas
from megatron_pulse.runtime.protocols import Recorder, SliceFunction
from megatron_pulse.runtime.stage import Stage, summed
from megatron_pulse.runtime.tensor_settings import Batch, LossFunction, RunSettings
from megatron_pulse.tracing.checks.torch_patches import alike
from megatron_pulse.tracing.from_module import buffers_of, tied_names
from megatron_pulse.tracing.initial_weights.sources import altered


class Pipeline:
    """This process's stages of ``plan``, and steps that run on the stages of all processes.

    - ``group``: process i is pipeline device i. The default is all processes of the job, or this
      one alone.
    - ``loss(prediction, batch)``: called where the chain ends. A cascade may have one per chain, by
      name, called with the chain's own fields.
    - ``seed``: a layer's initial weights depend only on the seed and the layer's name.
    - ``context``: argument of layer factories, required by those of ``model_specs``.
    - ``bubble_tasks``: callables of the plan's bubble tasks.

    Construction is collective. Raises PulseError for arguments of other kinds, if the plan is for
    another number of processes, or if another process cannot build its layers.
    """

    @torch.inference_mode(False)  # tensors made in that mode cannot be trained
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
        bubble_tasks: Sequence[SliceFunction] = (),
        timeout_s: float = 600.0,
    ) -> None:
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        given: list[tuple[str, object, type, str]] = [
            ("plan", plan, Plan, ", as returned by make_plan"),
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
            raise PulseError(format_faults("Pipeline", faults))
        num_processes = 1 if group is None else group.size()
        if num_processes != plan.placement.num_devices:
            raise PulseError(
                f"the plan is for {plan.placement.num_devices} devices, the group has "
                f"{num_processes} processes. Start as many processes as devices, or make a plan "
                "for this group"
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
                s: cast_floats(
                    Stage(
                        *(plan.backbone, plan.routes, s, seed, context, plan.activations),
                        plan.offloaded_weights,
                        plan.token_slices,
                    ),
                    dtype,
                    device,
                )
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
        self._bubble_tasks = tuple(bubble_tasks)
        self._encoding: Encoding | None = None
        self._executors: dict[tuple[int, bool], Executor] = {}
        self._tried = False

    def encode_with(self, components: Sequence[FrozenComponent]) -> Encoding:
        """Let frozen components encode samples.

        Components run before a step (``front``), or as bubble tasks of the plan's schedule while
        another step runs (``fill``, the step, ``filled``).
        """
        self._encoding = Encoding(components, self._settings.device, self.rank, self.links)
        self._executors.clear()
        return self._encoding

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this process's layers, named by layer."""
        for stage in self.stages.values():
            yield from stage.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of this process's layers, for its optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Norm of the gradients of all processes' layers, returned on each.

        The result is fp32, or fp64 where parameters are. Frozen parameters are excluded; replicated
        embedders count once. The result is bitwise equal for every layout. Collective. Raises
        PulseError if ``norm_type`` is neither positive nor inf.
        """
        return self._norms(norm_type)[0]

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale all gradients so that ``grad_norm`` is at most ``max_norm``; returns the old norm.

        torch's ``clip_grad_norm_`` does the same on one process. On several, it would scale each
        process's layers by a different norm. Collective, with equal arguments. With
        ``error_if_nonfinite``, non-finite gradients raise PulseError naming their layers on all
        processes, and nothing is scaled.
        """
        most = require_max_norm(max_norm)
        total, norms = self._norms(norm_type)
        if error_if_nonfinite:
            require_finite(total, norms, [layer.name for layer in self.plan.backbone.layers])
        clip(self.parameters(), most, total)
        return total

    def _norms(self, norm_type: float) -> tuple[Tensor, Tensor]:
        """Norm of all gradients, and each layer's norm in fp64."""
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
        """Weights of this process's layers; all processes together hold the whole model."""
        return {k: v for stage in self.stages.values() for k, v in stage.state_dict().items()}

    def full_state_dict(self, to: int | None = None) -> dict[str, Tensor]:
        """Weights and buffers of all layers in host memory, as ``state_dict`` returns on one
        process.

        Returned on every process, or on process ``to`` alone; the others get an empty dict.
        ``load_state_dict`` accepts the result for any layout. Collective; one tensor is sent at a
        time. Raises PulseError if process ``to`` does not exist.
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
        """Broadcast ``value`` from ``process`` to all."""
        return value if self.links is None else self.links.broadcast_object(value, process, what)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the weights of this process's layers from a whole model's state.

        A traced module's ``state_dict`` is accepted: tied weights under all names, and buffers, are
        compared. Raises PulseError listing missing, unknown, misshapen and differing entries;
        nothing is loaded then.
        """
        _require_weights(state)
        tied, constants = tied_names(self.plan.backbone), buffers_of(self.plan.backbone)
        given = state
        state = {k: v for k, v in untied(given, tied).items() if k not in constants}
        own = self.state_dict()
        layers = self.plan.backbone.layers
        prefixes = tuple(layer.prefix for layer in layers if not layer.qualified)
        qualified = [layer for layer in layers if layer.qualified]
        prefix_of = {layer.name: layer.prefix for layer in qualified}
        names = {
            prefix_of[layer] + name
            for layer, module in built_elsewhere(qualified, self._context)
            for name, _ in module.named_parameters()
        }
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
            f"{name} is no parameter or buffer of its layer"
            for name in state
            if name.startswith(mine) and name not in own
        ]
        if faults := faults or [*torn(given, tied), *altered(constants, given)]:
            raise PulseError(format_faults("weights to load", faults))
        for stage in self.stages.values():
            stage.load_state_dict({name: state[name] for name in stage.state_dict()})
        if self._replicas is not None:
            self._replicas.load_buffers(state)

    @torch.inference_mode(False)
    def step(
        self,
        batches: Sequence[Batch],
        *,
        everywhere: bool = False,
        recorder: Recorder | None = None,
    ) -> list[Tensor]:
        """Run forward and backward of one microbatch for each of ``batches``. Collective.

        Every process passes the same batches. ``noisy`` is the first layer's input; other fields
        are for the loss and for layers that use them. A chain of several shapes selects a
        microbatch's shape by the shapes of its fields.

        Gradients of the mean loss are accumulated into the parameters. Returns the microbatches'
        losses, ``everywhere`` or only where the chain ends (for a cascade, one chain after
        another).

        Raises PulseError if plans or numbers of batches differ between processes, or if no layer is
        trained. Also raises
        PulseError listing all missing or misshapen fields of the batches, and a wrong dtype of
        ``noisy``.
        """
        if not any(layer.trained for layer in self.plan.backbone.layers):
            raise PulseError(
                f"no parameter of {self.plan.backbone.name} requires a gradient. Use evaluate(), "
                "which needs none"
            )
        self._require_fit(batches)
        executor = self.executor(len(batches))
        losses = executor.run(iter(batches), self._settings, recorder=recorder)
        return self._spread(losses) if everywhere else losses

    @torch.inference_mode(False)
    def evaluate(self, batches: Sequence[Batch], *, everywhere: bool = False) -> list[Tensor]:
        """Losses as ``step`` returns them, without gradients.

        Layers run in their current mode (``train``); buffers are restored.
        """
        self._require_fit(batches)
        executor = self.executor(len(batches), forward_only=True)
        losses = executor.run(iter(batches), self._settings, forward_only=True)
        return self._spread(losses) if everywhere else losses

    def train(self, mode: bool = True) -> None:
        """Set this process's layers to training mode, or to evaluation mode (``False``).

        In training mode, a traced module is as it was in ``from_module``. Its evaluation mode is
        exported when it is first evaluated, if forward depends on the mode.
        """
        for stage in self.stages.values():
            stage.train(mode)

    def _spread(self, losses: list[Tensor]) -> list[Tensor]:
        """Broadcast the losses of all chains to every process."""
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
        """Executor of a step of ``num_microbatches``. Collective."""
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
                bubble_tasks=self._bubble_tasks
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
            raise PulseError(
                format_faults("batches", faults or [("a step needs at least one microbatch")])
            )

    def _try_layers(self) -> None:
        """Run every layer once on zeros.

        Errors then appear before time is spent on a schedule, and on the process that has the
        layer.
        """
        fault: Exception | None = None
        found: dict[int, list[str]] = {}
        try:
            for shape_index in range(self.plan.backbone.num_shapes):
                for number, stage in self.stages.items():
                    try:
                        _run_on_zeros(self.plan, stage, self._settings, shape_index)
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
        """Raise ``fault``, or an error that names the processes with a fault."""
        said = None if fault is None else f"{type(fault).__name__}: {fault}"
        everybody = self._gathered(said, doing) if self._group is not None else []
        if fault is not None:
            raise fault
        if faults := [f"process {i}: {why}" for i, why in enumerate(everybody) if why is not None]:
            raise PulseError(format_faults(doing, faults))

    def _gathered(self, own: object, doing: str) -> list[Any]:
        """Gather ``own`` from all processes."""
        assert self._group is not None and self._board is not None
        found: list[Any] = [None] * self._group.size()
        try:
            dist.all_gather_object(found, own, self._group)
        except RuntimeError as error:
            first = self._board.first_failure(wait_s=0.5)
            raise PulseError(
                f"{doing}, another process closed the connection (it exited or failed)\nfirst "
                f"failure in this job: {first or error}"
            ) from error
        return found

    def _require_one_call(self, num_microbatches: int, forward_only: bool) -> None:
        """Raise PulseError where processes call different steps, before one is planned for them."""
        if self._group is None:
            return
        own = f"{'evaluate' if forward_only else 'step'} {num_microbatches} microbatch(es)"
        first, *others = self._gathered(own, "comparing steps")
        if faults := [
            f"process {i} called {call}, process 0 called {first}"
            for i, call in enumerate(others, start=1)
            if call != first
        ]:
            raise PulseError(
                format_faults("make the same call with the same batches in all processes", faults)
            )

    def _require_one_plan(self, num_microbatches: int) -> None:
        if self._group is None:
            return
        digests = self._gathered(self.plan.digest(num_microbatches), "comparing plans")
        if other := [i for i, digest in enumerate(digests) if digest != digests[0]]:
            raise PulseError(
                f"processes {', '.join(map(str, other))} have another plan than process 0 for "
                f"{num_microbatches} microbatches. Measure and plan in one process, and send the "
                "plan"
            )


def _loss_faults(loss: object, chains: Collection[str] | None) -> Iterator[str]:
    """Faults of ``loss`` for a backbone of these chains.

    ``chains`` is empty if the backbone is no cascade, and None if unknown.
    """
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
    what = "weights to load must map names to tensors, as returned by full_state_dict"
    if isinstance(state, str | PathLike):
        path = str(state)
        raise PulseError(
            f"{what}, not name the file {path!r}: load_state_dict(torch.load({path!r})), or "
            "safetensors.torch.load_file for a .safetensors file"
        )
    if not isinstance(state, Mapping):
        raise PulseError(f"{what}; this is {type(state).__name__}")
    faults = [
        f"key {name!r} must be a name, is {type(name).__name__}"
        if not isinstance(name, str)
        else f"{name} must be a tensor, is {type(value).__name__}"
        for name, value in state.items()
        if not isinstance(name, str) or not isinstance(value, Tensor)
    ]
    if faults:
        raise PulseError(format_faults(what, faults))


def _run_on_zeros(plan: Plan, stage: Stage, settings: RunSettings, shape_index: int) -> None:
    """Run a stage's forward on zeros of shape ``shape_index``; its buffers and attributes are
    restored.
    """
    routes, index = plan.routes, stage.stage

    def zeros(spec: TensorSpec) -> Tensor:
        return settings.make_empty(spec.at(shape_index)).zero_()

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
        stage(tuple(map(zeros, routes.boundaries[index])), skips, taken, shape_index=shape_index)


def _misfits(backbone: Backbone, batch: object, settings: RunSettings) -> Iterator[str]:
    """Yield faults of a microbatch: fields that are missing, misshapen or of a wrong dtype."""
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
        shape_index = shape_of(backbone, present)
    except ShapeError as error:
        if len(present) == len(wanted):
            yield str(error)
        return
    for name, value in present.items():
        spec = wanted[name].at(shape_index)
        if tuple(value.shape) != (shape := spec.full_shape(settings.micro_batch_size)):
            yield f"{name} is {tuple(value.shape)}, not {shape}"
        elif name in samples and value.dtype != settings.dtype_of(spec):
            yield f"{name} is of {value.dtype}, the first layer takes {settings.dtype_of(spec)}"


def _require_sound(plan: Plan, stages: Mapping[int, Stage], context: LayerContext | None) -> None:
    """Raise BackboneError, on every process alike, for layers that cannot be pipelined.

    Tells the stages the buffers that their layers share with layers anywhere.
    """
    own = {i for s in stages for i in plan.partition.layers_of_stage(s)}
    layers = plan.backbone.layers
    modules = [(name, m) for stage in stages.values() for name, m in stage.named_layers()]
    modules += built_elsewhere([la for i, la in enumerate(layers) if i not in own], context)
    place = {layer.name: i for i, layer in enumerate(layers)}
    frozen = {layer.name for layer in layers if not layer.trained}
    if faults := unsound(sorted(modules, key=lambda pair: place[pair[0]]), frozen):
        raise BackboneError(plan.backbone.name, faults)
    shared = shared_buffers(modules)
    for stage in stages.values():
        stage.shared_buffers = shared


def replicate(
    plan: Plan,
    device: int,
    stages: Mapping[int, Stage],
    context: LayerContext | None,
    links: Links,
    settings: RunSettings,
    before_reading: Callable[[nn.Module], None] = lambda module: None,
) -> Replicas:
    """Give the ``stages`` of ``device`` their copies of the replicated embedders."""
    owned = {
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
        owned,
        links,
        settings.dtype,
        settings.device,
        before_reading,
    )
    for stage in stages.values():
        stage.replicas = replicas
    return replicas
