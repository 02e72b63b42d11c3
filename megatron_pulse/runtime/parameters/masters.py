"""The fp32 weights that an optimizer moves, of which a data-parallel rank may hold only a part.

Under bf16 and fp16 a stage's parameters are rounded copies of them. What is kept of a model
(checkpoints, averages) is made of the masters: a step of fine-tuning is often smaller than the
rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Share:
    """What this rank holds of one fp32 weight: ``values`` are its elements from ``first`` on, in
    row order and flat; or all of it, in its shape, where ``first`` is None."""

    values: Tensor
    first: int | None = None

    def of(self, whole: Tensor) -> Tensor:
        """The same part of another tensor of the weight's shape."""
        if self.first is None:
            return whole
        return whole.reshape(-1)[self.first : self.first + self.values.numel()]


class Masters:
    """The fp32 weights of one stage, by name.

    ``shapes`` are those of all of them; ``shares`` holds what is here, which may be nothing of
    some. The ranks of ``group`` together hold each element once; None: all is here.
    """

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        shares: Mapping[str, Share],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.shapes = shapes
        self.shares = shares
        self.group = group

    def values(self) -> dict[str, Tensor]:
        """What is here of each weight, not copied."""
        return {name: share.values for name, share in self.shares.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take on the whole weights of ``state``, those of other names keep theirs."""
        for name, value in self.parts(state).items():
            self.shares[name].values.copy_(value)

    def parts(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this rank's shares are of the whole tensors of ``state``."""
        return {name: share.of(state[name]) for name, share in self.shares.items() if name in state}

    @torch.no_grad()
    def gather(self, parts: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
        """The whole tensors ``names`` from every rank's parts (its masters, or averages of them).

        Collective over ``group``: every rank gives the same names. Where a weight is shared out,
        the whole is a new tensor in the host's memory, exact to the bit.
        """
        wholes = {}
        for name in names:
            shape, share = self.shapes[name], self.shares.get(name)
            if share is not None and share.first is None:
                wholes[name] = parts[name]
                continue
            device = torch.cuda.current_device()
            whole = torch.zeros(shape.numel(), dtype=torch.float32, device=device)
            if share is not None:
                share.of(whole).copy_(parts[name])
            # As integers: -0.0 + 0.0 is 0.0, but a sum of a bit pattern and zeros is the pattern.
            dist.all_reduce(whole.view(torch.int32), group=self.group)
            wholes[name] = whole.view(shape).cpu()
        return wholes
