"""Cost of a message between two devices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A connection between pipeline devices, each way; the default costs nothing."""

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")

    def time_s(self, num_bytes: float) -> float:
        """Seconds for one message."""
        return self.latency_s + num_bytes / self.bytes_per_s if num_bytes else 0.0
