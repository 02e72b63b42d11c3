"""Inputs and outputs of operations: tensors kept on their device, and messages to other devices.

Each result goes to every consuming stage: into the tensor store for stages on this device, into a
planned message for stages elsewhere. Each tensor in the store has one producer and one last
consumer. After a step the store must be empty; remaining tensors are reported by name.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_pulse.planner.layout.routes import Payload, Routes
from megatron_pulse.planner.program.device_program import Wait
from megatron_pulse.planner.schedule.message import Message
from megatron_pulse.planner.schedule.operations import Operation, OpType
from megatron_pulse.runtime.failure_board import PulseError
from megatron_pulse.runtime.p2p.transfers import Links
from megatron_pulse.runtime.stage import summed

type Tensors = dict[tuple[Payload, str], Tensor]
"""Tensors that enter or leave a stage, by payload and name (see ``Delivery``)."""


class TensorRouter:
    """Delivers inputs and outputs of one device's operations."""

    def __init__(self, routes: Routes, device: int, links: Links | None) -> None:
        placement = routes.partition.placement
        self._device = device
        self._links = links
        self._placed = placement.device_of_stage
        own = placement.stages_of_device(device)
        # One stage per consuming device receives a conditioning; the device's other stages share
        # it.
        self._first_users: dict[str, dict[int, int]] = {c.name: {} for c in routes.conditioning}
        for delivery in routes.deliveries:
            if delivery.payload is Payload.CONDITIONING:
                stage = delivery.destination
                self._first_users[delivery.name][self._placed[stage]] = stage
        self._own_users = {
            c.name: tuple(s for s in c.consumer_stages if s in own) for c in routes.conditioning
        }
        self._takers: dict[tuple[int, Payload, str], list[int]] = {}
        given = [delivery for s in own for delivery in routes.given_by(s)]
        for delivery in given:
            key = (delivery.source, delivery.payload, delivery.name)
            self._takers.setdefault(key, []).append(delivery.destination)
        self._wanted = {(d.source, d.payload, d.name) for d in given if d.needs_grad}
        self._inputs = {s: _inputs(routes, s) for s in own}
        self._store = TensorStore()
        self._conditioning_gradients: dict[tuple[str, int], Tensor] = {}
        self._outgoing: dict[Message, Tensor] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes in the tensor store; zero between steps."""
        return self._store.num_bytes

    def take_inputs(self, op: Operation) -> Tensors:
        """Take the inputs of the forward ``op`` that other stages gave, conditioning in fp64.

        In training, inputs that need a gradient have ``requires_grad`` set. See ``Stage``.
        """
        taken = {}
        for payload, name, _, needs_grad in self._inputs[op.stage]:
            tensor = self._store.take(op, payload, name)
            if payload is Payload.CONDITIONING:
                tensor = summed(tensor)
            tensor = tensor.detach()
            taken[payload, name] = tensor.requires_grad_(needs_grad and torch.is_grad_enabled())
        return taken

    def needs_grad(self, stage: int, payload: Payload, name: str) -> bool:
        """True if a result of ``stage`` needs a gradient."""
        return (stage, payload, name) in self._wanted

    def deliver(self, op: Operation, payload: Payload, name: str, tensor: Tensor) -> None:
        """Give a result of the forward ``op`` to every consuming stage."""
        for to_stage in self._takers[op.stage, payload, name]:
            self._deliver_to(op, to_stage, payload, name, tensor)

    def take_gradient(self, op: Operation, payload: Payload, name: str) -> Tensor:
        """Take the gradient of a forward's result, for its backward ``op``."""
        if payload is not Payload.CONDITIONING:
            return self._store.take(op, payload, name)
        parts = [self._store.take(op, payload, f"{name}@{d}") for d in self._first_users[name]]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def deliver_gradients(self, op: Operation, gradients: Tensors) -> None:
        """Return input gradients of a forward to the producing stages.

        Gradients of a conditioning are first summed over the device's stages.
        """
        for payload, name, source, needs_grad in self._inputs[op.stage]:
            if not needs_grad:
                continue
            total = gradients[payload, name]
            if payload is Payload.CONDITIONING:
                key = name, op.microbatch
                if key in self._conditioning_gradients:
                    total = self._conditioning_gradients.pop(key) + total
                if self._first_users[name][self._device] != op.stage:
                    self._conditioning_gradients[key] = total
                    continue
            self._deliver_to(op, source, payload, name, total)

    def send(self, message: Message) -> None:
        """Start sending the tensor stored for ``message``."""
        self._links_or_fail().send(message, self._outgoing.pop(message))

    def expect(self, message: Message, like: Tensor) -> None:
        """Start receiving ``message``, with the shape and dtype of ``like``."""
        self._links_or_fail().receive(message, like)

    def offer(self, message: Message, tensor: Tensor) -> None:
        """Store ``tensor`` to be sent as ``message``."""
        self._outgoing[message] = tensor

    def arrived(self, wait: Wait) -> Tensor:
        """Wait for a message, then release sends that are complete by the plan."""
        links = self._links_or_fail()
        tensor = links.wait(wait.message)
        links.complete_sends(wait.sent)
        return tensor

    def release(self, sent: Sequence[Message]) -> None:
        """Release sends that are complete by the plan's times."""
        self._links_or_fail().release(sent)

    def receive(self, wait: Wait) -> None:
        """Wait for a message and store it for its consumer."""
        message, tensor = wait.message, self.arrived(wait)
        self._hand_over(message.consumer, message.payload, message.name, tensor, message.source)

    def drain(self) -> None:
        """Wait for all transfers, within the links' time limit."""
        if self._links is not None:
            self._links.drain()

    def require_empty(self) -> None:
        """Raise LeakError if a tensor was not taken."""
        self._store.require_empty()

    def clear(self) -> None:
        """Drop all tensors after an error."""
        self._store.clear()
        self._conditioning_gradients.clear()
        self._outgoing.clear()
        if self._links is not None:
            self._links.abandon()

    def _links_or_fail(self) -> Links:
        if self._links is None:
            raise PulseError("the program sends messages, but this executor has no links")
        return self._links

    def _hand_over(
        self, consumer: Operation, payload: Payload, name: str, tensor: Tensor, source: int
    ) -> None:
        """Store a tensor from device ``source`` for its consumer on this device."""
        if payload is not Payload.CONDITIONING:
            self._store.put(consumer, payload, name, tensor)
        elif consumer.kind is not OpType.FORWARD:
            self._store.put(consumer, payload, f"{name}@{source}", tensor)
        else:
            for stage in self._own_users[name]:
                taker = Operation(OpType.FORWARD, stage, consumer.microbatch)
                self._store.put(taker, payload, name, tensor)

    def _deliver_to(
        self, producer: Operation, to_stage: int, payload: Payload, name: str, tensor: Tensor
    ) -> None:
        """Send a result to the device of ``to_stage``, or store it if local."""
        consumer = Operation(producer.kind, to_stage, producer.microbatch)
        destination = self._placed[to_stage]
        if destination == self._device:
            self._hand_over(consumer, payload, name, tensor, self._device)
        else:
            message = Message(producer, consumer, payload, name, self._device, destination)
            self._outgoing[message] = tensor


def _inputs(routes: Routes, stage: int) -> tuple[tuple[Payload, str, int, bool], ...]:
    """Inputs of ``stage`` from other stages: payload, name, source stage, and need for a gradient.

    A conditioning is listed for every stage that uses it.
    """
    own = [d for d in routes.given_to(stage) if d.payload is not Payload.CONDITIONING]
    return (
        *((d.payload, d.name, d.source, d.needs_grad) for d in own),
        *(
            (Payload.CONDITIONING, c.name, c.source_stage, c.needs_grad)
            for c in routes.conditioning_into(stage)
        ),
    )


class LeakError(RuntimeError):
    """Tensors remain in the store at the end of a step."""


class TensorStore:
    """Tensors keyed by consuming operation, payload and name."""

    def __init__(self) -> None:
        self._held: dict[tuple[Operation, Payload, str], torch.Tensor] = {}

    def put(self, consumer: Operation, payload: Payload, name: str, tensor: torch.Tensor) -> None:
        """Store ``tensor`` for ``consumer``. Raises LeakError if the key exists."""
        key = (consumer, payload, name)
        if key in self._held:
            raise LeakError(f"{payload.value} {name} for {consumer} was delivered twice")
        self._held[key] = tensor

    def take(self, consumer: Operation, payload: Payload, name: str) -> torch.Tensor:
        """Remove and return the tensor."""
        return self._held.pop((consumer, payload, name))

    def clear(self) -> None:
        """Drop all tensors after an error."""
        self._held.clear()

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return sum(t.numel() * t.element_size() for t in self._held.values())

    def require_empty(self) -> None:
        """Raise LeakError naming all tensors that were not taken."""
        if self._held:
            names = ", ".join(f"{p.value} {n} for {op}" for op, p, n in self._held)
            self._held.clear()
            raise LeakError(f"left in the tensor store after the step: {names}")
