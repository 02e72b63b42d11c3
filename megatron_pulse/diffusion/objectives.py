"""Diffusion objectives: what is added to a clean sample, and what the model must predict."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler
from torch import Tensor


class Objective(StrEnum):
    """What the model predicts."""

    EPSILON = "epsilon"
    V = "v"
    FLOW = "flow"


class NoiseSchedule(StrEnum):
    """How the noise grows with the timestep (epsilon and v; flow needs none)."""

    SCALED_LINEAR = "scaled_linear"
    LINEAR = "linear"
    COSINE = "cosine"


class TimestepDensity(StrEnum):
    """How timesteps are drawn in training."""

    UNIFORM = "uniform"
    LOGIT_NORMAL = "logit_normal"


_BETAS = {
    NoiseSchedule.SCALED_LINEAR: (0.00085, 0.012),
    NoiseSchedule.LINEAR: (0.0001, 0.02),
    NoiseSchedule.COSINE: (0.0001, 0.02),
}
_DIFFUSERS_SCHEDULE = {NoiseSchedule.COSINE: "squaredcos_cap_v2"}
_DIFFUSERS_PREDICTION = {Objective.EPSILON: "epsilon", Objective.V: "v_prediction"}


@dataclass(frozen=True)
class DiffusionProcess:
    """One diffusion process; a value, so that it can be stored with a checkpoint.

    ``epsilon`` (Ho et al. 2020, eq. 14) and ``v`` (Salimans & Ho 2022, appendix D) noise with
    diffusers' DDPMScheduler. ``flow`` is rectified flow (Liu et al. 2022): with t in [0, 1],
    x_t = (1 - t) x_0 + t eps and the target is eps - x_0. ``density`` and its logit-normal
    parameters are those of Esser et al. 2024, section 3.1; they apply to flow only.

    Timesteps are float32 in [0, ``num_timesteps``] for every objective (flow's t is scaled), so a
    backbone's sinusoidal embedding sees one range. ``beta_start`` and ``beta_end`` default to
    Stable Diffusion's for ``scaled_linear`` and DDPM's for ``linear``; ``cosine`` has none.
    """

    objective: Objective
    schedule: NoiseSchedule = NoiseSchedule.SCALED_LINEAR
    num_timesteps: int = 1000
    beta_start: float | None = None
    beta_end: float | None = None
    zero_terminal_snr: bool = False
    density: TimestepDensity = TimestepDensity.UNIFORM
    logit_mean: float = 0.0
    logit_std: float = 1.0

    def __post_init__(self) -> None:
        faults = list(self._faults())
        if faults:
            raise ValueError("diffusion process:" + "".join(f"\n  - {fault}" for fault in faults))
        object.__setattr__(self, "objective", Objective(self.objective))
        object.__setattr__(self, "schedule", NoiseSchedule(self.schedule))
        object.__setattr__(self, "density", TimestepDensity(self.density))

    def _faults(self) -> list[str]:
        faults = [
            f"{name} {value!r} is not one of: {', '.join(kind)}"
            for name, kind, value in (
                ("objective", Objective, self.objective),
                ("schedule", NoiseSchedule, self.schedule),
                ("density", TimestepDensity, self.density),
            )
            if value not in tuple(kind)
        ]
        if self.num_timesteps < 2:
            faults.append(f"num_timesteps is {self.num_timesteps}; it must be 2 or more")
        if self.schedule in _BETAS:
            start, end = self.betas
            if not 0 < start <= end < 1:
                faults.append(
                    f"betas run from {start} to {end}; they need 0 < beta_start <= beta_end < 1"
                )
        if self.logit_std <= 0:
            faults.append(f"logit_std is {self.logit_std}; it must be positive")
        if self.zero_terminal_snr and self.objective == Objective.EPSILON:
            faults.append("epsilon tells nothing at zero signal; use v with zero_terminal_snr")
        if self.density != TimestepDensity.UNIFORM and self.objective != Objective.FLOW:
            faults.append(f"density {self.density} is flow's; use uniform with {self.objective}")
        return faults

    @property
    def betas(self) -> tuple[float, float]:
        """The first and the last beta, defaults filled in."""
        start, end = _BETAS[NoiseSchedule(self.schedule)]
        return (
            start if self.beta_start is None else self.beta_start,
            end if self.beta_end is None else self.beta_end,
        )

    def scheduler_config(self) -> dict[str, Any]:
        """Arguments of diffusers' DDPM and DDIM schedulers that stand for this process."""
        start, end = self.betas
        return {
            "num_train_timesteps": self.num_timesteps,
            "beta_start": start,
            "beta_end": end,
            "beta_schedule": _DIFFUSERS_SCHEDULE.get(self.schedule, str(self.schedule)),
            "prediction_type": _DIFFUSERS_PREDICTION[self.objective],
            "rescale_betas_zero_snr": self.zero_terminal_snr,
        }

    def timestep(self, u: float) -> float:
        """The training timestep for a uniform number ``u`` in [0, 1).

        A scalar function on purpose: vectorised kernels round the tail of a tensor differently,
        which would make a sample's timestep depend on its place in the microbatch.
        """
        if self.objective != Objective.FLOW:
            return float(min(int(u * self.num_timesteps), self.num_timesteps - 1))
        if self.density == TimestepDensity.LOGIT_NORMAL:
            normal = NormalDist().inv_cdf(min(max(u, 1e-12), 1 - 1e-12))
            u = 1 / (1 + math.exp(-(self.logit_mean + self.logit_std * normal)))
        return u * self.num_timesteps

    def noised(self, x0: Tensor, noise: Tensor, timesteps: Tensor) -> tuple[Tensor, Tensor]:
        """Noisy samples and targets, both ``[b, ...]``, at float32 ``timesteps [b]``."""
        if self.objective == Objective.FLOW:
            t = (timesteps / self.num_timesteps).view(-1, *[1] * (x0.dim() - 1)).to(x0.dtype)
            return (1 - t) * x0 + t * noise, noise - x0
        scheduler, steps = _ddpm(self), timesteps.long()
        noisy = scheduler.add_noise(x0, noise, steps)
        if self.objective == Objective.EPSILON:
            return noisy, noise
        return noisy, scheduler.get_velocity(x0, noise, steps)

    def loss(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Mean squared error over a microbatch, in fp32: a scalar."""
        return F.mse_loss(prediction.float(), target.float())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint or a log; ``DiffusionProcess(**it)`` is the inverse."""
        return {
            name: str(value) if isinstance(value, StrEnum) else value
            for name, value in vars(self).items()
        }


def predicted_mean(prediction: Tensor, num_channels: int) -> Tensor:
    """The part of ``prediction [b, c, h, w]`` that predicts what the objective names.

    Models with a learned sigma (DiT, PixArt, Hunyuan-DiT) give 2 x ``num_channels``: the mean's
    prediction, then the variance's (Nichol & Dhariwal 2021). We train and sample with a fixed
    variance, so the second half is not used, and its weights get no gradient.
    """
    return prediction[:, :num_channels]


@lru_cache(maxsize=8)
def _ddpm(process: DiffusionProcess) -> DDPMScheduler:
    with torch.device("cpu"):
        return DDPMScheduler(**process.scheduler_config())
