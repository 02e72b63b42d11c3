"""Runs a schedule on tensors.

The executor obeys: which operation is next, which messages travel with which round, and what each
operation needs were all compiled from the plan. It keeps only what a later operation will take:
of a stage's outputs the gradient edge, not the tensor, so an output's memory is free as soon as
its transfer ends, unless a skip or the graph still holds it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_pulse.backbone.chain import COMPUTE, Backbone, TensorSpec
from megatron_pulse.planner.communication import Message, Payload
from megatron_pulse.planner.program import Event, Issue, Run, Wait
from megatron_pulse.planner.routes import Carrier, Routes, batch_fields_of
from megatron_pulse.planner.schedule.operations import Kind, Operation, Schedule
from megatron_pulse.runtime.failures import FailureBoard, PulseError
from megatron_pulse.runtime.links import Links
from megatron_pulse.runtime.replicas import Replicas
from megatron_pulse.runtime.skips import TensorStore
from megatron_pulse.runtime.weight_gradients import Later

Batch = Mapping[str, Tensor]
LossFunction = Callable[[Tensor, Batch], Tensor]


@dataclass(frozen=True)
class RunSettings:
    """What the tensors of a run look like."""

    micro_batch_size: int
    dtype: torch.dtype
    device: torch.device
    loss: LossFunction
    grad_scale: Callable[[Tensor], Tensor] | None = None

    def make_empty(self, spec: TensorSpec) -> Tensor:
        """An empty tensor of ``spec``'s shape for one microbatch."""
        shape = spec.full_shape(self.micro_batch_size)
        return torch.empty(shape, dtype=self.dtype_of(spec), device=self.device)

    def dtype_of(self, spec: TensorSpec) -> torch.dtype:
        """The torch dtype of ``spec``."""
        return self.dtype if spec.dtype == COMPUTE else getattr(torch, spec.dtype)


@dataclass
class _Saved:
    """What the backward of one stage on one microbatch needs."""

    inputs: tuple[Tensor, ...]
    skips: dict[str, Tensor]
    conditioning: dict[str, Tensor]
    edges: dict[tuple[Payload, str], GradientEdge | None] = field(default_factory=dict)
    loss: Tensor | None = None
    later: Later | None = None


def message_spec(routes: Routes, message: Message) -> TensorSpec:
    """Shape and dtype of what ``message`` carries.

    A gradient has its tensor's, except conditioning's, which is a sum in fp64 (see Stage).
    """
    match message.payload:
        case Payload.BOUNDARY:
            later = max(message.producer.stage, message.consumer.stage)
            return routes.boundaries[later][int(message.name)]
        case Payload.SKIP:
            return next(r.spec for r in routes.skips if r.name == message.name)
        case Payload.CONDITIONING:
            spec = next(c.spec for c in routes.conditioning if c.name == message.name)
            is_gradient = message.producer.kind is not Kind.FORWARD
            return replace(spec, dtype="float64") if is_gradient else spec


class Executor:
    """Executes one device's part of ``schedule``.

    ``stages`` maps a stage's number to its (wrapped) module; ``no_sync`` to the context in which
    its gradients are accumulated without being reduced, ``replicas`` the replicated embedders if
    there are any. ``program`` comes from ``compile_program``. After an error everything held is
    let go and the error is on the board.
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
    ) -> None:
        self._backbone = backbone
        self._routes = routes
        self._schedule = schedule
        self._program = program
        self._device = device
        self._stages = stages
        self._links = links
        self._board = board
        self._no_sync = no_sync or {}
        self._replicas = replicas
        self._placed = routes.partition.placement.device_of_stage
        self._own = routes.partition.placement.stages_of_device(device)
        self._position = {op: i for order in schedule.order for i, op in enumerate(order)}
        self._fields = {s: batch_fields_of(backbone, routes, s) for s in self._own}
        self._store = TensorStore()
        self._saved: dict[tuple[int, int], _Saved] = {}
        self._later: dict[tuple[int, int], Later] = {}
        self._is_split = any(op.kind is Kind.INPUT_GRAD for op in self._position)
        self._conditioning_gradients: dict[tuple[str, int], Tensor] = {}
        self._outgoing: dict[Message, Tensor] = {}
        self._batches: dict[int, Batch] = {}
        self._losses: list[Tensor] = []

    def run(
        self, batches: Iterator[Batch], settings: RunSettings, *, forward_only: bool = False
    ) -> list[Tensor]:
        """Execute one step; returns the loss of every microbatch on the last stage's device.

        ``batches`` yields the step's microbatches in order, on every device. The schedule must
        be forward-only exactly when ``forward_only`` is set.
        """
        self._settings = settings
        self._batches_left = batches
        self._num_loaded = 0
        self._training = not forward_only
        self._losses = []
        current: Operation | None = None
        grad_mode = torch.enable_grad() if self._training else torch.no_grad()
        try:
            with contextlib.ExitStack() as stack, grad_mode:
                self._syncing = {s: stack.enter_context(contextlib.ExitStack()) for s in self._own}
                if self._training:
                    for stage, make_context in self._no_sync.items():
                        self._syncing[stage].enter_context(make_context())
                if self._replicas is not None:
                    self._replicas.refresh()
                for event in self._program:
                    match event:
                        case Run(operation):
                            current = operation
                            self._run(operation)
                            current = None
                        case Wait(message):
                            self._receive(message)
                        case Issue(ops):
                            self._links_or_fail().issue(ops, self._outgoing)
                if self._links is not None:
                    self._links.drain()
                if self._replicas is not None and self._training:
                    self._replicas.return_gradients()
            self._store.require_empty()
        except BaseException as error:
            self._give_up(current, error)
            raise
        return self._losses

    @property
    def held_bytes(self) -> int:
        """Bytes in the tensor store (zero between steps)."""
        return self._store.num_bytes

    def _links_or_fail(self) -> Links:
        if self._links is None:
            raise PulseError("the plan sends messages, but this executor has no links")
        return self._links

    def _give_up(self, operation: Operation | None, error: BaseException) -> None:
        self._store.clear()
        self._saved.clear()
        self._later.clear()
        self._conditioning_gradients.clear()
        self._outgoing.clear()
        self._batches.clear()
        if self._links is not None:
            self._links.abandon()
        if isinstance(error, PulseError):
            return
        where = "between operations"
        if operation is not None:
            where = f"in {operation} (stage {operation.stage}, microbatch {operation.microbatch})"
        error.add_note(f"pipeline device {self._device}, {where}")
        if self._board is not None:
            self._board.report(f"{where}: {type(error).__name__}: {error}")

    # --- inputs and outputs -------------------------------------------------------------------

    def _batch(self, microbatch: int) -> Batch:
        while self._num_loaded <= microbatch:
            self._batches[self._num_loaded] = next(self._batches_left)
            self._num_loaded += 1
        return self._batches[microbatch]

    def _receive(self, message: Message) -> None:
        links = self._links_or_fail()
        tensor = links.wait(message)
        self._hand_over(message.consumer, message.payload, message.name, tensor, message.source)
        # What the sender consumed before it produced this has certainly arrived there.
        reached = self._position[message.producer]
        links.release(
            lambda m: m.destination == message.source and self._position[m.consumer] < reached
        )

    def _hand_over(
        self, consumer: Operation, payload: Payload, name: str, tensor: Tensor, source: int
    ) -> None:
        """Put a tensor from device ``source`` where its taker on this device finds it."""
        if payload is not Payload.CONDITIONING:
            self._store.put(consumer, payload, name, tensor)
        elif consumer.kind is not Kind.FORWARD:
            self._store.put(consumer, payload, f"{name}@{source}", tensor)
        else:
            edge = next(c for c in self._routes.conditioning if c.name == name)
            for stage in edge.consumer_stages:
                if self._placed[stage] == self._device:
                    taker = Operation(Kind.FORWARD, stage, consumer.microbatch)
                    self._store.put(taker, payload, name, tensor)

    def _deliver(
        self, producer: Operation, to_stage: int, payload: Payload, name: str, tensor: Tensor
    ) -> None:
        """Send a result to the device of ``to_stage``, or hand it over where that is this one."""
        consumer = Operation(producer.kind, to_stage, producer.microbatch)
        destination = self._placed[to_stage]
        if destination == self._device:
            self._hand_over(consumer, payload, name, tensor, self._device)
        else:
            message = Message(producer, consumer, payload, name, self._device, destination)
            self._outgoing[message] = tensor

    # --- operations ---------------------------------------------------------------------------

    def _run(self, operation: Operation) -> None:
        match operation.kind:
            case Kind.FORWARD:
                self._forward(operation)
            case Kind.WEIGHT_GRAD:
                self._weight_gradient(operation)
            case _:
                self._backward(operation)

    def _leaf(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return tensor.requires_grad_() if self._training else tensor

    def _forward(self, op: Operation) -> None:
        stage = op.stage
        batch = self._batch(op.microbatch)
        saved = self._take_inputs(op, batch)
        given = {
            name: self._cast(batch[name], self._backbone.batch_fields[name])
            for name in self._fields[stage]
        }
        if self._is_split and self._training:
            saved.later = Later()
        outputs, skips, provided = self._stages[stage](
            saved.inputs, saved.skips, {**given, **saved.conditioning}, saved.later
        )
        results = [(Payload.SKIP, name, tensor) for name, tensor in skips.items()]
        results += [(Payload.CONDITIONING, name, tensor) for name, tensor in provided.items()]
        if stage + 1 == len(self._placed):
            saved.loss = self._settings.loss(outputs[0], batch)
            self._losses.append(saved.loss.detach())
        else:
            results += [(Payload.BOUNDARY, str(i), t) for i, t in enumerate(outputs)]
        if stage == self._own[-1]:
            del self._batches[op.microbatch]
        for payload, name, tensor in results:
            if self._training:
                saved.edges[payload, name] = (
                    get_gradient_edge(tensor) if tensor.requires_grad else None
                )
            if payload is Payload.CONDITIONING:
                tensor = tensor.to(self._settings.dtype)
            for to_stage in self._takers(stage, payload, name):
                self._deliver(op, to_stage, payload, name, tensor.detach())
        if self._training:
            self._saved[stage, op.microbatch] = saved

    def _take_inputs(self, op: Operation, batch: Batch) -> _Saved:
        routes = self._routes
        specs = routes.boundaries[op.stage]
        if op.stage == 0:
            inputs: tuple[Tensor, ...] = (self._cast(batch["noisy"], specs[0]),)
        else:
            inputs = tuple(
                self._leaf(self._store.take(op, Payload.BOUNDARY, str(i)))
                for i in range(len(specs))
            )
        skips = {
            r.name: self._leaf(self._store.take(op, Payload.SKIP, r.name))
            for r in routes.skips_into(op.stage)
            if r.carrier is not Carrier.BOUNDARY
        }
        conditioning = {
            c.name: self._leaf(self._store.take(op, Payload.CONDITIONING, c.name).double())
            for c in routes.conditioning_into(op.stage)
        }
        return _Saved(inputs, skips, conditioning)

    def _takers(self, stage: int, payload: Payload, name: str) -> tuple[int, ...]:
        """The stages that a forward result goes to, one per receiving device."""
        match payload:
            case Payload.BOUNDARY:
                return (stage + 1,)
            case Payload.SKIP:
                return tuple(r.destination_stage for r in self._routes.skips if r.name == name)
            case Payload.CONDITIONING:
                return tuple(s for _, s in self._first_stages(name))

    def _first_stages(self, name: str) -> list[tuple[int, int]]:
        """(device, its first stage that uses the conditioning), by device."""
        edge = next(c for c in self._routes.conditioning if c.name == name)
        partition = self._routes.partition
        firsts = (
            (d, edge.first_stage_on(partition, d)) for d in range(partition.placement.num_devices)
        )
        return [(d, s) for d, s in firsts if s is not None]

    def _cast(self, tensor: Tensor, spec: TensorSpec) -> Tensor:
        return tensor.to(self._settings.device, self._settings.dtype_of(spec))

    def _backward(self, op: Operation) -> None:
        stage = op.stage
        saved = self._saved.pop((stage, op.microbatch))
        if self._is_last(op) and op.kind is Kind.BACKWARD:
            self._syncing[stage].close()  # the last microbatch's gradients may be reduced
        if saved.loss is not None:
            loss = saved.loss / self._schedule.num_microbatches
            scale = self._settings.grad_scale
            torch.autograd.backward(scale(loss) if scale is not None else loss)
        else:
            self._backward_from_edges(op, saved)
        self._deliver_gradients(op, saved)
        if saved.later is not None:
            self._later[stage, op.microbatch] = saved.later

    def _is_last(self, op: Operation) -> bool:
        return op.microbatch + 1 == self._schedule.num_microbatches

    def _weight_gradient(self, op: Operation) -> None:
        later = self._later.pop((op.stage, op.microbatch))
        if self._is_last(op) and op.stage in self._no_sync:
            # From here on a gradient that arrives may be reduced. Those that came with input
            # gradients are all there; an addition of nothing says so.
            self._syncing[op.stage].close()
            self._announce(op.stage, later.parameters)
        later.compute()

    def _announce(self, stage: int, awaited: set[nn.Parameter]) -> None:
        """Tell Megatron that all gradients of a stage but those ``awaited`` are complete."""
        elsewhere = tuple(f"{name}." for name in self._routes.replicated)
        complete = [
            parameter
            for name, parameter in _inside(self._stages[stage]).named_parameters()
            if parameter.requires_grad
            and parameter not in awaited
            and not name.startswith(elsewhere)
        ]
        if complete:
            torch.autograd.backward(complete, [torch.zeros_like(p) for p in complete])

    def _backward_from_edges(self, op: Operation, saved: _Saved) -> None:
        edges, gradients = [], []
        for (payload, name), edge in saved.edges.items():
            gradient = self._take_gradient(op, payload, name)
            if edge is not None:
                edges.append(edge)
                gradients.append(gradient)
        if edges:
            torch.autograd.backward(edges, gradients)

    def _take_gradient(self, op: Operation, payload: Payload, name: str) -> Tensor:
        if payload is not Payload.CONDITIONING:
            return self._store.take(op, payload, name)
        parts = [
            self._store.take(op, payload, f"{name}@{device}")
            for device, _ in self._first_stages(name)
        ]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def _deliver_gradients(self, op: Operation, saved: _Saved) -> None:
        stage, routes = op.stage, self._routes
        if stage > 0:
            for i, leaf in enumerate(saved.inputs):
                self._deliver(op, stage - 1, Payload.BOUNDARY, str(i), _gradient(leaf))
        for route in routes.skips_into(stage):
            if route.carrier is not Carrier.BOUNDARY:
                gradient = _gradient(saved.skips[route.name])
                self._deliver(op, route.source_stage, Payload.SKIP, route.name, gradient)
        for edge in routes.conditioning_into(stage):
            key = (edge.name, op.microbatch)
            gradient = _gradient(saved.conditioning[edge.name])
            if key in self._conditioning_gradients:
                gradient = self._conditioning_gradients.pop(key) + gradient
            if edge.first_stage_on(routes.partition, self._device) == stage:
                self._deliver(op, edge.source_stage, Payload.CONDITIONING, edge.name, gradient)
            else:
                self._conditioning_gradients[key] = gradient


def _inside(stage: nn.Module) -> nn.Module:
    """The stage within Megatron's wrappers, whose parameters have their own names."""
    while isinstance(inner := getattr(stage, "module", None), nn.Module):
        stage = inner
    return stage


def _gradient(leaf: Tensor) -> Tensor:
    """The gradient of a leaf, zero where nothing depended on it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
