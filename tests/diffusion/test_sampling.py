"""Samples of models known in closed form."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

from megatron_pulse.diffusion.grid import save_grid
from megatron_pulse.diffusion.noise import diffusers_noises, start_noise
from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.diffusion.process_flags import DynamicShift, FlowGrid, NoiseSchedule, Objective
from megatron_pulse.diffusion.sampling import noise_left, sample
from megatron_pulse.diffusion.scheduler_export import describe_sampler
from megatron_pulse.diffusion.scheduler_import import process_of_scheduler
from tests.diffusion.schedulers import PUBLISHED

SHAPE = (1, 4, 4)
PROCESSES = [
    DiffusionProcess(Objective.EPSILON),
    DiffusionProcess(Objective.V),
    DiffusionProcess(Objective.V, NoiseSchedule.COSINE),
    DiffusionProcess(Objective.V, zero_terminal_snr=True),
    DiffusionProcess(Objective.FLOW),
    DiffusionProcess(Objective.FLOW, shift=3.0),
    DiffusionProcess(Objective.SAMPLE),
    DiffusionProcess(Objective.SAMPLE, NoiseSchedule.LINEAR, zero_terminal_snr=True),
    DiffusionProcess(Objective.EPSILON, num_timesteps=400, beta_end=0.05),
    DiffusionProcess(Objective.EDM),
    DiffusionProcess(Objective.V, trained_betas=tuple(2e-5 * (i + 1) for i in range(1000))),
]


def gaussian_model(process, mean, std):
    """The exact prediction for data ~ N(mean(label), std^2), from E[x_0 | x_t]."""

    def model(x, timesteps, conditioning):
        labels = conditioning["labels"]
        assert timesteps.dtype == torch.float32 and labels.dtype == torch.int64
        assert timesteps.shape == labels.shape == x.shape[:1]
        one, zero = torch.ones(len(x), 1, 1, 1), torch.zeros(len(x), 1, 1, 1)
        signal = process.noised(one, zero, timesteps)[0].double()
        sigma = process.noised(zero, one, timesteps)[0].double()
        mu = mean(labels).view(-1, 1, 1, 1).double()
        variance = signal**2 * std**2 + sigma**2
        residual = (x.double() - signal * mu) / variance
        x0, noise = mu + signal * std**2 * residual, sigma * residual
        return {
            Objective.EPSILON: noise,
            Objective.V: signal * noise - sigma * x0,
            Objective.SAMPLE: x0,
            Objective.FLOW: noise - x0,
            Objective.EDM: signal * noise - sigma * x0,
        }[process.objective].float()

    return model


@pytest.mark.parametrize(
    ("process", "eta"),
    [(p, 0.0) for p in PROCESSES] + [(p, 1.0) for p in PROCESSES[::2] if p.objective.has_betas],
)
def test_a_gaussian_is_recovered(process, eta):
    labels = torch.arange(256) % 2
    model = gaussian_model(process, lambda y: 0.5 - y, std=0.3)
    given = {"labels": labels}
    x = sample(model, process, SHAPE, 256, given, 100, seed=3, eta=eta, progress=False)
    # With eta 1 the posterior's variance leaves out that of x_0: too narrow by O(1 / num_steps).
    tolerance = 0.05 if eta else 0.03
    for label, mean in ((0, 0.5), (1, -0.5)):
        assert x[labels == label].mean().item() == pytest.approx(mean, abs=0.03)
        assert x[labels == label].std().item() == pytest.approx(0.3, abs=tolerance)


def test_samples_that_are_not_finite_are_refused():
    process, given = PROCESSES[0], {"labels": torch.arange(2)}

    def model(x, timesteps, fields):
        return x * torch.where(fields["labels"] > 0, torch.nan, 1.0)[:, None, None, None]

    with pytest.raises(ValueError, match="1 of 2 samples are not finite after 5 steps"):
        sample(model, process, SHAPE, 2, given, 5, progress=False)
    for eta in (-0.1, 1.5, math.nan):
        with pytest.raises(ValueError, match=f"eta is {eta}; DDIM takes 0 to 1"):
            sample(model, process, SHAPE, 2, given, 5, eta=eta, progress=False)


@pytest.mark.parametrize("process", PROCESSES, ids=lambda p: f"{p.objective}-{p.schedule}")
def test_one_point_is_reached(process):
    model = gaussian_model(process, lambda y: 0.1 * y, std=0.0)
    labels = torch.tensor([3, 7])
    x = sample(model, process, SHAPE, 2, {"labels": labels}, 25, progress=False)
    torch.testing.assert_close(x, (0.1 * labels).view(2, 1, 1, 1).expand_as(x), rtol=0, atol=0.02)


def point_missed(process, num_steps, mean=0.2):
    """Distance of samples from the one point of the data, in steps of an exact model."""
    model = gaussian_model(process, lambda y: torch.full_like(y, mean, dtype=torch.float), std=0.0)
    given = {"labels": torch.zeros(2, dtype=torch.int64)}
    x = sample(model, process, SHAPE, 2, given, num_steps, progress=False)
    return float((x - mean).abs().max())


@pytest.mark.parametrize("num_timesteps", [20, 49])
@pytest.mark.parametrize("objective", [Objective.EPSILON, Objective.V, Objective.FLOW])
def test_every_number_of_steps_ends_at_clean_data(objective, num_timesteps):
    process = DiffusionProcess(objective, num_timesteps=num_timesteps)
    missed = [point_missed(process, n) for n in range(1, num_timesteps + 1)]
    assert max(missed) < 1e-5
    if objective == Objective.FLOW:
        return
    euler = {**DDIM, "_class_name": "EulerDiscreteScheduler", "timestep_spacing": "trailing"}
    euler |= {"set_alpha_to_one": True, "num_train_timesteps": num_timesteps}
    published = process_of_scheduler(euler)  # sampled with DDIM in its place
    assert max(point_missed(published, n) for n in range(1, num_timesteps + 1)) < 1e-5


def test_steps_meet_where_their_number_does_not_divide_the_timesteps():
    """With diffusers' stride of 1 in 600 of 1000 steps, samples keep noise from each step."""
    process = DiffusionProcess(Objective.EPSILON)
    model = gaussian_model(process, lambda y: 0.0 * y, std=0.1)
    given = {"labels": torch.zeros(64, dtype=torch.int64)}
    few, some = (
        sample(model, process, SHAPE, 64, given, num_steps, seed=3, progress=False).std()
        for num_steps in (500, 600)
    )
    assert some.item() == pytest.approx(few.item(), rel=0.01)


def test_noise_that_a_published_ddim_leaves_is_said():
    """Its samples are those of diffusers, with the noise that diffusers leaves."""
    trailing = {**DDIM, "timestep_spacing": "trailing", "set_alpha_to_one": True}
    process = process_of_scheduler(trailing)
    assert 0.02 < point_missed(process, 15) < 0.2
    assert noise_left(process, 15) == (
        "DDIMScheduler, trailing timesteps: the last of 15 steps ends at timestep 0, not at clean "
        "data, as in diffusers. Samples keep noise of standard deviation 0.029; 14 or 16 steps "
        "leave none"
    )
    for num_steps in (14, 16):
        assert noise_left(process, num_steps) == "" and point_missed(process, num_steps) < 1e-5
    offset = process_of_scheduler({**DDIM, "set_alpha_to_one": True})  # leading, from timestep 1
    assert "the last of 600 steps ends at timestep 0" in noise_left(offset, 600)
    assert "500 steps leave none" in noise_left(offset, 600)
    # The process's own DDIM, and a scheduler that wants the noise of timestep 0.
    for other in (DiffusionProcess(Objective.EPSILON), process_of_scheduler(DDIM)):
        assert not any(noise_left(other, n) for n in (15, 60, 600))
    with pytest.raises(ValueError, match="61 steps .* has a timestep below 0.* use 58 or 62 steps"):
        point_missed(process, 61)


def test_guidance_extrapolates_from_the_null_label():
    """With one-point data both branches agree but for their point, which guidance extrapolates."""
    process = DiffusionProcess(Objective.FLOW)
    model = gaussian_model(process, lambda y: torch.where(y == 10, 0.0, 0.2), std=0.0)
    given, null = {"labels": torch.tensor([1])}, {"labels": torch.tensor(10)}
    x = sample(model, process, SHAPE, 1, given, 10, guidance_scale=3.0, null=null, progress=False)
    torch.testing.assert_close(x, torch.full_like(x, 0.6), rtol=0, atol=1e-4)


def test_fields_without_a_null_value_stay_under_guidance():
    seen = []

    def model(x, timesteps, conditioning):
        seen.append({name: value.clone() for name, value in conditioning.items()})
        return x

    given = {"context": torch.ones(2, 3, 4), "time_ids": torch.arange(12.0).view(2, 6)}
    null = {"context": torch.full((3, 4), 7.0)}
    process = DiffusionProcess(Objective.FLOW)
    sample(model, process, SHAPE, 2, given, 1, guidance_scale=2.0, null=null, progress=False)
    (found,) = seen
    assert torch.equal(found["context"], torch.cat([given["context"], given["context"] * 7]))
    assert torch.equal(found["time_ids"], given["time_ids"].repeat(2, 1))


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_learned_sigma_does_not_count(guidance):
    process = DiffusionProcess(Objective.V)
    model = gaussian_model(process, lambda y: 0.1 * y, std=0.5)

    def with_sigma(*arguments):
        mean = model(*arguments)
        return torch.cat([mean, torch.full_like(mean, torch.nan)], dim=1)

    given, null = {"labels": torch.tensor([1, 2])}, {"labels": torch.tensor(0)}
    plain, learned = (
        sample(f, process, SHAPE, 2, given, 5, guidance, null=null, progress=False)
        for f in (model, with_sigma)
    )
    assert torch.equal(plain, learned)


@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_chunks_sample_the_same(eta):
    process = DiffusionProcess(Objective.V)
    model = gaussian_model(process, lambda y: 0.1 * y, std=0.5)
    labels = torch.arange(6)

    def run(labels, first):
        return sample(
            model, process, SHAPE, len(labels), {"labels": labels}, 10,
            seed=1, eta=eta, first_index=first, progress=False,
        )  # fmt: skip

    assert torch.equal(run(labels, 0), torch.cat([run(labels[:2], 0), run(labels[2:], 2)]))


def test_clip_bounds_the_result():
    process = DiffusionProcess(Objective.EPSILON)
    model = gaussian_model(process, lambda y: 5.0 * torch.ones_like(y), std=0.1)
    given = {"labels": torch.zeros(2, dtype=torch.int64)}
    assert sample(model, process, SHAPE, 2, given, 20, clip=1.0, progress=False).max() <= 1


def timesteps_of(process, num_steps):
    """At which timesteps the model is asked."""
    seen = []

    def model(x, timesteps, conditioning):
        seen.append(timesteps[0].item())
        return x

    sample(model, process, SHAPE, 1, {}, num_steps, progress=False)
    return seen


def test_grids_of_published_pipelines():
    """Sampling-only settings come from the scheduler; with zero SNR the grid ends at T."""
    sd = process_of_scheduler(PUBLISHED["sd-v1.5"])
    assert timesteps_of(sd, 50) == [981 - 20 * i for i in range(50)]
    zero = process_of_scheduler(PUBLISHED["sdxl-zero-snr"])
    assert timesteps_of(zero, 50) == [999 - 20 * i for i in range(50)]
    leading = process_of_scheduler({**PUBLISHED["sdxl-zero-snr"], "timestep_spacing": "leading"})
    assert timesteps_of(leading, 50) == timesteps_of(zero, 50)
    assert timesteps_of(process_of_scheduler(PUBLISHED["pixart"]), 4) == [999, 749, 499, 249]
    with pytest.raises(ValueError, match="steps_offset"):
        timesteps_of(sd, 1000)


@pytest.mark.parametrize("name", ["sd3", "flux-dev", "flux-schnell"])
def test_flow_is_sampled_on_the_grid_of_its_pipeline(name):
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    theirs = FlowMatchEulerDiscreteScheduler.from_config(PUBLISHED[name])
    theirs.set_timesteps(sigmas=np.linspace(1, 1 / 20, 20), mu=calculate_shift(1024))
    process = process_of_scheduler(PUBLISHED[name])
    seen = timesteps_of(process.for_tokens(1024), 20)
    assert seen == pytest.approx(theirs.timesteps.tolist(), rel=1e-6)


def test_ddim_is_that_of_the_pipeline():
    """The same pictures as diffusers' DDIM, made of the pipeline's own configuration."""
    from diffusers import DDIMScheduler

    process = process_of_scheduler(PUBLISHED["hunyuan-dit-v1.2"])
    model = gaussian_model(process, lambda y: 0.1 * y, std=0.5)
    given = {"labels": torch.tensor([3])}
    theirs = DDIMScheduler.from_config(PUBLISHED["hunyuan-dit-v1.2"])
    theirs.set_timesteps(20)
    x = start_noise(5, range(1), SHAPE)
    for timestep in theirs.timesteps:
        x = theirs.step(model(x, timestep.float().view(1), given), timestep, x).prev_sample
    ours = sample(model, process, SHAPE, 1, given, 20, seed=5, progress=False)
    torch.testing.assert_close(ours, x, rtol=0, atol=1e-6)


DDIM = {
    "_class_name": "DDIMScheduler", "beta_start": 0.00085, "beta_end": 0.012,
    "beta_schedule": "scaled_linear", "clip_sample": False, "set_alpha_to_one": False,
    "steps_offset": 1,
}  # fmt: skip
EULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}


@pytest.mark.parametrize(
    "config",
    [
        DDIM,
        {**DDIM, "timestep_spacing": "linspace"},
        {**DDIM, "timestep_spacing": "linspace", "rescale_betas_zero_snr": True,
         "prediction_type": "v_prediction"},
        {**DDIM, "timestep_spacing": "trailing", "set_alpha_to_one": True},
        {**DDIM, "clip_sample": True, "clip_sample_range": 0.3, "prediction_type": "sample"},
        {**DDIM, "thresholding": True, "sample_max_value": 1.5, "dynamic_thresholding_ratio": 0.7},
        EULER,
        {**EULER, "stochastic_sampling": True},
        {**EULER, "shift_terminal": 0.1, "use_karras_sigmas": True},
        {**EULER, "shift": 1.0, "use_exponential_sigmas": True, "stochastic_sampling": True},
    ],
    ids=lambda c: " ".join(f"{k}={v}" for k, v in c.items() if DDIM.get(k) != v),
)  # fmt: skip
@pytest.mark.parametrize("eta", [0.0, 0.5])
def test_a_trajectory_is_that_of_the_scheduler_itself(config, eta):
    """Every setting of the schedulers that sampling is, with diffusers' noise in all steps."""
    import diffusers

    theirs = getattr(diffusers, config["_class_name"]).from_config(config)
    flow = "beta_start" not in config
    if flow and eta:
        pytest.skip("flow has no eta")
    process = process_of_scheduler(config)
    zero_snr = process.zero_terminal_snr
    theirs.set_timesteps(9)
    seen = []

    def model(x, timesteps, conditioning):
        seen.append(float(timesteps[0]))
        return torch.tanh(x) * (0.5 + timesteps.view(-1, 1, 1, 1) / 2000)

    generator = torch.Generator().manual_seed(4)
    x = torch.randn((3, *SHAPE), generator=generator)
    for t in theirs.timesteps:
        # At zero SNR diffusers' root is of a rounding below 0, and fresh noise is what is there.
        more = {} if flow or (zero_snr and t == 999) else {"eta": eta}
        made = model(x, t.expand(3).float(), {})
        x = theirs.step(made, t, x, generator=generator, **more).prev_sample
    noises, expected = diffusers_noises(4, 3, range(1, 3), SHAPE), [*seen]
    seen.clear()
    ours = sample(
        model, process, SHAPE, 2, {}, 9, eta=eta, noises=noises, progress=False,
        flow_grid=FlowGrid.SCHEDULER if flow else FlowGrid.EVEN,
    )  # fmt: skip
    assert seen == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(ours, x[1:], rtol=1e-5, atol=1e-5)
    assert "without" not in describe_sampler(process)
    assert ("stochastic" in describe_sampler(process)) == ("stochastic_sampling" in config)


def test_what_does_not_count_of_another_sampler_is_said():
    config = {
        **DDIM, "_class_name": "EulerDiscreteScheduler", "timestep_spacing": "linspace",
        "use_karras_sigmas": True,
    }  # fmt: skip
    process = process_of_scheduler(config)
    assert timesteps_of(process, 4) == [999, 749, 499, 249]
    said = "DDIM, trailing timesteps, in place of EulerDiscreteScheduler, without its "
    assert describe_sampler(process) == f"{said}timestep_spacing linspace, use_karras_sigmas True"
    leading = process_of_scheduler({
        **DDIM, "rescale_betas_zero_snr": True, "prediction_type": "v_prediction",
    })  # fmt: skip
    said = "DDIM, trailing timesteps, without its timestep_spacing leading"
    assert describe_sampler(leading) == said
    with pytest.raises(ValueError, match="timestep_spacing is 'karras'; known: leading"):
        process_of_scheduler({**DDIM, "timestep_spacing": "karras"})


@pytest.mark.parametrize("num_steps", [10, 25, 30, 50])
def test_fresh_noise_from_zero_snr_is_finite(num_steps):
    """At the first step the root of a rounding below 0 gave NaN at many numbers of steps."""
    for objective in (Objective.V, Objective.SAMPLE):
        process = DiffusionProcess(objective, zero_terminal_snr=True)
        x = sample(
            lambda x, t, c: torch.zeros_like(x), process, SHAPE, 1, {}, num_steps, eta=1.0,
            progress=False,
        )  # fmt: skip
        assert x.isfinite().all()


def test_faults_are_listed():
    with pytest.raises(ValueError) as error:
        sample(None, DiffusionProcess(Objective.FLOW), SHAPE, 1, {}, 0, guidance_scale=2.0, eta=1)
    for part in ("num_steps", "null values", "eta"):
        assert part in str(error.value)
    dynamic = DiffusionProcess(Objective.FLOW, shift=DynamicShift())
    with pytest.raises(ValueError, match="picture's size"):
        sample(None, dynamic, SHAPE, 1, {}, 4)


def test_grid(tmp_path):
    images = torch.linspace(-1, 1, 6).view(6, 1, 1, 1).expand(6, 1, 8, 8)
    path = save_grid(images, tmp_path / "new" / "grid.png", 3, labels=torch.arange(6), scale=2)
    with Image.open(path) as grid:
        assert grid.size == (3 * 18 + 2, 2 * 30 + 2)
        assert grid.getpixel((5, 5)) == (0, 0, 0)
        assert grid.getpixel((2 * 18 + 5, 30 + 5)) == (255, 255, 255)
    assert [p.name for p in path.parent.iterdir()] == ["grid.png"]
    with pytest.raises(ValueError, match="decode latents"):
        save_grid(torch.zeros(1, 4, 8, 8), tmp_path / "x.png", 1)
