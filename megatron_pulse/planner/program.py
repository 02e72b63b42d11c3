"""The events of one device in one step: what the executor does, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_pulse.planner.communication import Message
    from megatron_pulse.planner.schedule.operations import Operation


@dataclass(frozen=True)
class Issue:
    """Start these messages as one group: ``(is_send, message)`` in canonical order."""

    ops: tuple[tuple[bool, Message], ...]


@dataclass(frozen=True)
class Wait:
    """Wait until a message that was issued before has arrived."""

    message: Message


@dataclass(frozen=True)
class Run:
    """Run an operation."""

    operation: Operation


Event = Issue | Wait | Run
