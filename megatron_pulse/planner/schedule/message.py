"""Message: one tensor that travels from an operation to another."""

from __future__ import annotations

from typing import NamedTuple

from megatron_pulse.planner.layout.routes import Payload
from megatron_pulse.planner.schedule.operations import Operation, OpType

STEP_END = Operation(OpType.BUBBLE_TASK, 999_999_999, 0)
"""Consumer of messages that are read in the next step; there is no such operation."""


class Message(NamedTuple):
    """One tensor from ``source`` to ``destination`` (pipeline devices).

    ``producer`` is the operation on the source device whose end makes the tensor ready.
    ``consumer`` is the first operation on the destination device that needs the tensor. ``name`` is
    the skip's or the conditioning's name, or the index of the boundary tensor. It is empty for
    messages of a frozen component's slices. The order of the fields breaks ties between messages.
    """

    producer: Operation
    consumer: Operation
    payload: Payload
    name: str
    source: int
    destination: int

    def __str__(self) -> str:
        consumer = "the next step" if self.consumer == STEP_END else self.consumer
        return (
            f"{self.payload.value} {self.name} of {self.producer} for {consumer}, "
            f"device {self.source} to device {self.destination}"
        )
