"""An encoder cut into layers, to be run apart from each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

States = dict[str, Tensor]
"""What passes from a piece to the next, by name.

What begins with ``_`` a piece makes anew where it is not there; of all else every sample has the
same, of the same shapes.
"""


@dataclass(frozen=True)
class EncoderPiece:
    """One layer of a frozen encoder: ``run`` takes the states before it and gives those after it.

    ``modules`` are the parts of the model that it uses.
    """

    name: str
    run: Callable[[States], States]
    modules: tuple[nn.Module, ...] = ()

    def parameters(self) -> Iterator[Tensor]:
        """The weights that must be where it runs."""
        for module in self.modules:
            yield from module.parameters()

    @property
    def parameter_bytes(self) -> int:
        """Of its weights."""
        return sum(p.numel() * p.element_size() for p in self.parameters())


@torch.no_grad()
def run_pieces(pieces: Sequence[EncoderPiece], states: States) -> States:
    """The states after the last piece."""
    for piece in pieces:
        states = piece.run(states)
    return states
