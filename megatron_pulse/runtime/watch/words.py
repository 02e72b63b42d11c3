"""Events of a step in words: what an operation computes, where a message comes from."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_pulse.planner.schedule.message import Message
from megatron_pulse.planner.schedule.operations import Kind, Operation
from megatron_pulse.planner.step.program import Receive, Release, Run, Send, Together, Wait


def of_operation(op: Operation) -> str:
    """``in F2:7 (stage 2, microbatch 7)``."""
    if op.kind is Kind.FILLER:
        return f"in {op} (filler {op.stage}, slice {op.microbatch})"
    return f"in {op} (stage {op.stage}, microbatch {op.microbatch})"


def of_message(doing: str, message: Message, device: int, ranks: Sequence[int]) -> str:
    """A message, as ``device`` sends or receives it, with its other end and that one's rank."""
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
    """What a device does; ``ranks`` are those of the pipeline's devices."""
    match event:
        case Run(operation):
            return of_operation(operation)
        case Send(message) | Receive(message):
            return of_message("starting", message, device, ranks)
        case Wait(message):
            return of_message("", message, device, ranks)
        case Release():
            return "letting go what was sent"
        case Together(what):
            return f"joining all devices of the pipeline for embedders: {what.value}"
    return str(event)
