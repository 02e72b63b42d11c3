"""Executor of a schedule on tensors.

The executor makes no decisions: order of operations, message times and inputs of each operation are
compiled from the plan. It keeps only what later operations take. For a stage's outputs this is the
gradient edge, not the tensor. An output's memory is free once its transfer ends, unless a skip or
the graph holds the tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_pulse.backbone.chain import Backbone, TensorSpec
from megatron_pulse.backbone.check import BackboneError
from megatron_pulse.backbone.dropout_key import first_position
from megatron_pulse.backbone.shape_buckets import own_fields, sample_field, shape_of
from megatron_pulse.planner.layout.routes import Payload, Routes, batch_fields_of
from megatron_pulse.planner.program.communication import message_spec
from megatron_pulse.planner.program.device_program import (
    CollectiveEvent,
    EmbedderCollective,
    Event,
    Receive,
    Release,
    Run,
    Send,
    Wait,
)
from megatron_pulse.planner.schedule.message import Message
from megatron_pulse.planner.schedule.operations import Operation, OpType, Schedule
from megatron_pulse.profile.measurement.machine import keep_freed_memory
from megatron_pulse.runtime.activations.offload import ActivationOffload, Streams, storages
from megatron_pulse.runtime.activations.recompute import RecomputedLayer
from megatron_pulse.runtime.failure_board import FailureBoard, PulseError
from megatron_pulse.runtime.module_checks import buffers_kept
from megatron_pulse.runtime.p2p.tensor_router import TensorRouter, Tensors
from megatron_pulse.runtime.p2p.transfers import Links
from megatron_pulse.runtime.parameters.replicated_embedders import Replicas
from megatron_pulse.runtime.parameters.wgrad_queue import WeightGradStore
from megatron_pulse.runtime.protocols import Carrier, Recorder, SliceFunction
from megatron_pulse.runtime.random_draws import RngWatch
from megatron_pulse.runtime.stage import Stage
from megatron_pulse.runtime.tensor_settings import META, Batch, RunSettings
from megatron_pulse.runtime.watchdog.progress import PROGRESS, of_operation


@dataclass
class _Saved:
    """State for the backward of one stage on one microbatch; ``inputs`` need a gradient."""

    inputs: Tensors
    edges: dict[tuple[Payload, str], GradientEdge | None] = field(default_factory=dict)
    loss: Tensor | None = None
    wgrad_store: WeightGradStore | None = None
    recomputed: list[RecomputedLayer] = field(default_factory=list)
    offload: ActivationOffload | None = None


class Executor:
    """Executes one device's part of ``schedule``.

    - ``program``: events from ``compile_program``. Bubble task X0:3 runs slice 3 of
      ``bubble_tasks[0]`` without gradients.
    - ``stages``: (wrapped) module of each stage number.
    - ``no_sync``: contexts in which a stage accumulates gradients without reducing them.
    - ``replicas``: the replicated embedders, if any.
    - ``carrier``: provider of slice results or predictions to send.

    After an error all held tensors are dropped, and the error is reported on the board. Raises
    PulseError if the program names a missing bubble task.
    """

    def __init__(
        self,
        backbone: Backbone,
        routes: Routes,
        schedule: Schedule,
        program: tuple[Event, ...],
        device: int,
        stages: Mapping[int, nn.Module],
        links: Links | None,
        board: FailureBoard | None = None,
        no_sync: Mapping[int, Callable[[], AbstractContextManager[object]]] | None = None,
        replicas: Replicas | None = None,
        bubble_tasks: Sequence[SliceFunction] = (),
        carrier: Carrier | None = None,
    ) -> None:
        _require_bubble_tasks(program, len(bubble_tasks))
        _require_carrier(program, carrier)
        _require_replicas(program, replicas)
        self._backbone = backbone
        self._routes = routes
        self._schedule = schedule
        self._program = program
        self._device = device
        self._stages = stages
        self._board = board
        self._no_sync = no_sync or {}
        self._replicas = replicas
        self._bubble_tasks = tuple(bubble_tasks)
        self._carrier = carrier
        self._own = routes.partition.placement.stages_of_device(device)
        self._fields = {s: batch_fields_of(backbone, routes, s) for s in self._own}
        self._heads = {s: backbone.layers[routes.partition.cuts[s]] for s in self._own}
        self._computed = {edge.name: edge.spec for edge in backbone.conditioning}
        self._exchange = TensorRouter(routes, device, links)
        self._saved: dict[tuple[int, int], _Saved] = {}
        self._wgrad_stores: dict[tuple[int, int], WeightGradStore] = {}
        self._is_split = OpType.INPUT_GRAD in schedule.kinds
        self._batches: dict[int, Batch] = {}
        self._copied: dict[int, dict[str, Tensor]] = {}
        self._unread: dict[int, int] = {}
        self._shapes: list[int] = []
        self._losses: dict[int, list[Tensor]] = {}
        self._ended: set[int] = set()
        self._current: Operation | None = None
        self._copies: Streams | None = None
        self.offload_bytes = 0
        """Bytes of activations offloaded, over all steps."""

    def run(
        self,
        batches: Iterator[Batch],
        settings: RunSettings,
        *,
        forward_only: bool = False,
        recorder: Recorder | None = None,
        reduces: bool = True,
    ) -> list[Tensor]:
        """Execute one step and return the loss of every microbatch on the last stage's device.

        A cascade returns the losses of the chains that end here, one chain after another.
        ``batches`` yields the step's microbatches in order, on every device. The schedule must be
        forward-only exactly if ``forward_only`` is set. ``recorder`` is called around every event.
        Without ``reduces`` gradients accumulate locally and are not reduced.
        """
        if settings.device.type == "cpu":
            keep_freed_memory()
        self._settings = settings
        self._batches_left = batches
        self._shapes = []
        self._training = not forward_only
        self._reduces = reduces
        placement = self._routes.partition.placement
        self._losses = {stage: [] for stage in placement.ends if stage in self._own}
        self._current = None
        offloading = {stage for stage, _ in self._schedule.offloaded}
        self._weights = {
            s: storages(stage.parameters()) for s, stage in self._stages.items() if s in offloading
        }
        grad_mode = torch.enable_grad() if self._training else torch.no_grad()
        try:
            with contextlib.ExitStack() as stack, grad_mode:
                if not self._training:
                    stack.enter_context(buffers_kept(self._modules()))
                self._syncing = {s: stack.enter_context(contextlib.ExitStack()) for s in self._own}
                if self._training:
                    for stage, make_context in self._no_sync.items():
                        self._syncing[stage].enter_context(make_context())
                self._play(recorder)
                PROGRESS.event = "waiting for all messages of the step"
                self._exchange.drain()
            self._exchange.require_empty()
        except BaseException as error:
            self._give_up(error)
            raise
        finally:
            PROGRESS.event = None
        return [loss for losses in self._losses.values() for loss in losses]

    def _modules(self) -> list[nn.Module]:
        copies = [] if self._replicas is None else self._replicas.modules()
        return [*self._stages.values(), *copies]

    @property
    def held_bytes(self) -> int:
        """Bytes in the tensor store; zero between steps."""
        return self._exchange.held_bytes

    def _play(self, recorder: Recorder | None) -> None:
        for event in self._program:
            PROGRESS.event = event
            PROGRESS.moves += 1
            if recorder is not None:
                recorder.begin(event)
            match event:
                case Run(operation):
                    self._current = operation
                    self._run(operation)
                    self._current = None
                case Send(message):
                    if message.payload.is_carried:
                        self._exchange.offer(message, self._carried.outgoing(message))
                    self._exchange.send(message)
                case Receive(message):
                    self._exchange.expect(message, self._like(message))
                case Wait(message) if message.payload.is_carried:
                    self._carried.take(message, self._exchange.arrived(event))
                case Wait():
                    self._exchange.receive(event)
                case Release(sent):
                    self._exchange.release(sent)
                case CollectiveEvent(what):
                    self._join(what)
            if recorder is not None:
                recorder.end(event)

    def _join(self, what: EmbedderCollective) -> None:
        assert self._replicas is not None  # checked in _require_replicas
        match what:
            case EmbedderCollective.REFRESH:
                self._replicas.refresh()
            case EmbedderCollective.RETURN:
                self._replicas.return_gradients()

    @property
    def _carried(self) -> Carrier:
        assert self._carrier is not None  # checked in _require_carrier
        return self._carrier

    def _give_up(self, error: BaseException) -> None:
        self._exchange.clear()
        self._saved.clear()
        self._wgrad_stores.clear()
        self._batches.clear()
        self._copied.clear()
        if isinstance(error, PulseError):
            return
        where = "between operations" if self._current is None else of_operation(self._current)
        layer = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
        error.add_note(f"pipeline device {self._device}, {where}")
        if self._board is not None:
            self._board.report(f"{where}{layer}: {type(error).__name__}: {error}")

    def _run(self, operation: Operation) -> None:
        match operation.kind:
            case OpType.FORWARD:
                self._forward(operation)
            case OpType.WEIGHT_GRAD:
                self._weight_gradient(operation)
            case OpType.RECOMPUTE:
                for layer in self._saved[operation.stage, operation.microbatch].recomputed:
                    layer.compute()
            case OpType.OFFLOAD:
                self._offload_of(operation).finish_offload()
            case OpType.RELOAD:
                self._offload_of(operation).start_load()
            case OpType.BUBBLE_TASK:
                with torch.no_grad():
                    self._bubble_tasks[operation.stage](operation.microbatch)
            case _:
                drawing = RngWatch()
                self._backward(operation)
                self._require_none_drawn(drawing, f"the backward of {self._layers_of(operation)}")

    def _require_none_drawn(self, drawing: RngWatch, what: str) -> None:
        """Raise BackboneError if ``what`` drew random numbers."""
        if fault := drawing.fault():
            raise BackboneError(self._backbone.name, [f"{what} {fault}"])

    def _layers_of(self, operation: Operation) -> str:
        """Name the layers of an operation's stage."""
        layers = self._routes.partition.layers_of_stage(operation.stage)
        first, last = (self._backbone.layers[i].name for i in (layers[0], layers[-1]))
        return first if first == last else f"{first} to {last}"

    def _shape(self, microbatch: int) -> int:
        """Index of a microbatch's shape among the chain's shapes; loads the microbatch."""
        while len(self._shapes) <= microbatch:
            batch = next(self._batches_left)
            self._batches[len(self._shapes)] = batch
            self._copied[len(self._shapes)] = {}
            self._unread[len(self._shapes)] = len(self._own)
            self._shapes.append(shape_of(self._backbone, batch))
        return self._shapes[microbatch]

    def _like(self, message: Message) -> Tensor:
        """Meta tensor with the shape and dtype of ``message``.

        Shapes follow from the microbatch, which every device loads, so no shape is sent.
        """
        if message.payload.is_carried:
            return self._carried.like(message)
        shape_index = (
            self._shape(message.consumer.microbatch) if self._backbone.num_shapes > 1 else 0
        )
        return self._settings.make_empty(message_spec(self._routes, message).at(shape_index), META)

    def _cast(self, tensor: Tensor, spec: TensorSpec) -> Tensor:
        # Copies to a GPU do not block the host if loaders pin their batches.
        device, dtype = self._settings.device, self._settings.dtype_of(spec)
        return tensor.to(device, dtype, non_blocking=True)

    def _field(self, microbatch: int, name: str, spec: TensorSpec) -> Tensor:
        """Field of a microbatch on the compute device; one copy serves all stages of the device."""
        copied = self._copied[microbatch]
        if name not in copied:
            copied[name] = self._cast(self._batches[microbatch][name], spec)
        return copied[name]

    def _forward(self, op: Operation) -> None:
        stage = op.stage
        shape_index = self._shape(op.microbatch)
        batch = self._batches[op.microbatch]
        taken = self._exchange.take_inputs(op)
        saved = _Saved({key: tensor for key, tensor in taken.items() if tensor.requires_grad})
        boundary = tuple(t for (payload, _), t in taken.items() if payload is Payload.BOUNDARY)
        skips = {name: t for (payload, name), t in taken.items() if payload is Payload.SKIP}
        conditioning = {
            name: t for (payload, name), t in taken.items() if payload is Payload.CONDITIONING
        }
        placement, head = self._routes.partition.placement, self._heads[stage]
        if placement.before[stage] is None:
            boundary = (self._field(op.microbatch, sample_field(head), head.inputs[0]),)
        given = {
            name: self._field(op.microbatch, name, self._backbone.batch_fields[name])
            for name in self._fields[stage]
        }
        if self._is_split and self._training:
            saved.wgrad_store = WeightGradStore()
        if (stage, op.microbatch) in self._schedule.offloaded and self._training:
            here = [*boundary, *skips.values(), *given.values(), *conditioning.values()]
            saved.offload = ActivationOffload(
                self._weights[stage] | storages(here), self._copy_streams()
            )
        outputs, skips, provided = self._stages[stage](
            boundary,
            skips,
            {**given, **conditioning},
            saved.wgrad_store,
            shape_index,
            saved.recomputed,
            saved.offload,
            first_position(self._backbone, head.chain, batch) if self._training else None,
        )
        results = [(Payload.SKIP, name, tensor) for name, tensor in skips.items()]
        results += [(Payload.CONDITIONING, name, tensor) for name, tensor in provided.items()]
        if placement.after[stage] is None:
            fields = own_fields(self._backbone, head.chain, batch)
            drawing = RngWatch(whole=stage not in self._ended)
            loss = self._settings.loss_of(head.chain)(outputs[0], fields)
            saved.loss = _loss(loss, self._training and outputs[0].requires_grad)
            self._require_none_drawn(drawing, "the loss")
            self._ended.add(stage)
            # torch's mean squared error may keep memory of its input's size alive.
            self._losses[stage].append(saved.loss.detach().clone())
        else:
            results += [(Payload.BOUNDARY, str(i), t) for i, t in enumerate(outputs)]
        self._unread[op.microbatch] -= 1
        if not self._unread[op.microbatch]:
            del self._batches[op.microbatch], self._copied[op.microbatch]
        for payload, name, tensor in results:
            if self._training and self._exchange.needs_grad(stage, payload, name):
                saved.edges[payload, name] = (
                    get_gradient_edge(tensor) if tensor.requires_grad else None
                )
            if payload is Payload.CONDITIONING:
                tensor = self._cast(tensor, self._computed[name])
            self._exchange.deliver(op, payload, name, tensor.detach())
        if saved.offload is not None:
            saved.offload.start_offload()
            self.offload_bytes += saved.offload.num_bytes
        if self._training:
            self._saved[stage, op.microbatch] = saved

    def _offload_of(self, op: Operation) -> ActivationOffload:
        offload = self._saved[op.stage, op.microbatch].offload
        assert offload is not None  # created in forward
        return offload

    def _copy_streams(self) -> Streams | None:
        """Streams for activation offload; None on a CPU."""
        if self._copies is None:
            self._copies = Streams.on(self._settings.device)
        return self._copies

    def _backward(self, op: Operation) -> None:
        stage = op.stage
        saved = self._saved.pop((stage, op.microbatch))
        saved.recomputed.clear()
        if self._ends_accumulation(op) and op.kind is OpType.BACKWARD:
            self._syncing[stage].close()  # the last microbatch's gradients may be reduced
        if saved.loss is not None:
            loss = saved.loss / self._schedule.num_microbatches
            scale = self._settings.grad_scale
            torch.autograd.backward(scale(loss) if scale is not None else loss)
        else:
            self._backward_from_edges(op, saved)
        if saved.offload is not None:
            saved.offload.close()
        if isinstance(inside := _inside(self._stages[stage]), Stage):
            inside.weight_offload.release()
        gradients = {key: _gradient(leaf) for key, leaf in saved.inputs.items()}
        self._exchange.deliver_gradients(op, gradients)
        if saved.wgrad_store is not None:
            self._wgrad_stores[stage, op.microbatch] = saved.wgrad_store

    def _backward_from_edges(self, op: Operation, saved: _Saved) -> None:
        edges, gradients = [], []
        for (payload, name), edge in saved.edges.items():
            gradient = self._exchange.take_gradient(op, payload, name)
            if edge is not None:
                edges.append(edge)
                gradients.append(gradient)
        if edges:
            torch.autograd.backward(edges, gradients)

    def _ends_accumulation(self, op: Operation) -> bool:
        return self._reduces and op.microbatch + 1 == self._schedule.num_microbatches

    def _weight_gradient(self, op: Operation) -> None:
        wgrad_store = self._wgrad_stores.pop((op.stage, op.microbatch))
        if self._ends_accumulation(op) and op.stage in self._no_sync:
            # From here on arriving gradients may be reduced. Gradients of the input-gradient pass
            # are complete; adding zeros announces them.
            self._syncing[op.stage].close()
            self._announce(op.stage, wgrad_store.parameters)
        wgrad_store.compute()

    def _announce(self, stage: int, awaited: set[nn.Parameter]) -> None:
        """Announce to Megatron that a stage's gradients are complete, except those ``awaited``."""
        inside = _inside(self._stages[stage])
        elsewhere = set(inside.replicated_parameters())
        complete = [
            parameter
            for parameter in inside.parameters()
            if parameter.requires_grad and parameter not in awaited | elsewhere
        ]
        if complete:
            torch.autograd.backward(complete, [torch.zeros_like(p) for p in complete])


def _inside(stage: nn.Module) -> nn.Module:
    """Unwrap Megatron's wrappers, so that parameters have their own names."""
    while isinstance(inner := getattr(stage, "module", None), nn.Module):
        stage = inner
    return stage


def _gradient(leaf: Tensor) -> Tensor:
    """Gradient of a leaf; zeros without a dependency."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _loss(value: object, differentiated: bool) -> Tensor:
    """Check that a loss function returned a scalar tensor; ValueError otherwise.

    A ``differentiated`` loss must have a gradient.
    """
    if not isinstance(value, Tensor):
        raise ValueError(f"the loss must be a tensor of one number, is {type(value).__name__}")
    if value.numel() != 1:
        raise ValueError(f"the loss must be one number, has the shape {tuple(value.shape)}")
    if differentiated and not value.requires_grad:
        raise ValueError(
            "the loss has no gradient: it was computed from a detached prediction or within "
            "torch.no_grad(). Compute it from the prediction itself, or call evaluate()"
        )
    return value


def _require_carrier(program: Sequence[Event], carrier: Carrier | None) -> None:
    """Raise PulseError if ``program`` sends carried payloads without a carrier."""
    if carrier is None and any(
        event.message.payload.is_carried for event in program if isinstance(event, Send | Receive)
    ):
        raise PulseError(
            "the program sends results of bubble tasks' slices, or predictions, but no carrier has "
            "them"
        )


def _require_replicas(program: Sequence[Event], replicas: Replicas | None) -> None:
    """Raise PulseError if ``program`` refreshes replicated embedders without replicas."""
    if replicas is None and any(isinstance(event, CollectiveEvent) for event in program):
        raise PulseError("the plan replicates embedders, but this executor has no copies of them")


def _require_bubble_tasks(program: Sequence[Event], count: int) -> None:
    """Raise PulseError if ``program`` runs a bubble task numbered ``count`` or higher."""
    named = {
        event.operation.stage
        for event in program
        if isinstance(event, Run) and event.operation.kind is OpType.BUBBLE_TASK
    }
    if missing := sorted(n for n in named if n >= count):
        raise PulseError(
            f"the schedule runs bubble task {', '.join(map(str, missing))}, but {count} "
            f"workload{'s were' if count != 1 else ' was'} given: give one for each, or use a "
            "schedule without bubble tasks"
        )
