"""Tensors that wait on their device: skips, conditioning, boundaries handed over at a turn.

Each has one producer and a known last reader, so after a step the store must be empty; what is
left is a leak and is reported by name.
"""

from __future__ import annotations

import torch

from megatron_pulse.planner.layout.routes import Payload
from megatron_pulse.planner.schedule.operations import Operation


class LeakError(RuntimeError):
    """Tensors were left behind at the end of a step."""


class TensorStore:
    """Tensors keyed by the operation that will take them, their payload and their name."""

    def __init__(self) -> None:
        self._held: dict[tuple[Operation, Payload, str], torch.Tensor] = {}

    def put(self, consumer: Operation, payload: Payload, name: str, tensor: torch.Tensor) -> None:
        """Keep ``tensor`` for ``consumer``; the same key twice is an error."""
        key = (consumer, payload, name)
        if key in self._held:
            raise LeakError(f"{payload.value} {name} for {consumer} was delivered twice")
        self._held[key] = tensor

    def take(self, consumer: Operation, payload: Payload, name: str) -> torch.Tensor:
        """Hand the tensor over; the store lets go of it."""
        return self._held.pop((consumer, payload, name))

    def clear(self) -> None:
        """Let go of everything (after an error)."""
        self._held.clear()

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return sum(t.numel() * t.element_size() for t in self._held.values())

    def require_empty(self) -> None:
        """Raise LeakError naming whatever was not taken."""
        if self._held:
            names = ", ".join(f"{p.value} {n} for {op}" for op, p, n in self._held)
            self._held.clear()
            raise LeakError(f"left in the tensor store after the step: {names}")
