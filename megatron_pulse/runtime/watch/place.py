"""What this process does, which its main thread writes and others read.

Writing costs an attribute; words are made where somebody asks.
"""

from __future__ import annotations

import linecache
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from megatron_pulse.runtime.watch.words import of_event

_WAITS = re.compile(
    r"\b(wait|barrier|all_reduce|all_gather\w*|reduce_scatter\w*|broadcast\w*|gather\w*|isend|irecv"
    r"|send|recv|synchronize|item|tolist|cpu|add|get|check|compare_set)\("
)
"""Calls in which a rank waits for others, or for its GPU, which does."""
_WAITING = ("torch.distributed", "megatron_pulse.runtime.messages", "megatron_pulse.runtime.job")


@dataclass(frozen=True)
class Phase:
    """A part of a run. In one that is ``patient`` work of unknown length is done by this process
    alone: as long as it computes, it moves. One that may take ``grants_s`` is given them beside the
    limit."""

    name: str
    is_patient: bool = False
    grants_s: float = 0.0


@dataclass(frozen=True)
class Sight:
    """Where the main thread is, in words, and whether it ``waits`` for others there."""

    words: str
    waits: bool


class Place:
    """Where the main thread of this process is."""

    def __init__(self) -> None:
        self.event: object = None
        """Of a step: what the executor does now."""
        self.moves = 0
        """Grows with every event and phase."""
        self.device = 0
        self.ranks: tuple[int, ...] = ()
        """Of the pipeline: this process's device, and the ranks of all."""
        self._phases: list[Phase] = [Phase("starting", is_patient=True)]
        self._main = threading.main_thread().ident

    @property
    def phase(self) -> Phase:
        """The innermost part of the run."""
        return self._phases[-1]

    def settle(self, name: str) -> None:
        """The run has begun: this is what it does between its other phases, no longer starting."""
        self._phases[0] = Phase(name, is_patient=True)

    @contextmanager
    def during(self, name: str, patient: bool = False, grants_s: float = 0.0) -> Iterator[None]:
        """Within, the run is in this phase."""
        self._phases.append(Phase(name, patient, grants_s))
        self.moves += 1
        try:
            yield
        finally:
            self._phases.pop()
            self.moves += 1

    def signature(self) -> int:
        """What changes when the main thread moves: events, phases, and its place in the code."""
        places: list[int] = [self.moves]
        frame = self._frame()
        while frame is not None:
            places += (id(frame.f_code), frame.f_lasti)
            frame = frame.f_back
        return hash(tuple(places))

    def look(self) -> Sight:
        """Where the main thread is. Source lines are read from disk where they can be."""
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
        return Sight(", ".join(doing), waits)

    def _frame(self) -> FrameType | None:
        return None if self._main is None else sys._current_frames().get(self._main)


def _calls(innermost: FrameType) -> list[str]:
    """The innermost function of Megatron's and the line of code that is being run, in words."""
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


HERE = Place()
