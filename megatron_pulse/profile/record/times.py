"""One layer's times and bytes at one microbatch size, and between two sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SPREAD = 0.3
"""Repetitions that spread over more of their time than this were disturbed."""


@dataclass(frozen=True)
class LayerTimes:
    """One layer at one microbatch size: medians, their interquartile ranges, and bytes.

    ``weight_grad_s`` is what the whole backward takes longer than the input gradient alone. The
    times named ``split_`` are those where weight gradients wait, as with split backwards: of the
    forward that leaves them, of the backward without them, and of what is left. All of a profile's
    layers have them, or none (0: not measured, and taken to be as without).
    ``peak_bytes`` is the most that is in use at once in one forward and backward, beyond
    parameters and the layer's inputs; a parameter's gradient counts only while it is being made.
    ``again_bytes`` are what computing the layer again makes and keeps until its backward, beside
    what it was called with, of which the layer before was called with ``passed_bytes`` too;
    ``forward_bytes`` are the most that is in use in a forward that keeps nothing,
    ``waiting_bytes`` what weight gradients that wait hold behind the input gradient. Each of
    them all of a profile's layers have, or none (0: as much as is saved, beside what is kept).
    Where what is cheap is computed again ``selective_bytes`` are saved (0: not known),
    ``selective_peak_bytes`` in use at most, and a backward takes ``selective_s`` longer.
    ``halved_s`` are forward and backward on one of two tensor-parallel ranks, their sums apart (0:
    as ``ProfiledLayer.sharded_time`` says).
    """

    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    forward_spread_s: float
    input_grad_spread_s: float
    weight_grad_spread_s: float
    saved_bytes: int
    peak_bytes: int
    split_forward_s: float = 0.0
    split_input_grad_s: float = 0.0
    split_weight_grad_s: float = 0.0
    again_bytes: int = 0
    passed_bytes: int = 0
    forward_bytes: int = 0
    waiting_bytes: int = 0
    selective_bytes: int = 0
    selective_peak_bytes: int = 0
    selective_s: float = 0.0
    halved_s: float = 0.0

    def parts_s(self, split: bool) -> tuple[float, float, float]:
        """Forward, input gradient and weight gradient; with ``split`` where these wait."""
        found = self.split_forward_s, self.split_input_grad_s, self.split_weight_grad_s
        if split and any(found):
            return found
        return self.forward_s, self.input_grad_s, self.weight_grad_s

    def kept_bytes(self, selective: bool) -> int:
        """What is saved, or what of it is not cheap."""
        return self.selective_bytes or self.saved_bytes if selective else self.saved_bytes

    def most_bytes(self, selective: bool) -> int:
        """What is in use at most."""
        return self.selective_peak_bytes or self.peak_bytes if selective else self.peak_bytes

    @property
    def whole_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.input_grad_s + self.weight_grad_s

    @property
    def spread(self) -> float:
        """The largest interquartile range, as a part of the whole time."""
        ranges = (self.forward_spread_s, self.input_grad_spread_s, self.weight_grad_spread_s)
        return max(ranges) / self.whole_s if self.whole_s else 0.0


_SIZES = {name for name in LayerTimes.__dataclass_fields__ if name.endswith("_bytes")}

NO_SPREAD = 0.0, 0.0, 0.0
"""The spreads of times that were not measured."""


def between(
    a: LayerTimes,
    b: LayerTimes,
    share: float,
    proportional: bool = False,
    least: float = 0.0,
) -> LayerTimes:
    """The value at ``share`` of the way from ``a`` to ``b`` (to twice ``a``, if proportional);
    before ``a`` at least ``least`` of it, behind ``b`` at least that."""
    mixed: dict[str, Any] = {}
    for name in LayerTimes.__dataclass_fields__:
        start, end = getattr(a, name), getattr(b, name)
        step = start if proportional else end - start
        floor = least * start if share < 0 else end if share > 1 else 0.0
        mixed[name] = max(floor, float(start + share * step))
    for name in mixed.keys() & _SIZES:
        mixed[name] = round(mixed[name])
    return LayerTimes(**mixed)
