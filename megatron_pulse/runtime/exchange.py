"""What operations take and give: tensors that wait on their device, and messages to others.

A result goes to every stage that takes it: into the store where that stage is on this device, into
the messages that the plan's next round sends where it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_pulse.backbone.chain import COMPUTE, TensorSpec
from megatron_pulse.planner.layout.routes import Delivery, Payload, Routes
from megatron_pulse.planner.schedule.message import Message
from megatron_pulse.planner.schedule.operations import Kind, Operation, Schedule
from megatron_pulse.runtime.failures import PulseError
from megatron_pulse.runtime.links import Links
from megatron_pulse.runtime.skips import TensorStore


def message_spec(routes: Routes, message: Message) -> TensorSpec:
    """Shape and dtype of what ``message`` carries.

    A gradient has its tensor's, except conditioning's, a sum in fp64 (see Stage) where it is one.
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
            is_sum = spec.dtype == COMPUTE or getattr(torch, spec.dtype).is_floating_point
            return replace(spec, dtype="float64") if is_gradient and is_sum else spec


@dataclass(frozen=True)
class Tensors:
    """What crosses into a stage: boundary tensors, skips and conditioning by name.

    Of a forward its inputs, of a backward their gradients.
    """

    boundary: tuple[Tensor, ...]
    skips: dict[str, Tensor]
    conditioning: dict[str, Tensor]

    def map(self, function: Callable[[Tensor], Tensor]) -> Tensors:
        """``function`` of every tensor."""
        return Tensors(
            tuple(function(t) for t in self.boundary),
            {name: function(t) for name, t in self.skips.items()},
            {name: function(t) for name, t in self.conditioning.items()},
        )


class Exchange:
    """Inputs and outputs of the operations of one device in ``schedule``."""

    def __init__(
        self, routes: Routes, schedule: Schedule, device: int, links: Links | None
    ) -> None:
        placement = routes.partition.placement
        self._device = device
        self._links = links
        self._placed = placement.device_of_stage
        own = placement.stages_of_device(device)
        # One stage on every device that uses it takes a conditioning; the device's others share.
        self._first_users: dict[str, dict[int, int]] = {c.name: {} for c in routes.conditioning}
        for delivery in routes.deliveries:
            if delivery.payload is Payload.CONDITIONING:
                stage = delivery.destination
                self._first_users[delivery.name][self._placed[stage]] = stage
        self._own_users = {
            c.name: tuple(s for s in c.consumer_stages if s in own) for c in routes.conditioning
        }
        self._takers: dict[tuple[int, Payload, str], list[int]] = {}
        for delivery in (d for s in own for d in routes.given_by(s)):
            key = (delivery.source, delivery.payload, delivery.name)
            self._takers.setdefault(key, []).append(delivery.destination)
        self._boundaries = {s: _of(Payload.BOUNDARY, routes.given_to(s)) for s in own}
        self._skips = {s: _of(Payload.SKIP, routes.given_to(s)) for s in own}
        self._conditioning = {s: routes.conditioning_into(s) for s in own}
        self._position = {op: i for order in schedule.order for i, op in enumerate(order)}
        self._store = TensorStore()
        self._conditioning_gradients: dict[tuple[str, int], Tensor] = {}
        self._outgoing: dict[Message, Tensor] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes in the tensor store (zero between steps)."""
        return self._store.num_bytes

    def take_inputs(self, op: Operation) -> Tensors:
        """What other stages gave for the forward ``op``."""
        stage, take = op.stage, self._store.take
        return Tensors(
            tuple(take(op, Payload.BOUNDARY, d.name) for d in self._boundaries[stage]),
            {d.name: take(op, Payload.SKIP, d.name) for d in self._skips[stage]},
            {c.name: take(op, Payload.CONDITIONING, c.name) for c in self._conditioning[stage]},
        )

    def deliver(self, op: Operation, payload: Payload, name: str, tensor: Tensor) -> None:
        """Give a result of the forward ``op`` to every stage that takes it."""
        for to_stage in self._takers[op.stage, payload, name]:
            self._deliver_to(op, to_stage, payload, name, tensor)

    def take_gradient(self, op: Operation, payload: Payload, name: str) -> Tensor:
        """The gradient of a forward's result, for its backward ``op``."""
        if payload is not Payload.CONDITIONING:
            return self._store.take(op, payload, name)
        parts = [self._store.take(op, payload, f"{name}@{d}") for d in self._first_users[name]]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def deliver_gradients(self, op: Operation, gradients: Tensors) -> None:
        """Give the gradients of a forward's inputs to the stages that they came from.

        Those of a conditioning are summed over the device's stages first.
        """
        for delivery in self._boundaries[op.stage]:
            tensor = gradients.boundary[int(delivery.name)]
            self._deliver_to(op, delivery.source, Payload.BOUNDARY, delivery.name, tensor)
        for delivery in self._skips[op.stage]:
            tensor = gradients.skips[delivery.name]
            self._deliver_to(op, delivery.source, Payload.SKIP, delivery.name, tensor)
        for edge in self._conditioning[op.stage]:
            name, source = edge.name, edge.source_stage
            key, total = (name, op.microbatch), gradients.conditioning[name]
            if key in self._conditioning_gradients:
                total = self._conditioning_gradients.pop(key) + total
            if self._first_users[name][self._device] == op.stage:
                self._deliver_to(op, source, Payload.CONDITIONING, name, total)
            else:
                self._conditioning_gradients[key] = total

    def issue(self, ops: Sequence[tuple[bool, Message]]) -> None:
        """Start one round of messages."""
        self._links_or_fail().issue(ops, self._outgoing)

    def receive(self, message: Message) -> None:
        """Wait for ``message`` and put it where its taker finds it."""
        links = self._links_or_fail()
        tensor = links.wait(message)
        self._hand_over(message.consumer, message.payload, message.name, tensor, message.source)
        # What the sender consumed before it produced this has certainly arrived there.
        reached = self._position[message.producer]
        links.release(
            lambda m: m.destination == message.source and self._position[m.consumer] < reached
        )

    def drain(self) -> None:
        """Wait, within the links' limit, for all transfers."""
        if self._links is not None:
            self._links.drain()

    def require_empty(self) -> None:
        """Raise LeakError if a tensor was not taken."""
        self._store.require_empty()

    def clear(self) -> None:
        """Let go of everything (after an error)."""
        self._store.clear()
        self._conditioning_gradients.clear()
        self._outgoing.clear()
        if self._links is not None:
            self._links.abandon()

    def _links_or_fail(self) -> Links:
        if self._links is None:
            raise PulseError("the plan sends messages, but this executor has no links")
        return self._links

    def _hand_over(
        self, consumer: Operation, payload: Payload, name: str, tensor: Tensor, source: int
    ) -> None:
        """Put a tensor from device ``source`` where its taker on this device finds it."""
        if payload is not Payload.CONDITIONING:
            self._store.put(consumer, payload, name, tensor)
        elif consumer.kind is not Kind.FORWARD:
            self._store.put(consumer, payload, f"{name}@{source}", tensor)
        else:
            for stage in self._own_users[name]:
                taker = Operation(Kind.FORWARD, stage, consumer.microbatch)
                self._store.put(taker, payload, name, tensor)

    def _deliver_to(
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


def _of(payload: Payload, deliveries: Sequence[Delivery]) -> tuple[Delivery, ...]:
    return tuple(d for d in deliveries if d.payload is payload)
