"""What operations of a stage have in use beside what is held, layer by layer.

With layers 0 to 2, when layer 1 works (saved: s, computed again: a; what is held: all below)::

    F             s0 s1 ..     counted from its end
    R             s0 s1 s2     a0 a1 ..       R goes forward too
    B             s0 s1 ..     a1 alone, as its own work
    B after an R  s0 s1 ..     a0 a1 ..

so what layers behind it save, or have computed again, is gone or not there yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.tune.memory.relief import Relief
from megatron_pulse.profile.record.times import LayerTimes


class Works(NamedTuple):
    """Bytes in use at most beside what is held when a forward ends, or another operation begins;
    the last of a backward whose activations an R has computed again."""

    forward: float
    computing: float
    backward: float
    after: float


class Working:
    """Layers with these ``times``, each layer's work divided into so many ``parts``, where
    ``relief`` says what is not kept of which."""

    def __init__(
        self,
        times: Sequence[LayerTimes],
        parts: Sequence[int],
        costs: ChainCosts,
        relief: Relief,
    ) -> None:
        num = len(times)
        every: Any = np.arange(num)
        recomputed = np.isin(every, list(relief.again))
        part = np.isin(every, list(relief.selective))
        shares = 1.0 / np.array(parts)
        forward = np.array([layer.forward_bytes for layer in times]) * shares
        whole, kept = (
            np.where(part, *(np.array([of(layer, p) for layer in times]) for p in (True, False)))
            * shares
            for of in (LayerTimes.most_bytes, LayerTimes.kept_bytes)
        )
        own = np.maximum(0.0, whole - np.where(recomputed, 0.0, kept))
        first = np.where(recomputed, np.where(forward > 0, forward, whole), own)
        saved: Any = np.array(costs.saved_bytes, float)
        again = np.array(costs.again_bytes or (0.0,) * num, float)
        waiting = np.array(costs.waiting_bytes or costs.saved_bytes, float)
        rest = own - again
        # Of each layer, as if all that follow in the chain were of its stage.
        self._columns: list[tuple[Any, list[float]]] = [
            (most + np.cumsum(behind), [0.0, *np.cumsum(behind).tolist()])
            for most, behind in (
                (first, saved),
                (np.where(recomputed, rest, 0.0), again),
                (own, saved),
                (rest, saved + again),
                (own, saved - waiting),
                (rest, saved - waiting + again),
            )
        ]

    def of(self, first: int, end: int, split: bool) -> Works:
        """Of a stage with layers from ``first`` to before ``end``."""
        there, back = self._columns[:2], self._columns[4:] if split else self._columns[2:4]
        return Works(
            *(max(0.0, float(most[first:end].max()) - to[end]) for most, to in there + back)
        )

    def beside(self, first: int, end: int, split: bool) -> float:
        """The most of any of these, beside the more of what waits for weight gradients and what was
        saved before: as much is counted of a stage's microbatch in any case."""
        works = self.of(first, end, split)
        if not split:
            return max(works)
        less = self._columns[4][1]
        more = max(0.0, less[first] - less[end])
        return max(works.forward, works.computing, works.backward - more, works.after - more)
