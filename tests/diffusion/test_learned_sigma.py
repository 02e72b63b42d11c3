"""Variational bound beside Bayes' rule with torch.distributions, and its gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from megatron_pulse.diffusion.learned_sigma import variational_bound
from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.diffusion.process_flags import NoiseSchedule, Objective

TIMES = torch.tensor([0.0, 1.0, 17.0, 40.0, 49.0])


def posterior(signal: float, beta: float, clean: Tensor, noisy: Tensor) -> Normal:
    """q(x_{t-1} | x_t, x_0): q(x_{t-1} | x_0), with ``signal`` left, times q(x_t | x_{t-1})."""
    prior, seen = 1 / (1 - signal), (1 - beta) / beta
    total = prior + seen
    mean = (prior * math.sqrt(signal) * clean + seen * noisy / math.sqrt(1 - beta)) / total
    return Normal(mean, torch.full_like(mean, total**-0.5))


def expected(process: DiffusionProcess, x0: Tensor, noisy: Tensor, guess: Tensor, v: Tensor):
    betas = process.betas()
    signals = [1.0, *(1 - betas).cumprod(0).tolist()]
    found = []
    for row, t in enumerate(TIMES.long().tolist()):
        beta = betas[t].item()
        if t == 0:  # x_0 itself: 256 bins
            least = (1 - signals[1]) / (1 - signals[2]) * betas[1].item()
            mean = guess[row]
        else:
            true = posterior(signals[t], beta, x0[row], noisy[row])
            least = true.variance.max().item()
            mean = posterior(signals[t], beta, guess[row], noisy[row]).mean
        share = (v[row] + 1) / 2
        model = Normal(mean, (share * math.log(beta) + (1 - share) * math.log(least)).exp().sqrt())
        if t == 0:
            nats = -(model.cdf(x0[row] + 1 / 255) - model.cdf(x0[row] - 1 / 255)).log()
        else:
            nats = kl_divergence(true, model)
        found.append(nats.mean() / math.log(2) * process.num_timesteps / 1000)
    return torch.stack(found)


@pytest.mark.parametrize("objective", [Objective.EPSILON, Objective.V, Objective.SAMPLE])
def test_bound_and_gradients_are_those_of_bayes_rule(objective: Objective):
    process = DiffusionProcess(
        objective, NoiseSchedule.LINEAR, num_timesteps=50, beta_start=0.002, beta_end=0.2
    )
    draw = torch.Generator().manual_seed(0)
    x0 = torch.rand(len(TIMES), 3, 4, 4, generator=draw) * 1.6 - 0.8
    noise = torch.randn(x0.shape, generator=draw)
    noisy, target = process.noised(x0, noise, TIMES)
    mean = target + 0.05 * torch.randn(x0.shape, generator=draw)
    v = torch.rand(x0.shape, generator=draw) * 2 - 1
    prediction = torch.cat([mean, v], dim=1).requires_grad_()
    bound = variational_bound(process, prediction, noisy, target, TIMES)
    double = v.double().requires_grad_()
    guess = process.clean(noisy.double(), mean.double(), TIMES)
    by_bayes = expected(process, x0.double(), noisy.double(), guess, double)
    torch.testing.assert_close(bound.double(), by_bayes, rtol=1e-4, atol=1e-6)
    bound.sum().backward()
    by_bayes.sum().backward()
    assert prediction.grad is not None and double.grad is not None
    of_mean, of_sigma = prediction.grad.split(3, dim=1)
    assert not of_mean.any()
    torch.testing.assert_close(of_sigma.double(), double.grad, rtol=2e-3, atol=1e-6)


def test_bound_is_least_at_the_posterior_of_a_perfect_mean():
    process = DiffusionProcess(Objective.EPSILON)
    x0, noise = torch.randn(2, 2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    times = torch.tensor([20.0, 300.0])
    noisy, target = process.noised(x0, noise, times)
    least, more = (
        variational_bound(
            process, torch.cat([target, torch.full_like(target, v)], 1), noisy, target, times
        )
        for v in (-1.0, 1.0)
    )
    torch.testing.assert_close(least, torch.zeros(2), atol=1e-7, rtol=0)
    assert (more > 0).all()
