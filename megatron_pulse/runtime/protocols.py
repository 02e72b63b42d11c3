"""Protocols that an executor calls: bubble tasks, carriers of their messages, and recorders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from megatron_pulse.planner.program.device_program import Event
from megatron_pulse.planner.schedule.message import Message

SliceFunction = Callable[[int], None]
"""Runs a slice, given its number, of a bubble task, which is not part of the backbone."""


class Carrier(Protocol):
    """Carrier of tensors that no stage produces.

    These are results of bubble-task slices, for other devices or the next step, or predictions for
    the next forward pass.
    """

    def outgoing(self, message: Message) -> Tensor:
        """Tensor to send as ``message``, whose producer has run."""
        ...

    def like(self, message: Message) -> Tensor:
        """Meta tensor with the shape and dtype of ``message``."""
        ...

    def take(self, message: Message, tensor: Tensor) -> None:
        """Store the tensor of a received message."""
        ...


class Recorder(Protocol):
    """Callbacks around every event of a step; they must not wait."""

    def begin(self, event: Event) -> None:
        """Mark the start of ``event``."""
        ...

    def end(self, event: Event) -> None:
        """Mark the end of ``event``, the last one begun."""
        ...
