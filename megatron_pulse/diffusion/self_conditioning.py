"""Self-conditioning: a backbone is given what it made of the sample before.

Chen et al. 2023 (Analog Bits, arXiv 2208.04202, algorithms 1 and 2): behind the noisy sample the
first layer takes an estimate of the clean one, zeros where there is none. In training a share of
the steps gets the backbone's own, of a pass without gradients; in sampling it is that of the step
before. What is predicted becomes an estimate of x_0 by the objective (``DiffusionProcess.clean``):
it means the same at every timestep, which noise or a velocity does not.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_pulse.diffusion.noise import Stream, philox


def conditions_itself(share: float, seed: int, step: int) -> bool:
    """Whether the training step ``step`` (from 0) is among the ``share`` of those that do."""
    generator = np.random.Generator(philox(seed, Stream.SELF_CONDITIONING, step, 0))
    return bool(generator.random() < share)


def beside(noisy: Tensor, estimate: Tensor | None) -> Tensor:
    """``noisy`` and an estimate of its clean sample, both ``[b, c, ...]``, as ``[b, 2c, ...]``.

    None stands for zeros.
    """
    other = torch.zeros_like(noisy) if estimate is None else estimate.to(noisy.dtype)
    return torch.cat([noisy.to(other.device, non_blocking=True), other], dim=1)
