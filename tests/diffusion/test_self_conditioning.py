"""Inputs of a self-conditioned backbone."""

import pytest
import torch

from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.diffusion.process_flags import Objective
from megatron_pulse.diffusion.sampling import sample
from megatron_pulse.diffusion.self_conditioning import beside, conditions_itself
from tests.diffusion.test_sampling import PROCESSES, SHAPE, gaussian_model


@pytest.mark.parametrize("process", PROCESSES)
def test_a_prediction_stands_for_the_clean_sample(process: DiffusionProcess) -> None:
    generator = torch.Generator().manual_seed(0)
    x0, noise = torch.randn(2, 5, *SHAPE, generator=generator).double().unbind()
    last = min(900.0, process.num_timesteps - 1)  # later epsilon is divided by next to nothing
    timesteps = torch.linspace(0, last, 5).floor()
    timesteps = timesteps / 600 if process.objective == Objective.EDM else timesteps
    noisy, target = process.noised(x0, noise, timesteps)
    clean = process.clean(noisy, target, timesteps)
    torch.testing.assert_close(clean, x0, rtol=0, atol=2e-5)


def test_a_share_of_the_steps_condition_themselves() -> None:
    drawn = [conditions_itself(0.3, 7, step) for step in range(2000)]
    assert 0.27 < sum(drawn) / 2000 < 0.33
    assert drawn == [conditions_itself(0.3, 7, step) for step in range(2000)]
    assert drawn != [conditions_itself(0.3, 8, step) for step in range(2000)]
    assert all(conditions_itself(1.0, 7, step) for step in range(100))


def test_zeros_stand_behind_a_sample_without_an_estimate() -> None:
    noisy, estimate = torch.randn(2, 3, 2, 4, 4).unbind()
    assert torch.equal(beside(noisy, estimate), torch.cat([noisy, estimate], 1))
    assert torch.equal(beside(noisy, None)[:, 2:], torch.zeros(3, 2, 4, 4))


@pytest.mark.parametrize("guidance", [1.0, 2.0])
@pytest.mark.parametrize("process", PROCESSES[1:5])
def test_sampling_gives_back_the_estimate_of_the_step_before(
    process: DiffusionProcess, guidance: float
) -> None:
    model, clip = gaussian_model(process, lambda y: 2.0 * y - 0.5, std=0.3), 1.0
    expected = torch.zeros(())
    guided = []

    def recorded(x: torch.Tensor, timesteps: torch.Tensor, fields: dict) -> torch.Tensor:
        nonlocal expected
        noisy, estimate = x.chunk(2, dim=1)
        assert torch.equal(estimate, expected.expand_as(noisy))
        made = model(noisy, timesteps, fields)
        expected = process.clean(noisy, made, timesteps).clamp(-clip, clip)
        guided.append(len(x))
        return made

    labels = torch.tensor([1, 1, 0])
    arguments = {
        "num_steps": 5,
        "guidance_scale": guidance,
        "null": {"labels": torch.tensor(0)},
        "progress": False,
        "clip": clip,
    }
    got = sample(
        recorded, process, SHAPE, 3, {"labels": labels}, self_conditioned=True, **arguments
    )
    assert guided == [3 if guidance == 1 else 6] * 5
    plain = sample(model, process, SHAPE, 3, {"labels": labels}, **arguments)
    assert torch.equal(got, plain)  # this model does not read the estimate
