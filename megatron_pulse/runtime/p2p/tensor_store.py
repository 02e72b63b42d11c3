"""Tensor store of a device: skips, conditioning, and boundaries handed over at a turn.

Each tensor has one producer and one last consumer. The store must therefore be empty after a step;
remaining tensors are reported by name.
"""

from __future__ import annotations

import torch

from megatron_pulse.planner.layout.routes import Payload
from megatron_pulse.planner.schedule.operations import Operation


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
