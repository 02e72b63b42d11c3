"""Whether a tensor that an operation saved was written into since.

torch refuses a backward that takes such a tensor, but looks at none that hooks have taken from it.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from megatron_pulse.runtime.failures import PulseError


class Watched:
    """Sees whether a tensor is written into, without holding what is in it.

    A detached alias has the tensor's count of writes; the alias's own data is taken from it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._alias: Tensor | None = tensor.detach()
        self._version, self._written = tensor._version, False
        if tensor.layout is torch.strided:
            self._alias.data = _nothing(tensor.dtype, tensor.device)

    @property
    def is_written(self) -> bool:
        """Whether it was written into, until now or ``settle``."""
        if self._alias is not None:
            self._written = self._alias._version != self._version
        return self._written

    def settle(self) -> None:
        """What comes after no longer counts."""
        self._written = self.is_written
        self._alias = None


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def written(layer: str) -> PulseError:
    """The error of a backward that takes what was written into."""
    return PulseError(
        f"layer {layer}: something that an operation saved for the backward pass was written into "
        "since, by this layer or the next (torch refuses that where nothing is computed again or "
        "on the host, too): write x = x + 1 in the place of x += 1"
    )
