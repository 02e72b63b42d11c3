"""Training losses beside diffusers' formulas and autograd, and times beside their densities."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.training_utils import (
    compute_density_for_timestep_sampling,
    compute_loss_weighting_for_sd3,
    compute_snr,
)

from megatron_pulse.data.microbatches import Split, make_microbatch
from megatron_pulse.diffusion.loss import LossChoice, signal_to_noise
from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.diffusion.process_flags import NoiseSchedule, Objective, TimestepDensity
from tests.data.test_microbatches import DATASET

FLOW = DiffusionProcess(Objective.FLOW)
TIMES = torch.tensor([0.0, 1.0, 17.0, 250.0, 500.0, 811.0, 999.0])


def of(objective: Objective, **settings: object) -> DiffusionProcess:
    return DiffusionProcess(objective, **settings)  # type: ignore[arg-type]


def snr_of_diffusers(process: DiffusionProcess) -> torch.Tensor:
    return compute_snr(DDPMScheduler(**process.scheduler_arguments()), TIMES.long())


@pytest.mark.parametrize("schedule", [NoiseSchedule.LINEAR, NoiseSchedule.COSINE])
def test_ratio_is_that_of_diffusers(schedule: NoiseSchedule):
    process = of(Objective.V, schedule=schedule)
    torch.testing.assert_close(
        signal_to_noise(process, TIMES).float(), snr_of_diffusers(process), rtol=2e-5, atol=0
    )


@pytest.mark.parametrize("gamma", [None, 1.0])
def test_min_snr_is_that_of_diffusers_scripts(gamma: float | None):
    """min(s, g) / s for epsilon and min(s, g) / (s + 1) for v, as in train_text_to_image.py."""
    choice = LossChoice(loss_weighting="min-snr", snr_gamma=gamma)
    for objective in (Objective.EPSILON, Objective.V, Objective.SAMPLE):
        process = of(objective)
        snr = snr_of_diffusers(process)
        limited = torch.stack([snr, torch.full_like(snr, gamma or 5.0)], dim=1).min(dim=1)[0]
        by = {Objective.EPSILON: snr, Objective.V: snr + 1, Objective.SAMPLE: 1.0}[objective]
        torch.testing.assert_close(choice.weights(process, TIMES), limited / by, rtol=5e-5, atol=0)


def test_weights_of_one_error_agree_over_objectives():
    """One prediction of the clean sample has one loss, in whatever objective it is expressed."""
    x0, noise = torch.randn(2, len(TIMES), 3, 4, 4, generator=torch.Generator().manual_seed(0))
    guess = x0 + 0.1 * torch.randn(x0.shape, generator=torch.Generator().manual_seed(1))
    for weighting in ("min-snr", "debiased", "p2"):
        choice, losses = LossChoice(loss_weighting=weighting), []
        for objective in (Objective.EPSILON, Objective.V, Objective.SAMPLE):
            process = of(objective)
            noisy, target = process.noised(x0, noise, TIMES)
            share = process.alphas_cumprod(TIMES).view(-1, 1, 1, 1)
            epsilon = (noisy - share.sqrt() * guess) / (1 - share).sqrt()
            prediction = {
                Objective.EPSILON: epsilon,
                Objective.V: share.sqrt() * epsilon - (1 - share).sqrt() * guess,
                Objective.SAMPLE: guess,
            }[objective]
            losses.append(choice.error(prediction, target, choice.weights(process, TIMES)))
        assert losses[0].item() == pytest.approx(losses[2].item(), rel=1e-3)
        assert losses[1].item() == pytest.approx(losses[2].item(), rel=1e-3)


def test_flow_weights_the_same_error_by_its_ratio():
    """The error of flow's prediction is that of the clean sample over t^2."""
    choice, times = LossChoice(loss_weighting="min-snr"), torch.tensor([100.0, 500.0, 900.0])
    t = times / 1000
    expected = ((1 - t) / t).square().clamp(max=5.0) * t**2
    torch.testing.assert_close(choice.weights(FLOW, times), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["sigma-sqrt", "cosmap"])
def test_weights_of_sd3_are_those_of_diffusers(name: str):
    weights = LossChoice(loss_weighting=name).weights(FLOW, TIMES[1:])
    expected = compute_loss_weighting_for_sd3(name.replace("-", "_"), TIMES[1:] / 1000)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=0)
    assert LossChoice(loss_weighting=name).weights(FLOW, TIMES[:1]).isfinite().all()


@pytest.mark.parametrize("loss", ["mse", "huber"])
def test_gradient_is_that_of_the_formula(loss: str):
    generator = torch.Generator().manual_seed(2)
    prediction, target = torch.randn(2, 4, 2, 3, 3, generator=generator, dtype=torch.float32)
    weights = torch.tensor([0.5, 2.0, 0.0, 1.0])
    prediction.requires_grad_()
    choice = LossChoice(loss=loss, huber_c=0.3 if loss == "huber" else None)
    value = choice.error(prediction, target, weights)
    value.backward()
    d, c = (prediction - target).detach(), 0.3
    share = weights.view(-1, 1, 1, 1) / d.numel()
    if loss == "mse":
        expected, slope = (share * d**2).sum(), 2 * d
    else:
        root = (d**2 + c**2).sqrt()
        expected, slope = (share * 2 * c * (root - c)).sum(), 2 * c * d / root
    torch.testing.assert_close(value.detach(), expected)
    torch.testing.assert_close(prediction.grad, share * slope)


def test_weighted_microbatches_are_the_batch():
    """Weights belong to samples: four microbatches of one have the mean of one of four."""
    choice = LossChoice(loss="huber", loss_weighting="p2")
    process, generator = of(Objective.EPSILON), torch.Generator().manual_seed(3)
    prediction, target = torch.randn(2, 4, 2, 3, 3, generator=generator)
    weights = choice.weights(process, TIMES[2:6])
    whole = choice.error(prediction, target, weights)
    parts = [
        choice.error(prediction[i : i + 1], target[i : i + 1], weights[i : i + 1]) for i in range(4)
    ]
    assert sum(parts) / 4 == pytest.approx(whole.item(), rel=1e-6)


def test_only_training_is_weighted_and_offset():
    items = [(0, 0), (1, 1)]
    choice = LossChoice(loss_weighting="min-snr", noise_offset=0.1)

    def made(split: Split, loss: LossChoice) -> dict[str, torch.Tensor]:
        return make_microbatch(DATASET, items, FLOW, 7, split=split, loss=loss)

    plain, offset = made(Split.TRAIN, LossChoice()), made(Split.TRAIN, choice)
    assert "loss_weights" not in plain
    torch.testing.assert_close(offset["loss_weights"], choice.weights(FLOW, plain["timesteps"]))
    moved = offset["target"] - plain["target"]
    assert (moved.flatten(2).std(dim=2) < 1e-6).all() and moved.abs().min() > 0
    for name, tensor in made(Split.VALIDATION, LossChoice()).items():
        assert torch.equal(tensor, made(Split.VALIDATION, choice)[name])


def test_offset_is_normal_and_of_its_share():
    numbers = torch.stack([noise_of(index) for index in range(2000)])
    assert abs(numbers.mean()) < 0.08 and abs(numbers.std() - 1) < 0.08
    assert torch.equal(noise_of(5), noise_of(5))


def noise_of(index: int) -> torch.Tensor:
    from megatron_pulse.diffusion.noise import offset_noise

    return offset_noise(3, index, 0, 1)


def test_choices_that_cannot_be_are_refused():
    assert LossChoice(loss_weighting="cosmap").faults(of(Objective.V))
    zero = of(Objective.V, zero_terminal_snr=True)
    assert "zero terminal SNR" in LossChoice(noise_offset=0.1).faults(zero)[0]
    assert not LossChoice(loss_weighting="min-snr", noise_offset=0.1).faults(of(Objective.EPSILON))
    assert (LossChoice(loss_weighting="min-snr").weights(zero, TIMES)).isfinite().all()


def times(process: DiffusionProcess, count: int = 4000) -> np.ndarray:
    return np.array([process.timestep((i + 0.5) / count) for i in range(count)])


@pytest.mark.parametrize("scale", [1.29, 0.0, -0.5])
def test_mode_density_is_that_of_diffusers(scale: float):
    process = of(Objective.FLOW, density=TimestepDensity.MODE, mode_scale=scale)
    ours = times(process) / 1000
    torch.manual_seed(0)
    theirs = compute_density_for_timestep_sampling("mode", 200_000, mode_scale=scale).numpy()
    assert np.all(np.diff(ours) > 0)
    np.testing.assert_allclose(
        np.quantile(theirs, [0.1, 0.3, 0.5, 0.9]),
        np.quantile(ours, [0.1, 0.3, 0.5, 0.9]),
        atol=0.01,
    )


def test_cosmap_density_is_that_of_the_paper():
    """Esser et al. 2024, eq. 21: 2 / (pi (1 - 2 t + 2 t^2))."""
    ours = times(of(Objective.FLOW, density=TimestepDensity.COSMAP)) / 1000
    density, edges = np.histogram(ours, bins=10, range=(0, 1), density=True)
    t = (edges[1:] + edges[:-1]) / 2
    np.testing.assert_allclose(density, 2 / (math.pi * (1 - 2 * t + 2 * t**2)), rtol=0.02)


def test_speed_draws_the_noisiest_times_a_fifth_as_often():
    density, _ = np.histogram(
        times(of(Objective.EPSILON, density=TimestepDensity.SPEED)), bins=10, range=(0, 1000)
    )
    assert max(density[:7]) - min(density[:7]) <= 6 and max(density[7:]) - min(density[7:]) <= 6
    assert density[0] / density[9] == pytest.approx(5, rel=0.05)


@pytest.mark.parametrize(
    "settings",
    [
        {"objective": Objective.EPSILON},
        {"objective": Objective.FLOW, "density": TimestepDensity.LOGIT_NORMAL, "shift": 3.0},
        {"objective": Objective.FLOW, "density": TimestepDensity.MODE},
        {"objective": Objective.EPSILON, "density": TimestepDensity.SPEED},
    ],
)
def test_range_truncates_the_density(settings: dict[str, object]):
    whole = times(DiffusionProcess(**settings), 20_000)  # type: ignore[arg-type]
    part = times(DiffusionProcess(**settings, min_time=0.4, max_time=0.875))  # type: ignore[arg-type]
    assert part.min() >= 400 and part.max() < 875
    inside = whole[(whole >= 400) & (whole < 875)]
    shares = [0.1, 0.5, 0.9]
    np.testing.assert_allclose(np.quantile(part, shares), np.quantile(inside, shares), atol=2)


@pytest.mark.parametrize(
    "settings",
    [
        {"objective": Objective.FLOW, "density": TimestepDensity.SPEED},
        {"objective": Objective.V, "density": TimestepDensity.MODE},
        {"objective": Objective.FLOW, "density": TimestepDensity.MODE, "mode_scale": 2.0},
        {"objective": Objective.FLOW, "density": TimestepDensity.COSMAP, "logit_std": 2.0},
        {"objective": Objective.FLOW, "min_time": 0.5, "max_time": 0.5},
        {"objective": Objective.V, "max_time": 1.5},
    ],
)
def test_times_that_cannot_be_are_refused(settings: dict[str, object]):
    with pytest.raises(ValueError, match="time|density|mode_scale|logit"):
        DiffusionProcess(**settings)  # type: ignore[arg-type]
