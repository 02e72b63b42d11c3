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
    - ``ring_bytes``: bytes per sample, over all ranks, of the keys and values, which ring attention
      passes on where heads do not divide (0: rings are not known).
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
    ring_bytes: int = 0

    def sent_bytes(
        self, size: int, *, ring: bool = False, backward: bool = False
    ) -> tuple[float, float]:
        """Bytes per sample that ``size`` ranks send together in a pass: for attentions, and for
        gathers.

        A rank has 1 / size of an attention's tensors. In a ``ring`` its keys and values visit every
        other rank, in a ``backward`` with as many gradients. Of a gathered value it sends its part
        to every other rank.
        """
        attended = (size - 1) / size * self.all_to_all_bytes
        if ring:
            attended = (1 + backward) * (size - 1) * self.ring_bytes
        return attended, (size - 1) * self.gathered_bytes


@dataclass(frozen=True)
class ContextCosts:
    """Costs of context parallelism for all layers of a profile.

    - ``heads``: numbers of heads of the attentions over divided keys. The context degree, times the
      tensor degree, divides them, or attentions are rings.
    - ``skips``, ``conditioning``: bytes per sample that ranks divide, in the profile's order.
    """

    heads: tuple[int, ...]
    layers: tuple[LayerContextCosts, ...]
    skips: tuple[int, ...] = ()
    conditioning: tuple[int, ...] = ()

    def is_ring(self, size: int) -> bool:
        """True if ``size`` context-parallel ranks cannot share the heads of every attention."""
        return uses_ring(self.heads, size)

    def refusal(self, size: int, tensor: int = 1) -> str:
        """Reason why ``size`` ranks cannot share tokens, beside ``tensor`` that share heads; ""
        if they can."""
        if size == 1 or not uses_ring(self.heads, size, tensor):
            return ""
        degrees = f"T x K = {tensor} x {size}" if tensor > 1 else f"K = {size}"
        said = f"{degrees} does not divide {', '.join(map(str, self.heads))} heads"
        if tensor > 1:
            return f"{said}, and plans combine ring attention with no tensor parallelism"
        attending = [layer for layer in self.layers if layer.num_attentions]
        if all(layer.ring_bytes for layer in attending):
            return ""
        return f"{said}, and the profile has no costs of ring attention"

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
