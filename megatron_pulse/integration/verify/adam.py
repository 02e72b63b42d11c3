"""Optimizer of a verification: Adam on fp32 copies of the weights, as in training."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_pulse.runtime.parameters.adam import update

LEARNING_RATE = 1e-3
_GROUP = {"lr": LEARNING_RATE, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}


def unrounded(parameter: Tensor) -> Tensor:
    """Copy in fp32; integers of a quantised weight stay integers."""
    value = parameter.detach().clone()
    return value.float() if value.is_floating_point() else value


class AdamWeights:
    """fp32 weights by name with Adam's moments, and constant ``frozen`` ones.

    ``count`` is the number of steps made.
    """

    def __init__(self, main: dict[str, Tensor], frozen: dict[str, Tensor] | None = None) -> None:
        self.main = main
        self.frozen = frozen or {}
        self.first = {name: torch.zeros_like(value) for name, value in main.items()}
        self.second = {name: torch.zeros_like(value) for name, value in main.items()}
        self.count = 0

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], scale: float) -> None:
        """Make one step with ``gradients``, which are ``scale`` times those of the loss."""
        names = list(self.main)
        given = [gradients[name].to(self.main[name]) / scale for name in names]
        tensors = ([kind[name] for name in names] for kind in (self.main, self.first, self.second))
        main, first, second = tensors
        counts = [torch.tensor(float(self.count)) for _ in names]
        for one in zip(main, given, first, second, counts, strict=True):
            weight, gradient, moment, square, count = one
            update(_GROUP, ([weight], [gradient], [moment], [square]), [count], fused=False)
        self.count += 1

    def record(self) -> dict[str, object]:
        """Record for ``restored``."""
        return dict(vars(self))

    @classmethod
    def restored(cls, record: dict[str, object]) -> AdamWeights:
        """Weights of a ``record``."""
        self = cls.__new__(cls)
        self.__dict__.update(record)
        return self
