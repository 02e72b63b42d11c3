"""Progress of this process, written by the main thread and read by other threads, and its wording.

Writing sets an attribute; text (operation, message, peer rank) is formatted only when another
thread asks.
"""

from __future__ import annotations

import linecache
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

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

_WAITS = re.compile(
    r"\b(wait|barrier|all_reduce|all_gather\w*|reduce_scatter\w*|broadcast\w*|gather\w*|isend|irecv"
    r"|send|recv|synchronize|item|tolist|cpu|add|get|check|compare_set)\("
)
"""Calls that wait for other ranks, or for the GPU, which itself may wait for other ranks."""
_WAITING = ("torch.distributed", "megatron_pulse.runtime.p2p", "megatron_pulse.runtime.rendezvous")


@dataclass(frozen=True)
class Phase:
    """Phase of a run.

    In a patient phase this process alone does work of unknown length, and computing counts as
    progress. ``grants_s`` seconds are added to the limit of a phase.
    """

    name: str
    is_patient: bool = False
    grants_s: float = 0.0


@dataclass(frozen=True)
class Position:
    """Position of the main thread; ``waits`` is true if it waits for others there."""

    text: str
    waits: bool


class Progress:
    """Progress of the main thread of this process."""

    def __init__(self) -> None:
        self.event: object = None
        """Event of the step that the executor executes now."""
        self.moves = 0
        """Counter that grows with every event and phase."""
        self.device = 0
        self.ranks: tuple[int, ...] = ()
        """Pipeline device of this process, and global ranks of all pipeline devices."""
        self._phases: list[Phase] = [Phase("starting", is_patient=True)]
        self._main = threading.main_thread().ident

    @property
    def phase(self) -> Phase:
        """Innermost phase."""
        return self._phases[-1]

    def settle(self, name: str) -> None:
        """Name the outermost phase, once startup is over."""
        self._phases[0] = Phase(name, is_patient=True)

    @contextmanager
    def during(self, name: str, patient: bool = False, grants_s: float = 0.0) -> Iterator[None]:
        """Enter a phase for the duration of the context."""
        self._phases.append(Phase(name, patient, grants_s))
        self.moves += 1
        try:
            yield
        finally:
            self._phases.pop()
            self.moves += 1

    def signature(self) -> int:
        """Hash of the main thread's position: event count, phases, and program counters of its
        stack.
        """
        places: list[int] = [self.moves]
        frame = self._frame()
        while frame is not None:
            places += (id(frame.f_code), frame.f_lasti)
            frame = frame.f_back
        return hash(tuple(places))

    def position(self) -> Position:
        """Position of the main thread; source lines are read from disk if possible."""
        doing = [self.phase.name]
        event, frame = self.event, self._frame()
        if event is not None and self.ranks:
            doing.append(of_event(event, self.device, self.ranks))
        waits = False
        if frame is not None:
            module = frame.f_globals.get("__name__", "")
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            waits = module.startswith(_WAITING) or _WAITS.search(line) is not None
            if event is None:
                doing += _calls(frame)
        return Position(", ".join(doing), waits)

    def _frame(self) -> FrameType | None:
        return None if self._main is None else sys._current_frames().get(self._main)


def _calls(innermost: FrameType) -> list[str]:
    """Innermost Megatron function, and the current source line, in words."""
    found, frame = [], innermost
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("megatron."):
            found.append(f"in Megatron's {frame.f_code.co_qualname} ({module})")
            break
        frame = frame.f_back  # type: ignore[assignment]
    code = innermost.f_code
    line = linecache.getline(code.co_filename, innermost.f_lineno).strip()
    module = innermost.f_globals.get("__name__", code.co_filename)
    return [*found, f"at {line or code.co_qualname} ({module}:{innermost.f_lineno})"]


PROGRESS = Progress()


def of_operation(op: Operation) -> str:
    """Describe an operation, such as ``in F2:7 (stage 2, microbatch 7)``."""
    if op.kind is OpType.BUBBLE_TASK:
        return f"in {op} (bubble task {op.stage}, slice {op.microbatch})"
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
        f"{doing} {message.payload.value} {message.name} ({message.producer} to "
        f"{message.consumer}; operation {op}, stage {op.stage}, microbatch {op.microbatch}) {ends}"
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
            return "releasing sent buffers"
        case CollectiveEvent(what):
            return f"pipeline all-reduce for embedders: {what.value}"
    return str(event)
