"""Sampling with classifier-free guidance: DDIM for epsilon and v, Euler for flow and EDM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from megatron_pulse.backbone.appended_fields import IMAGE_LATENT
from megatron_pulse.diffusion.noise import sample_noises
from megatron_pulse.diffusion.objectives import DiffusionProcess, predicted_mean
from megatron_pulse.diffusion.process_flags import DynamicShift, FlowGrid, Objective
from megatron_pulse.diffusion.sampling_rules import NO_RULES, SamplingRules
from megatron_pulse.diffusion.scheduler_export import (
    ddim_spacing,
    is_as_published,
    is_stochastic,
    sampling_settings,
)
from megatron_pulse.diffusion.self_conditioning import beside
from megatron_pulse.errors import format_faults
from megatron_pulse.progress import track

Fields = Mapping[str, Tensor]
type GuidanceScale = float | Tensor | Callable[[float], float]
"""Guidance scale: one, one for each element of a sample, or a function of the timestep."""
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
    guidance_scale: GuidanceScale = 1.0,
    seed: int = 0,
    eta: float = 0.0,
    null: Fields | None = None,
    progress: bool = True,
    clip: float | None = None,
    first_index: int = 0,
    self_conditioned: bool = False,
    noises: Iterator[Tensor] | None = None,
    flow_grid: FlowGrid = FlowGrid.EVEN,
    rules: SamplingRules = NO_RULES,
    known_frames: int = 0,
) -> Tensor:
    """Draw ``count`` samples ``[count, *shape]`` float32, for named ``conditioning [count, ...]``.

    Sample i starts from noise of (``seed``, ``first_index`` + i) alone, so a set sampled in chunks
    equals the set sampled at once. ``noises``, if given, replace these: each is ``[count,
    *shape]``, first the start (both samplers' init_noise_sigma is 1), then the noise of each
    stochastic step. EDM's start is scaled to the largest sigma.

    Guidance (Ho & Salimans 2022) evaluates the model on ``[conditional; unconditional]``, a batch
    of twice ``count``, unless ``guidance_scale`` is 1. The unconditional half takes the values of
    ``null`` (without batch dimension, or ``[count, ...]``). A tensor of scales is broadcast to
    ``shape``; SVD's grow from frame to frame. Experts may have scales of their own. A learned sigma
    is ignored (see ``predicted_mean``).

    ``eta`` is DDIM's (Song et al. 2021, eq. 16). Flow's Euler is stochastic if the published
    scheduler is. ``clip`` bounds DDIM's estimate of x_0 (1 for pixels in [-1, 1], None for
    latents). Euler has no such estimate and bounds only the result.

    A ``self_conditioned`` model gets ``[b, 2c, h, w]``: x_t, then the previous step's estimate of
    x_0 within ``clip`` (zeros in the first step). Under guidance each half uses its own estimate,
    as in training.

    Sampling settings of a published scheduler apply (see ``sampling_settings`` and
    ``ddim_spacing``). Otherwise the grid begins at the last timestep (Lin et al. 2024, section
    3.3), each step ends at the grid's next timestep, and the last at clean data. A published DDIM
    is diffusers' at any number of steps (see ``noise_left``). ``flow_grid`` is flow's. A dynamic
    shift must be resolved first (see ``DiffusionProcess.for_tokens``).

    ``rules`` are those of the class's pipeline. The first ``known_frames`` of samples ``[c, f, h,
    w]`` are those of the conditioning's ``image_latent``. Raises ValueError for invalid settings,
    and for samples that are not finite.
    """
    if faults := setting_faults(process, num_steps, guidance_scale, eta, flow_grid, bool(null)):
        raise ValueError(format_faults("sampling", faults))
    if noises is None:
        noises = sample_noises(seed, range(first_index, first_index + count), shape)
    x = next(noises)
    scheduler = _scheduler(process, num_steps, clip, flow_grid, rules)
    is_edm = process.objective == Objective.EDM
    scales_ends = rules.scales_ends and process.objective == Objective.FLOW
    if is_edm:
        x = x * scheduler.init_noise_sigma
    elif scales_ends:
        x = x * scheduler.sigmas[0]
    step = (
        partial(_ddim_step, eta=eta)
        if process.objective.has_betas
        else partial(_euler_step, stochastic=is_stochastic(process))
    )
    is_guided = guides(guidance_scale)
    guided = (
        {
            name: torch.cat([value, _repeated(null[name], value) if name in null else value])
            for name, value in conditioning.items()
        }
        if null and is_guided
        else {}
    )

    guide = rules.guide()
    estimate: Tensor | None = None

    def predict(x: Tensor, timestep: Tensor) -> Tensor:
        nonlocal estimate
        x = scheduler.scale_model_input(x, timestep) if is_edm else x
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
        scale = guidance_scale(float(timestep)) if callable(guidance_scale) else guidance_scale
        return guide(conditional, unconditional, scale)

    def with_known(x: Tensor) -> Tensor:
        if known_frames:
            known = conditioning[IMAGE_LATENT][:, :, :known_frames].to(x)
            x = torch.cat([known, x[:, :, known_frames:]], 2)
        return x

    for timestep in track(scheduler.timesteps, "sampling", "steps", silent=not progress):
        x = step(scheduler, predict(with_known(x), timestep), timestep, x, noises)
    if scales_ends:
        x = x / (1 - scheduler.sigmas[-1])
    x = with_known(x)
    if known_frames and rules.finish is not None:
        x = rules.finish(x)
    if num := sum(not bool(one.isfinite().all()) for one in x):
        raise ValueError(
            f"{num} of {count} samples are not finite after {num_steps} steps. Check the weights "
            "(--raw uses the trained weights instead of their EMA), the training loss and the "
            "gradients"
        )
    return x if clip is None else x.clamp(-clip, clip)


def _ddim_step(
    scheduler: Any, made: Tensor, timestep: Tensor, x: Tensor, noises: Iterator[Tensor], eta: float
) -> Tensor:
    # At zero signal, fresh noise and the present noise are equivalent. Rounding could also make the
    # radicand in DDIM's step negative there.
    if eta == 0 or not scheduler.alphas_cumprod[int(timestep)]:
        return cast(Tensor, scheduler.step(made, timestep, x).prev_sample)
    fresh = next(noises)
    return cast(
        Tensor, scheduler.step(made, timestep, x, eta=eta, variance_noise=fresh).prev_sample
    )


def _euler_step(
    scheduler: Any,
    made: Tensor,
    timestep: Tensor,
    x: Tensor,
    noises: Iterator[Tensor],
    stochastic: bool,
) -> Tensor:
    stepped = scheduler.step(made, timestep, x).prev_sample
    if not stochastic:
        return cast(Tensor, stepped)
    # diffusers' stochastic_sampling, with noise that is a function of seed and sample.
    now, later = scheduler.sigmas[scheduler.step_index - 1 : scheduler.step_index + 1]
    return cast(Tensor, (1 - later) * (x - now * made) + later * next(noises))


def _repeated(null: Tensor, conditioning: Tensor) -> Tensor:
    """Null values of every sample."""
    return null if null.dim() == conditioning.dim() else null.expand(len(conditioning), *null.shape)


def guides(scale: GuidanceScale) -> bool:
    """True unless the scale is 1 at all times."""
    return not isinstance(scale, int | float) or scale != 1


def setting_faults(
    process: DiffusionProcess,
    num_steps: int,
    guidance_scale: GuidanceScale,
    eta: float,
    flow_grid: FlowGrid,
    has_null: bool,
) -> list[str]:
    """Faults of settings with which ``sample`` cannot draw."""
    faults = []
    if not 1 <= num_steps <= process.num_timesteps:
        faults.append(f"num_steps is {num_steps}; use 1 to {process.num_timesteps}")
    if not has_null and guides(guidance_scale):
        faults.append("guidance needs null values: the values of dropped conditioning in training")
    if not 0 <= eta <= 1 or (eta > 0 and not process.objective.has_betas):
        faults.append(f"eta is {eta}; DDIM takes 0 to 1, Euler steps only 0")
    if flow_grid != FlowGrid.EVEN and process.objective != Objective.FLOW:
        faults.append(f"the grid {flow_grid} is for flow; {process.objective} has timesteps")
    if isinstance(process.shift, DynamicShift):
        faults.append("a dynamic shift has no value before the picture's size is known")
    return faults


def _scheduler(
    process: DiffusionProcess,
    num_steps: int,
    clip: float | None,
    flow_grid: FlowGrid,
    rules: SamplingRules,
) -> Any:
    from diffusers import EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler

    if process.objective == Objective.EDM:
        edm = EulerDiscreteScheduler(**sampling_settings(process))
        edm.set_timesteps(num_steps)
        return edm
    if process.objective == Objective.FLOW:
        euler = FlowMatchEulerDiscreteScheduler(
            num_train_timesteps=process.num_timesteps,
            shift=process.shift,
            **{**sampling_settings(process), **rules.settings},
        )
        if flow_grid == FlowGrid.SCHEDULER:
            euler.set_timesteps(num_steps)
        elif rules.grid is None:  # diffusers' grid spends its last step between 1/1000 and 0
            euler.set_timesteps(sigmas=np.linspace(1.0, 1.0 / num_steps, num_steps).tolist())
        else:
            times = rules.grid(num_steps)
            euler.set_timesteps(sigmas=times[:num_steps])
            euler.sigmas[-1] = times[num_steps] if len(times) > num_steps else 0.0
        return euler
    ddim = _ddim(process, num_steps, clip)
    if int(ddim.timesteps.max()) >= process.num_timesteps:
        raise ValueError(
            f"sampling: {num_steps} steps with the scheduler's steps_offset of "
            f"{ddim.config.steps_offset} exceed the last timestep: use fewer"
        )
    if not is_as_published(process):
        _end_at_next(ddim)
    elif int(ddim.timesteps.min()) < 0:
        raise ValueError(
            f"sampling: with {num_steps} steps the grid of the published "
            f"{process.scheduler['_class_name']} has a timestep below 0, by rounding in diffusers: "
            f"use {_listed(_clean_counts(process, num_steps))} steps"
        )
    return ddim


def _ddim(process: DiffusionProcess, num_steps: int, clip: float | None) -> Any:
    from diffusers import DDIMScheduler

    settings = {"clip_sample": False, **sampling_settings(process)}
    settings["timestep_spacing"] = ddim_spacing(process)
    if clip is not None:
        settings |= {"clip_sample": True, "clip_sample_range": clip}
    ddim = DDIMScheduler(**process.scheduler_arguments() | settings)
    ddim.set_timesteps(num_steps)
    return ddim


def _end_at_next(ddim: Any) -> None:
    """Make each step of ``ddim`` end at the next timestep, and the last at clean data.

    diffusers' steps end a fixed T // n timesteps on. Where n does not divide T, that is not the
    next timestep of a trailing grid, and the last step can end at timestep 0, with noise left.
    """
    grid = ddim.timesteps = ddim.timesteps[ddim.timesteps >= 0]  # rounding can add a timestep -1
    ends = grid - ddim.config.num_train_timesteps // ddim.num_inference_steps
    table = ddim.alphas_cumprod
    after = torch.cat([table[grid[1:]], ddim.final_alpha_cumprod.view(1)])
    # The end of a step lies between two timesteps of the grid, so no entry of the grid changes.
    table[ends[ends >= 0]] = after[ends >= 0]


def noise_left(process: DiffusionProcess, num_steps: int) -> str:
    """Caution if DDIM, as diffusers steps it, leaves noise in samples; empty if it leaves none.

    Only a published DDIM does, at some numbers of steps. A scheduler whose ``set_alpha_to_one`` is
    false ends at timestep 0 with any number.
    """
    if not process.objective.has_betas or not is_as_published(process):
        return ""
    ddim = _ddim(process, num_steps, None)
    end = _last_end(ddim)
    if not 0 <= end or ddim.alphas_cumprod[end] >= ddim.final_alpha_cumprod:
        return ""
    noise = float((1 - ddim.alphas_cumprod[end]).sqrt())
    return (
        f"{process.scheduler['_class_name']}, {ddim.config.timestep_spacing} timesteps: the last "
        f"of {num_steps} steps ends at timestep {end}, not at clean data, as in diffusers. Samples "
        f"keep noise of standard deviation {noise:.2g}; "
        f"{_listed(_clean_counts(process, num_steps))} steps leave none"
    )


def _last_end(ddim: Any) -> int:
    """Timestep at which diffusers' last step ends; clean data if negative."""
    stride: int = ddim.config.num_train_timesteps // ddim.num_inference_steps
    return int(ddim.timesteps[-1]) - stride


def _clean_counts(process: DiffusionProcess, num_steps: int) -> list[int]:
    """Numbers of steps next to ``num_steps`` with which diffusers' DDIM leaves no noise."""
    ddim = _ddim(process, 1, None)

    def is_clean(count: int) -> bool:
        ddim.set_timesteps(count)
        is_inside = 0 <= int(ddim.timesteps.min()) <= int(ddim.timesteps.max()) < len(ddim.betas)
        return is_inside and _last_end(ddim) < 0

    below, above = range(num_steps - 1, 0, -1), range(num_steps + 1, process.num_timesteps + 1)
    return [n for side in (below, above) for n in islice(filter(is_clean, side), 1)]


def _listed(counts: list[int]) -> str:
    return " or ".join(map(str, counts))
