"""Exponential moving average of parameters, kept in fp32 beside the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import batched

import torch
from torch import Tensor

from megatron_pulse.errors import format_faults

_TOGETHER = 64
"""Parameters averaged by one kernel on a GPU; bounds the temporary fp32 copies."""


class ExponentialMovingAverage:
    """Exponential moving average of named parameters; ``state`` maps names to fp32 averages.

    The decay of step n (from 0) is at most (1 + n) / (10 + n). The random initial weights are thus
    forgotten soon, as in TensorFlow's ``ExponentialMovingAverage``.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        decay: float = 0.9999,
    ) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"EMA decay is {decay}; it must be in [0, 1), such as 0.9999")
        self.decay = decay
        self.state: dict[str, Tensor] = {
            name: value.detach().to(torch.float32, copy=True) for name, value in named_parameters
        }

    def decay_at(self, step: int) -> float:
        """Decay of the update that follows ``step`` earlier updates."""
        return min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, named_parameters: Iterable[tuple[str, Tensor]], step: int) -> None:
        """Move each average towards its parameter; ``step`` counts earlier updates, from 0.

        Raises KeyError if the names differ from those of ``state``.
        """
        values = dict(named_parameters)
        if values.keys() != self.state.keys():
            raise KeyError(_difference(values.keys(), self.state.keys()))
        weight = 1 - self.decay_at(step)
        for names in batched(self.state, _TOGETHER):
            averages = [self.state[name] for name in names]
            latest = [values[name].detach().to(torch.float32) for name in names]
            torch._foreach_lerp_(averages, latest, weight)

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy saved averages in place; raises ValueError listing every name or shape mismatch."""
        faults = []
        if state.keys() != self.state.keys():
            faults.append(_difference(state.keys(), self.state.keys()))
        faults += [
            f"{name}: saved {tuple(state[name].shape)}, expected {tuple(average.shape)}"
            for name, average in self.state.items()
            if name in state and state[name].shape != average.shape
        ]
        if faults:
            raise ValueError(format_faults("EMA state does not fit", faults))
        for name, average in self.state.items():
            average.copy_(state[name])


def _difference(found: Iterable[str], expected: Iterable[str]) -> str:
    missing, unknown = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    parts = [
        f"{kind}: {', '.join(names)}"
        for kind, names in (("missing", missing), ("unknown", unknown))
        if names
    ]
    return "; ".join(parts)
