"""Costs of context parallelism: what its ranks divide of each layer, and what they exchange."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, fields

from megatron_pulse.backbone.token_shares import uses_ring


@dataclass(frozen=True)
class RankShare:
    """Share of a whole that one of K ranks has: ``fixed`` + ``divided`` / K.

    The sum may exceed 1, since ranks also hold what they exchange.
    """

    fixed: float
    divided: float

    def of(self, size: int) -> float:
        """Share of one of ``size`` ranks."""
        return self.fixed + self.divided / size

    @classmethod
    def fit(cls, whole: float, parts: Mapping[int, float]) -> RankShare:
        """Share from what one rank of the one or two sizes in ``parts`` has.

        With one size, the whole is that of a single rank (Amdahl's law).
        """
        if not whole:
            return cls(0.0, 1.0)
        (size, part), *more = parts.items()
        other, beside = more[0] if more else (1, whole)
        divided = max(0.0, (part - beside) / (1 / size - 1 / other))
        fixed = max(0.0, part - divided / size)
        return cls(fixed / whole, (part - fixed) * size / whole)


@dataclass(frozen=True)
class LayerContextCosts:
    """Effects of context parallelism on a layer.

    - ``time``, ``saved``, ``peak``: shares of a rank in its seconds without exchanges, in its saved
      bytes and in its peak bytes.
    - ``boundary_bytes``: bytes per sample of the boundary tensors it takes that the ranks divide.
    - ``all_to_all_bytes``: bytes per sample, over all ranks, of the queries, keys, values and
      results of its ``num_attentions`` attentions over divided keys.
    - ``gathered_bytes``: bytes per sample of the ``num_gathers`` values that are gathered.
    """

    time: RankShare
    saved: RankShare
    peak: RankShare
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
        return not uses_ring(self.heads, size)

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
                parts = astuple(value) if isinstance(value, RankShare) else (value,)
                if not all(0 <= part <= _MOST for part in parts):
                    yield (
                        f"context.layers[{i}].{each.name} is {', '.join(map(str, parts))}; it must "
                        f"be from 0 to {_MOST:g}"
                    )


_MOST = 1e15
"""Largest bytes and counts."""
