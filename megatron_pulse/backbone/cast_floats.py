"""Casts of a module's floating-point tensors that leave complex ones as they are."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def cast_floats[M: nn.Module](
    module: M, dtype: torch.dtype, device: torch.device | str | None = None
) -> M:
    """Move ``module`` in place to ``device`` and its floating-point tensors to ``dtype``.

    Complex tensors keep their dtype; ``Module.to`` would drop their imaginary part.
    """

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype if tensor.is_floating_point() else None)

    module._apply(cast)
    return module
