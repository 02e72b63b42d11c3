"""What an executor calls beside its stages: fillers, what their slices send, and recorders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from megatron_pulse.planner.schedule.message import Message
from megatron_pulse.planner.step.program import Event

Workload = Callable[[int], None]
"""What a filler runs: takes the number of a slice, and is no part of the backbone."""


class Carrier(Protocol):
    """What slices of fillers leave for slices on other devices and for the next step, or what
    forwards predict for the next."""

    def outgoing(self, message: Message) -> Tensor:
        """What an operation that has run sends."""
        ...

    def like(self, message: Message) -> Tensor:
        """A tensor without memory, like what ``message`` brings."""
        ...

    def take(self, message: Message, tensor: Tensor) -> None:
        """``message`` has arrived."""
        ...


class Recorder(Protocol):
    """What is called around every event of a step; nothing may wait in it."""

    def begin(self, event: Event) -> None:
        """``event`` begins."""
        ...

    def end(self, event: Event) -> None:
        """``event``, which began last, has ended."""
        ...
