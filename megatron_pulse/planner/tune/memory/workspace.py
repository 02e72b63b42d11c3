"""Working memory of a stage's operations beside the activations held, layer by layer.

Example with layers 0 to 2 while layer 1 runs (s: saved, a: recomputed)::

    F             s0 s1 ..     counted from its end
    R             s0 s1 s2     a0 a1 ..       R goes forward too
    B             s0 s1 ..     a1 alone, as its own work
    B after an R  s0 s1 ..     a0 a1 ..

Activations of later layers, saved or recomputed, are already freed or not yet there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_pulse.backbone.activations import ActivationPolicies
from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.profile.layer_records import LayerTimes


class OperationWorkspace(NamedTuple):
    """Peak bytes beside what is held when a forward ends or another operation begins.

    ``after`` belongs to a backward whose activations a separate R has recomputed.
    """

    forward: float
    computing: float
    backward: float
    after: float


class Workspace:
    """Workspace of the layers with these ``times`` under the policies ``activations``.

    Tensor parallelism divides the work of layer i into ``parts[i]`` parts.
    """

    def __init__(
        self,
        times: Sequence[LayerTimes],
        parts: Sequence[int],
        costs: ChainCosts,
        activations: ActivationPolicies,
    ) -> None:
        num = len(times)
        every: Any = np.arange(num)
        recomputed = np.isin(every, list(activations.recompute))
        part = np.isin(every, list(activations.selective))
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
        again = np.array(costs.recompute_bytes or (0.0,) * num, float)
        wgrad_bytes = np.array(costs.wgrad_bytes or costs.saved_bytes, float)
        rest = own - again
        # Of each layer, as if all that follow in the chain were of its stage.
        self._columns: list[tuple[Any, list[float]]] = [
            (most + np.cumsum(behind), [0.0, *np.cumsum(behind).tolist()])
            for most, behind in (
                (first, saved),
                (np.where(recomputed, rest, 0.0), again),
                (own, saved),
                (rest, saved + again),
                (own, saved - wgrad_bytes),
                (rest, saved - wgrad_bytes + again),
            )
        ]

    def of(self, first: int, end: int, split: bool) -> OperationWorkspace:
        """Working memory of a stage with layers from ``first`` to ``end``, exclusive."""
        there, back = self._columns[:2], self._columns[4:] if split else self._columns[2:4]
        return OperationWorkspace(
            *(max(0.0, float(most[first:end].max()) - to[end]) for most, to in there + back)
        )

    def beside(self, first: int, end: int, split: bool) -> float:
        """Largest working memory of any operation of a stage, beside what the stage counts per
        microbatch.

        A stage always counts the larger of the saved bytes and those held for deferred weight
        gradients.
        """
        works = self.of(first, end, split)
        if not split:
            return max(works)
        less = self._columns[4][1]
        more = max(0.0, less[first] - less[end])
        return max(works.forward, works.computing, works.backward - more, works.after - more)
