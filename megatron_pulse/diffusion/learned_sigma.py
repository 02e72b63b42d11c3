"""Variational bound for a learned sigma: Nichol and Dhariwal 2021 (2102.09672), section 3.1.

A backbone with a learned sigma predicts v in [-1, 1] behind the mean. The model's log variance is
the mean of log beta (v = 1) and the posterior's log variance (v = -1).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_pulse.diffusion.objectives import DiffusionProcess

_BIN = 1 / 255
"""Half of the distance between two of 256 values in [-1, 1]."""
_LEAST = 1e-12
"""Least probability of a bin, which bounds its logarithm."""


class _Posterior(NamedTuple):
    """q(x_{t-1} | x_t, x_0) by timestep, float32: logarithms of beta and of the variance; the mean
    is ``of_clean`` x_0 + ``of_noisy`` x_t."""

    log_beta: Tensor
    log_variance: Tensor
    of_clean: Tensor
    of_noisy: Tensor


def variational_bound(
    process: DiffusionProcess,
    prediction: Tensor,
    noisy: Tensor,
    target: Tensor,
    timesteps: Tensor,
) -> Tensor:
    """T/1000 times each sample's term of the bound, in bits per number: float32 ``[b]``.

    ``prediction [b, 2c, ...]`` holds mean and sigma; ``noisy`` and ``target`` are ``[b, c, ...]``.
    The mean is detached, so that only sigma has a gradient. The sum with the mean squared error is
    L_hybrid, whose factor 0.001 and sum over T timesteps give T/1000. The first timestep has the
    likelihood of 256 values in [-1, 1] instead of a divergence, as published, also for latents.
    """
    mean, share = prediction.float().tensor_split(2, dim=1)
    noisy, target = noisy.float(), target.float()
    clean = process.clean(noisy, target, timesteps)
    guess = process.clean(noisy, mean.detach(), timesteps)
    step = timesteps.to(noisy.device, non_blocking=True).long()
    sides = (-1, *[1] * (noisy.dim() - 1))
    table = _Posterior(*(each[step].view(sides) for each in _posterior(process, noisy.device)))

    ratio = (share + 1) / 2 * (table.log_beta - table.log_variance)
    log_variance = table.log_variance + ratio
    apart = table.of_clean * (clean - guess)
    divergence = (ratio + (-ratio).expm1() + apart**2 * (-log_variance).exp()) / 2
    guessed_mean = table.of_clean * guess + table.of_noisy * noisy
    surprise = -_log_probability(clean - guessed_mean, clean, (-log_variance / 2).exp())
    bits = torch.where(step.view(sides) == 0, surprise, divergence) / math.log(2)
    return bits.flatten(1).mean(1) * (process.num_timesteps / 1000)


def _log_probability(apart: Tensor, value: Tensor, precision: Tensor) -> Tensor:
    """Logarithm of a normal distribution's probability of the bin around ``value``, ``apart`` from
    its mean; bins at -1 and 1 are open."""

    def below(edge: Tensor) -> Tensor:
        return torch.special.ndtr(edge * precision)

    upper, lower = below(apart + _BIN), below(apart - _BIN)
    upper = torch.where(value > 0.999, torch.ones_like(upper), upper)
    lower = torch.where(value < -0.999, torch.zeros_like(lower), lower)
    return (upper - lower).clamp(min=_LEAST).log()


@lru_cache(maxsize=8)
def _posterior(process: DiffusionProcess, device: torch.device) -> _Posterior:
    with torch.device("cpu"):
        betas = process.betas()
        signal = (1 - betas).cumprod(0)
        before = torch.cat([torch.ones_like(signal[:1]), signal[:-1]])
        variance = betas * (1 - before) / (1 - signal)
        variance[0] = variance[1]  # it is 0, whose logarithm has no bound
        found = (
            betas.log(),
            variance.log(),
            before.sqrt() * betas / (1 - signal),
            (1 - before) * (1 - betas).sqrt() / (1 - signal),
        )
    return _Posterior(*(each.float().to(device) for each in found))
