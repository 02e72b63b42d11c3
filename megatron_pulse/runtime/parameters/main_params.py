"""Main (fp32 master) parameters, of which a data-parallel rank may hold a shard.

Under bf16 and fp16 a stage's parameters are rounded copies of the main parameters. Checkpoints and
EMA use the main parameters, since fine-tuning steps are often smaller than the rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class MainParamShard:
    """This rank's part of one main parameter.

    ``values`` are the flat elements from index ``first`` on, in row-major order. ``first`` is None
    for a whole parameter in its own shape.
    """

    values: Tensor
    first: int | None = None

    def of(self, whole: Tensor) -> Tensor:
        """The same part of another tensor of the parameter's shape."""
        if self.first is None:
            return whole
        return whole.reshape(-1)[self.first : self.first + self.values.numel()]


class MainParams:
    """Main parameters of one stage, by name.

    ``shapes`` covers all parameters; ``shares`` only those with elements on this rank. The ranks of
    ``group`` together hold each element once; None means that nothing is sharded.
    """

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        shares: Mapping[str, MainParamShard],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.shapes = shapes
        self.shares = shares
        self.group = group

    def values(self) -> dict[str, Tensor]:
        """This rank's elements of each parameter, not copied."""
        return {name: share.values for name, share in self.shares.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load whole tensors by name; parameters absent from ``state`` stay unchanged."""
        for name, value in self.parts(state).items():
            self.shares[name].values.copy_(value)

    def parts(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts of the whole tensors in ``state``."""
        return {name: share.of(state[name]) for name, share in self.shares.items() if name in state}

    @torch.no_grad()
    def gather(self, parts: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
        """Gather whole tensors ``names`` from every rank's parts (main parameters or their EMA).

        Collective over ``group``: every rank passes the same names. A sharded parameter is returned
        as a new tensor in host memory, bitwise exact.
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
            # Summed as integers: -0.0 + 0.0 is 0.0, but a bit pattern plus zeros is unchanged.
            dist.all_reduce(whole.view(torch.int32), group=self.group)
            wholes[name] = whole.view(shape).cpu()
        return wholes
