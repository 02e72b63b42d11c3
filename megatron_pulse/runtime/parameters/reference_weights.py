"""Frozen copy of the trained weights: the reference model of a preference loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megatron_pulse.adapters.low_rank import is_factor


class ReferenceWeights:
    """Copies of trained parameters as they are now, in their dtype; ``state`` has them by name.

    Frozen parameters need none. Factors of an adapter need none either: the reference model runs
    without adapters. With ``in_memory`` others know the memory of the parameters, so that values
    are exchanged in it.
    """

    def __init__(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], in_memory: bool = False
    ) -> None:
        self._in_memory = in_memory
        self._parameters = {
            name: parameter
            for name, parameter in named_parameters
            if parameter.requires_grad and not is_factor(name)
        }
        self.state: dict[str, Tensor] = {
            name: parameter.detach().clone() for name, parameter in self._parameters.items()
        }

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the parameters have the values of the reference.

        For forward passes without gradients: a backward pass outside may recompute layers.
        """
        if self._in_memory:
            self._exchange()
            try:
                yield
            finally:
                self._exchange()
            return
        trained = {name: parameter.data for name, parameter in self._parameters.items()}
        try:
            for name, parameter in self._parameters.items():
                parameter.data = self.state[name]
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.data = trained[name]

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, parameter in self._parameters.items():
            held = parameter.detach().clone()
            parameter.copy_(self.state[name])
            self.state[name].copy_(held)

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy the reference of an earlier part of the run."""
        for name, own in self.state.items():
            own.copy_(state[name])
