import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_pulse.diffusion.loss import signal_to_noise
from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.diffusion.process_flags import (
    DynamicShift,
    NoiseSchedule,
    Objective,
    ProcessChoice,
    TimeShift,
    TimestepDensity,
)
from megatron_pulse.diffusion.process_from_flags import chosen_process
from megatron_pulse.diffusion.sampling import sample

X0, NOISE = torch.randn(2, 5, 3, 4, 4, generator=torch.Generator().manual_seed(0)).unbind()
STEPS = torch.tensor([0.0, 1.0, 250.0, 500.0, 999.0])


def scaled_linear_alpha_bar(start=0.00085, end=0.012, num=1000):
    betas = torch.linspace(start**0.5, end**0.5, num, dtype=torch.float64) ** 2
    return torch.cumprod(1 - betas, 0)


@pytest.mark.parametrize("objective", [Objective.EPSILON, Objective.V, Objective.SAMPLE])
def test_discrete_objectives_follow_their_formulas(objective):
    noisy, target = DiffusionProcess(objective).noised(X0, NOISE, STEPS)
    alpha_bar = scaled_linear_alpha_bar()[STEPS.long()].view(-1, 1, 1, 1)
    signal, sigma = alpha_bar.sqrt(), (1 - alpha_bar).sqrt()
    expected = {
        Objective.EPSILON: NOISE,
        Objective.V: signal * NOISE - sigma * X0,
        Objective.SAMPLE: X0,
    }[objective]
    torch.testing.assert_close(noisy.double(), signal * X0 + sigma * NOISE, rtol=0, atol=1e-5)
    torch.testing.assert_close(target.double(), expected.double(), rtol=0, atol=1e-5)


def test_flow_goes_straight_from_sample_to_noise():
    noisy, target = DiffusionProcess(Objective.FLOW).noised(X0, NOISE, STEPS)
    t = (STEPS / 1000).view(-1, 1, 1, 1)
    torch.testing.assert_close(noisy, X0 + t * (NOISE - X0))
    assert torch.equal(target, NOISE - X0)


EDM = chosen_process(ProcessChoice(objective="edm"))


def test_edm_s_loss_is_that_of_svd_s_trainers():
    """Weighted error of the denoised sample in fp64; the network is any function."""
    times = torch.tensor([EDM.timestep(u) for u in (0.001, 0.2, 0.5, 0.8, 0.999)])

    def network(x, time):
        return (3 * x + time.view(-1, 1, 1, 1)).sin()

    x0, noise = X0.double(), NOISE.double()
    noisy, target = EDM.noised(x0, noise, times)
    loss = (network(noisy, times) - target).square().flatten(1).mean(1)
    sigma = (4 * times.double()).exp().view(-1, 1, 1, 1)
    at_sigma = x0 + sigma * noise
    made = network(at_sigma / (sigma**2 + 1).sqrt(), 0.25 * sigma.log())
    denoised = -sigma / (sigma**2 + 1).sqrt() * made + at_sigma / (sigma**2 + 1)
    weight = (1 + sigma**2) / sigma**2
    expected = (weight * (denoised - x0) ** 2).flatten(1).mean(1)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)  # times are fp32
    torch.testing.assert_close(EDM.clean(noisy, made, times), denoised, rtol=0, atol=1e-6)
    snr = signal_to_noise(EDM, times)
    torch.testing.assert_close(snr, sigma.flatten() ** -2, rtol=1e-6, atol=0)


def test_edm_s_sigma_is_log_normal():
    logs = torch.tensor([4 * EDM.timestep((i + 0.5) / 2000) for i in range(2000)])
    assert logs.mean().item() == pytest.approx(0.7, abs=0.01)
    assert logs.std().item() == pytest.approx(1.6, abs=0.01)
    assert EDM.timestep(0.5) == pytest.approx(0.7 / 4)
    validated = [math.exp(4 * EDM.validation_timestep(i)) for i in range(8)]
    assert [s / (1 + s) for s in validated] == pytest.approx([(i + 0.5) / 8 for i in range(8)])
    late = chosen_process(ProcessChoice(min_time=0.5), EDM)
    assert late.timestep(0.0) == pytest.approx(0.0, abs=1e-9)  # sigma 1


def test_cosine_schedule_is_nichol_and_dhariwals():
    process = DiffusionProcess(Objective.V, NoiseSchedule.COSINE)
    noisy, _ = process.noised(
        torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), torch.tensor([499.0])
    )

    def bar(t):
        return math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2

    assert noisy.item() ** 2 == pytest.approx(bar(0.5) / bar(0), rel=1e-3)


def test_zero_terminal_snr_ends_in_pure_noise():
    process = DiffusionProcess(Objective.V, zero_terminal_snr=True)
    noisy, _ = process.noised(X0[:1], NOISE[:1], torch.tensor([999.0]))
    torch.testing.assert_close(noisy, NOISE[:1])


@given(st.floats(0, 1, exclude_max=True), st.sampled_from(Objective))
def test_timesteps_are_in_range(u, objective):
    timestep = DiffusionProcess(objective).timestep(u)
    if objective == Objective.EDM:
        assert math.isfinite(timestep)
        return
    assert 0 <= timestep < 1000
    if objective != Objective.FLOW:
        assert timestep == math.floor(timestep)


def test_logit_normal_density():
    process = DiffusionProcess(Objective.FLOW, density=TimestepDensity.LOGIT_NORMAL, logit_mean=0.5)
    assert process.timestep(0.5) == pytest.approx(1000 / (1 + math.exp(-0.5)))
    logits = torch.logit(
        torch.tensor([process.timestep((i + 0.5) / 2000) for i in range(2000)]) / 1e3
    )
    assert logits.mean().item() == pytest.approx(0.5, abs=0.01)
    assert logits.std().item() == pytest.approx(1.0, abs=0.01)


def test_a_shift_moves_times_and_sigmas_together():
    """t' = s t / (1 + (s - 1) t), and x_t is that of t': three quarters noise at u = 1/2, s = 3."""
    process = DiffusionProcess(Objective.FLOW, shift=3.0, num_timesteps=500)
    assert process.timestep(0.5) == pytest.approx(375)
    noisy, _ = process.noised(X0[:1], NOISE[:1], torch.tensor([375.0]))
    torch.testing.assert_close(noisy, 0.25 * X0[:1] + 0.75 * NOISE[:1])
    half = DiffusionProcess(Objective.FLOW, shift=3.0, density=TimestepDensity.LOGIT_NORMAL)
    assert half.timestep(0.5) == pytest.approx(750), "the density comes before the shift"
    dynamic = DiffusionProcess(Objective.FLOW, shift=DynamicShift())
    with pytest.raises(ValueError, match="picture's size"):
        dynamic.timestep(0.5)
    assert dynamic.for_tokens(4096).shift == pytest.approx(math.exp(1.15))
    assert dynamic.for_tokens(256).shift == pytest.approx(math.exp(0.5))
    linear = DynamicShift(1.0, 3.0, 100, 300, TimeShift.LINEAR)
    assert DiffusionProcess(Objective.FLOW, shift=linear).for_tokens(200).shift == 2.0


def test_loss_is_fp32_mean_squared_error():
    prediction = torch.full((4, 8), 256.0, dtype=torch.bfloat16)
    loss = DiffusionProcess(Objective.FLOW).loss(prediction, torch.full((4, 8), 255.5))
    assert loss.dtype == torch.float32 and loss.item() == 0.25


def test_noised_rows_do_not_depend_on_the_batch():
    for objective in Objective:
        process = DiffusionProcess(objective)
        steps = STEPS / 600 if objective == Objective.EDM else STEPS
        whole = process.noised(X0, NOISE, steps)
        for i in range(5):
            row = process.noised(X0[i : i + 1], NOISE[i : i + 1], steps[i : i + 1])
            assert all(torch.equal(a[i : i + 1], b) for a, b in zip(whole, row, strict=True))


def test_process_is_a_value_and_lists_all_faults():
    process = DiffusionProcess("v", "cosine")
    assert process.objective is Objective.V
    assert DiffusionProcess(**process.to_dict()) == process
    with pytest.raises(ValueError) as error:
        DiffusionProcess("sigma", num_timesteps=1, beta_start=2.0, logit_std=0)
    for part in ("epsilon, v, sample, flow", "num_timesteps", "betas", "logit_std"):
        assert part in str(error.value)


@pytest.mark.parametrize("objective", ["epsilon", "v", "sample"])
def test_betas_that_leave_no_signal_are_refused_before_a_training(objective):
    """Samples would not be finite, after all steps were spent."""
    ends = {"beta_start": 0.1, "beta_end": 0.5}
    with pytest.raises(ValueError, match="no signal in fp32 from timestep 4.. of 1000 on"):
        DiffusionProcess(objective, "linear", **ends)
    DiffusionProcess(objective, "linear", 100, **ends)
    DiffusionProcess(objective, num_timesteps=5000)
    with pytest.raises(ValueError, match="no signal in fp32 from timestep 6 of 8 on"):
        DiffusionProcess(objective, trained_betas=(0.9999999,) * 8, num_timesteps=8)


@pytest.mark.parametrize("objective", ["epsilon", "v", "sample"])
def test_a_signal_that_vanishes_at_the_last_timestep_alone(objective):
    """Noise cannot be predicted there; all else can."""
    betas = {"trained_betas": (0.9999999,) * 7, "num_timesteps": 7}
    if objective == "epsilon":
        with pytest.raises(ValueError, match="no signal in fp32 from timestep 6 of 7 on"):
            DiffusionProcess(objective, **betas)
        return
    process = DiffusionProcess(objective, **betas)
    found = sample(lambda x, t, c: x / 2, process, (1, 2, 2), 2, {}, 4, progress=False)
    assert found.isfinite().all()
