"""Self-conditioning: a backbone also reads its previous estimate of the clean sample.

Chen et al. 2023 (Analog Bits, arXiv 2208.04202, algorithms 1 and 2). The first layer takes the
noisy sample followed by an estimate of the clean sample, or zeros. In training, a share of the
steps uses the backbone's own estimate from a pass without gradients. In sampling, the estimate is
that of the previous step. ``DiffusionProcess.clean`` turns a prediction into an estimate of x_0,
whose meaning, unlike that of noise or velocity, is the same at every timestep.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_pulse.diffusion.noise import Stream, philox


def conditions_itself(share: float, seed: int, step: int) -> bool:
    """True if the training step ``step`` (from 0) is among the ``share`` with self-conditioning."""
    generator = np.random.Generator(philox(seed, Stream.SELF_CONDITIONING, step, 0))
    return bool(generator.random() < share)


def beside(noisy: Tensor, estimate: Tensor | None) -> Tensor:
    """Concatenate ``noisy`` and an estimate of its clean sample, ``[b, c, ...]``, to ``[b, 2c,
    ...]``.

    None stands for zeros.
    """
    other = torch.zeros_like(noisy) if estimate is None else estimate.to(noisy.dtype)
    return torch.cat([noisy.to(other.device, non_blocking=True), other], dim=1)
