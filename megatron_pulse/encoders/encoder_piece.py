"""Encoder split into layers that can run on different devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

States = dict[str, Tensor]
"""Tensors passed from one piece to the next, by name.

A name with a leading ``_`` is optional: a piece recomputes the tensor if missing. All other names
are the same, with the same shapes, for every sample.
"""


@dataclass(frozen=True)
class EncoderPiece:
    """One layer of a frozen encoder; ``run`` maps the states before the layer to those after it.

    ``modules`` are the submodules of the model that the layer uses.
    """

    name: str
    run: Callable[[States], States]
    modules: tuple[nn.Module, ...] = ()

    def parameters(self) -> Iterator[Tensor]:
        """Weights that must be on the layer's device."""
        for module in self.modules:
            yield from module.parameters()

    @property
    def parameter_bytes(self) -> int:
        """Size of the weights in bytes."""
        return sum(p.numel() * p.element_size() for p in self.parameters())


@torch.no_grad()
def run_pieces(pieces: Sequence[EncoderPiece], states: States) -> States:
    """Run all pieces in order and return the last states."""
    for piece in pieces:
        states = piece.run(states)
    return states


def by_rows(piece: EncoderPiece) -> EncoderPiece:
    """The same layer, which encodes every row of its states alone."""

    def run(states: States) -> States:
        count = len(next(iter(states.values())))
        found = [
            piece.run({name: value[row : row + 1] for name, value in states.items()})
            for row in range(count)
        ]
        return {name: torch.cat([row[name] for row in found]) for name in found[0]}

    return replace(piece, run=run)
