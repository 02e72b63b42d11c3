"""Sampling with classifier-free guidance: DDIM for epsilon and v, Euler for flow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from megatron_pulse.diffusion.choice import DynamicShift, Objective
from megatron_pulse.diffusion.noise import start_noise
from megatron_pulse.diffusion.objectives import DiffusionProcess, predicted_mean
from megatron_pulse.diffusion.scheduler_export import sampling_settings
from megatron_pulse.diffusion.self_conditioning import beside
from megatron_pulse.faults import told

Fields = Mapping[str, Tensor]
ModelFunction = Callable[[Tensor, Tensor, Fields], Tensor]
"""(x_t ``[b, c, h, w]``, timesteps float32 ``[b]``, conditioning ``[b, ...]``) -> prediction."""


@torch.no_grad()
def sample(
    model_fn: ModelFunction,
    process: DiffusionProcess,
    shape: tuple[int, ...],
    count: int,
    conditioning: Fields,
    num_steps: int,
    guidance_scale: float = 1.0,
    seed: int = 0,
    eta: float = 0.0,
    null: Fields | None = None,
    progress: bool = True,
    clip: float | None = None,
    first_index: int = 0,
    self_conditioned: bool = False,
) -> Tensor:
    """``count`` samples ``[count, *shape]`` float32, for named ``conditioning [count, ...]``.

    Sample i starts from noise of (``seed``, ``first_index`` + i) alone, so a set sampled in
    chunks is the set sampled at once. Guidance (Ho & Salimans 2022) evaluates the model on
    ``[conditional; unconditional]``, a batch of twice ``count``, unless ``guidance_scale`` is 1;
    the latter has the values of ``null`` (without batch dimension) in place of its own. Of a
    prediction with a learned sigma only the mean's half counts (see predicted_mean). ``eta`` is
    DDIM's (Song et al. 2021, eq. 16). ``clip`` bounds DDIM's estimate of x_0 (1 for pixels in
    [-1, 1], None for latents); Euler has no such estimate and bounds only the result.
    A ``self_conditioned`` model gets ``[b, 2c, h, w]``: behind x_t what it made of x_0 in the step
    before (zeros in the first), within ``clip``; under guidance each half its own, as in training.
    What a published scheduler says of sampling counts (see sampling_settings); else, and with zero
    terminal SNR, the grid begins at the last timestep (Lin et al. 2024, section 3.3). A dynamic
    shift must have become a number (see DiffusionProcess.for_tokens).
    """
    _check(process, num_steps, guidance_scale, eta, null)
    indices = range(first_index, first_index + count)
    x = start_noise(seed, indices, shape)
    scheduler, euler = _scheduler(process, num_steps, clip), process.objective == Objective.FLOW
    guided = (
        {
            name: torch.cat([value, _repeated(null[name], count) if name in null else value])
            for name, value in conditioning.items()
        }
        if null and guidance_scale != 1
        else {}
    )

    estimate: Tensor | None = None

    def predict(x: Tensor, timestep: Tensor) -> Tensor:
        nonlocal estimate
        is_guided = guidance_scale != 1
        noisy = torch.cat([x, x]) if is_guided else x
        timesteps = timestep.to(torch.float32).expand(len(noisy))
        given = beside(noisy, estimate) if self_conditioned else noisy
        made = model_fn(given, timesteps, guided if is_guided else conditioning)
        mean = predicted_mean(made, shape[0]).float()
        if self_conditioned:
            estimate = process.clean(noisy, mean, timesteps)
            estimate = estimate if clip is None else estimate.clamp(-clip, clip)
        if not is_guided:
            return mean
        conditional, unconditional = mean.chunk(2)
        return unconditional + guidance_scale * (conditional - unconditional)

    steps = tqdm(scheduler.timesteps, desc="sampling", disable=not progress, leave=False)
    for step, timestep in enumerate(steps, start=1):
        extra: dict[str, Any] = {}
        if not euler:
            # From noise alone fresh noise and that which is there are alike, and DDIM's root of
            # what is left beside fresh noise may be of a rounding below 0.
            from_noise = not scheduler.alphas_cumprod[int(timestep)]
            extra["eta"] = 0.0 if from_noise else eta
            if extra["eta"] > 0:
                extra["variance_noise"] = start_noise(seed, indices, shape, step)
        x = scheduler.step(predict(x, timestep), timestep, x, **extra).prev_sample
    return x if clip is None else x.clamp(-clip, clip)


def _repeated(value: Tensor, count: int) -> Tensor:
    return value.expand(count, *value.shape)


def _check(
    process: DiffusionProcess,
    num_steps: int,
    guidance_scale: float,
    eta: float,
    null: Fields | None,
) -> None:
    faults = []
    if not 1 <= num_steps <= process.num_timesteps:
        faults.append(f"num_steps is {num_steps}; use 1 to {process.num_timesteps}")
    if guidance_scale != 1 and not null:
        faults.append("guidance needs null values, those that dropped conditioning had in training")
    if eta < 0 or (eta > 0 and process.objective == Objective.FLOW):
        faults.append(f"eta is {eta}; DDIM takes eta >= 0, flow's Euler steps only 0")
    if isinstance(process.shift, DynamicShift):
        faults.append("a dynamic shift has no value before the picture's size is known")
    if faults:
        raise ValueError(told("sampling", faults))


def _scheduler(process: DiffusionProcess, num_steps: int, clip: float | None) -> Any:
    from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler

    settings = sampling_settings(process)
    if process.objective == Objective.FLOW:
        euler = FlowMatchEulerDiscreteScheduler(
            num_train_timesteps=process.num_timesteps, shift=process.shift, **settings
        )
        # diffusers' own default grid spends its last step on going from 1/1000 to 0.
        euler.set_timesteps(sigmas=np.linspace(1.0, 1.0 / num_steps, num_steps).tolist())
        return euler
    settings = {"timestep_spacing": "trailing", "clip_sample": False} | settings
    if process.zero_terminal_snr:
        settings["timestep_spacing"] = "trailing"  # any other never sees the last timestep
    if clip is not None:
        settings |= {"clip_sample": True, "clip_sample_range": clip}
    ddim = DDIMScheduler(**process.scheduler_arguments() | settings)
    ddim.set_timesteps(num_steps)
    if int(ddim.timesteps.max()) >= process.num_timesteps:
        raise ValueError(
            f"sampling: {num_steps} steps with the scheduler's steps_offset of "
            f"{settings['steps_offset']} pass the last timestep: use fewer"
        )
    return ddim
