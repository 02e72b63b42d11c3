"""Costs of context parallelism: what its ranks divide of each layer, and what they exchange."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class LayerContextCosts:
    """Effects of context parallelism on a layer.

    - ``time``, ``saved``, ``peak``: fractions of its seconds, of its saved bytes and of its peak
      bytes that the ranks divide.
    - ``boundary_bytes``: bytes per sample of the boundary tensors it takes that the ranks divide.
    - ``all_to_all_bytes``: bytes per sample, over all ranks, of the queries, keys, values and
      results of its ``num_attentions`` attentions over divided keys.
    - ``gathered_bytes``: bytes per sample of the ``num_gathers`` values that are gathered.
    """

    time: float
    saved: float
    peak: float
    boundary_bytes: int
    all_to_all_bytes: int = 0
    num_attentions: int = 0
    gathered_bytes: int = 0
    num_gathers: int = 0

    def sent_bytes(self, size: int) -> tuple[float, float]:
        """Bytes per sample that ``size`` ranks send together in a forward: by all-to-alls, and for
        gathers.

        A rank has 1 / size of an attention's tensors. Of a gathered value it sends its part to
        every other rank. A backward sends as much.
        """
        return (size - 1) / size * self.all_to_all_bytes, (size - 1) * self.gathered_bytes


@dataclass(frozen=True)
class ContextCosts:
    """Costs of context parallelism for all layers of a profile.

    - ``heads``: numbers of heads of the attentions over divided keys. The context degree, times the
      tensor degree, divides them.
    - ``skips``, ``conditioning``: bytes per sample that ranks divide, in the profile's order.
    """

    heads: tuple[int, ...]
    layers: tuple[LayerContextCosts, ...]
    skips: tuple[int, ...] = ()
    conditioning: tuple[int, ...] = ()

    def divides(self, size: int) -> bool:
        """True if ``size`` ranks can share the heads of every attention."""
        return not any(heads % size for heads in self.heads)

    def faults(self, num_layers: int, num_skips: int, num_edges: int) -> Iterator[str]:
        """Yield contradictions to a profile of that many layers, skips and conditioning edges."""
        for name, expected in (
            ("layers", num_layers),
            ("skips", num_skips),
            ("conditioning", num_edges),
        ):
            if (count := len(getattr(self, name))) != expected:
                yield f"context.{name} has {count} entries, expected {expected}"
        if any(heads < 1 for heads in self.heads):
            yield f"context.heads is {list(self.heads)}; they must be 1 or more"
        if any(num_bytes < 0 for num_bytes in (*self.skips, *self.conditioning)):
            yield "context: bytes of skips and conditioning must be 0 or more"
        for i, layer in enumerate(self.layers):
            for each in fields(layer):
                value = getattr(layer, each.name)
                if value < 0 or (each.name in SHARES and value > 1):
                    allowed = "from 0 to 1" if each.name in SHARES else "0 or more"
                    yield f"context.layers[{i}].{each.name} is {value}; it must be {allowed}"


SHARES = ("time", "saved", "peak")
"""Fields of ``LayerContextCosts`` that are fractions."""


def divided_share(whole: float, part: float, size: int = 2) -> float:
    """Fraction of ``whole`` that ranks divide, if one of ``size`` has ``part`` (Amdahl's law)."""
    share = size / (size - 1) * (1 - part / whole) if whole else 1.0
    return min(1.0, max(0.0, share))


def part_of_rank(share: float, size: int) -> float:
    """What one of ``size`` ranks has of a whole of which they divide ``share``."""
    return 1 - share + share / size
