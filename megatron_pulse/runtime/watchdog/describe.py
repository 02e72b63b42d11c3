"""Descriptions of step events: operation, message, and the peer rank."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_pulse.planner.program.device_program import (
    CollectiveEvent,
    Receive,
    Release,
    Run,
    Send,
    Wait,
)
from megatron_pulse.planner.schedule.message import Message
from megatron_pulse.planner.schedule.operations import Operation, OpType


def of_operation(op: Operation) -> str:
    """Describe an operation, such as ``in F2:7 (stage 2, microbatch 7)``."""
    if op.kind is OpType.FILLER:
        return f"in {op} (filler {op.stage}, slice {op.microbatch})"
    return f"in {op} (stage {op.stage}, microbatch {op.microbatch})"


def of_message(doing: str, message: Message, device: int, ranks: Sequence[int]) -> str:
    """Describe a message that ``device`` sends or receives, with the peer's device and rank."""
    sending = message.source == device
    peer = message.destination if sending else message.source
    ends = f"{'to' if sending else 'from'} pipeline device {peer} (rank {ranks[peer]})"
    op = message.producer if sending else message.consumer
    doing = f"{doing} {'sending' if sending else 'receiving'}".strip()
    if message.payload.is_carried:
        return f"{doing} {message} {ends}"
    return (
        f"{doing} {message.payload.value} {message.name} "
        f"({message.producer} to {message.consumer}; operation {op}, stage {op.stage}, "
        f"microbatch {op.microbatch}) {ends}"
    )


def of_event(event: object, device: int, ranks: Sequence[int]) -> str:
    """Describe an event of a device; ``ranks`` are the global ranks of the pipeline's devices."""
    match event:
        case Run(operation):
            return of_operation(operation)
        case Send(message) | Receive(message):
            return of_message("starting", message, device, ranks)
        case Wait(message):
            return of_message("", message, device, ranks)
        case Release():
            return "letting go what was sent"
        case CollectiveEvent(what):
            return f"joining all devices of the pipeline for embedders: {what.value}"
    return str(event)
