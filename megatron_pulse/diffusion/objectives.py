"""Diffusion objectives: noising of a clean sample, and the prediction target."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_pulse.diffusion.process_flags import (
    DynamicShift,
    NoiseSchedule,
    Objective,
    TimestepDensity,
)
from megatron_pulse.errors import format_faults

_BETAS = {
    NoiseSchedule.SCALED_LINEAR: (0.00085, 0.012),
    NoiseSchedule.LINEAR: (0.0001, 0.02),
}
DIFFUSERS_SCHEDULE = {
    NoiseSchedule.SCALED_LINEAR: "scaled_linear",
    NoiseSchedule.LINEAR: "linear",
    NoiseSchedule.COSINE: "squaredcos_cap_v2",
}
DIFFUSERS_PREDICTION = {
    Objective.EPSILON: "epsilon",
    Objective.V: "v_prediction",
    Objective.SAMPLE: "sample",
}
_OF_BETAS = ("schedule", "beta_start", "beta_end", "trained_betas")
_MOST_TIMESTEPS = 1_000_000
VALIDATION_TIMES = 8
"""Number of times at which validation losses are taken."""
MODE_SCALE = 1.29
"""Scale of the mode density that Esser et al. 2024 found best."""
EDM_MEAN, EDM_STD = 0.7, 1.6
"""Mean and deviation of ln sigma in training SVD (Blattmann et al. 2023, appendix D)."""
_CLOSEST = 1e-12
"""Distance of EDM's times from 0 and 1, at which sigma is 0 and infinite."""
_OF_LOGIT_NORMAL = {"logit_mean": 0.0, "logit_std": 1.0}
_OF_FLOW = {"shift": 1.0, **_OF_LOGIT_NORMAL, "mode_scale": MODE_SCALE}
_SPEED_FROM, _SPEED_RATIO = 0.7, 5.0
"""Time from which SpeeD draws less often, and the ratio (Wang et al. 2024, 2405.17403)."""


@dataclass(frozen=True)
class DiffusionProcess:
    """Diffusion process; an immutable value that a checkpoint can store.

    ``epsilon`` (Ho et al. 2020, eq. 14), ``v`` (Salimans & Ho 2022, appendix D) and ``sample`` (x_0
    itself) noise with diffusers' DDPMScheduler. ``flow`` is rectified flow (Liu et al. 2022): with
    t in [0, 1], x_t = (1 - t) x_0 + t eps and the target is eps - x_0.

    ``edm`` is Karras et al. 2022, table 1, with sigma_data 1 and c_skip, c_out as SVD has them. The
    backbone sees c_in (x_0 + sigma eps), c_in = 1 / sqrt(1 + sigma^2), and the timestep c_noise =
    ln(sigma) / 4. The loss of the denoised sample is weighted by 1 / c_out^2. It equals the squared
    error of the backbone's output to c_in (eps - sigma x_0), which is v at a continuous sigma. The
    times of ``edm`` are sigma / (1 + sigma), so that logit-normal times are a log-normal sigma.

    Other timesteps are float32 in [0, ``num_timesteps``) (flow's t is scaled), so a
    backbone's sinusoidal embedding sees one range. ``beta_start`` and ``beta_end`` default to
    Stable Diffusion's for ``scaled_linear`` and DDPM's for ``linear``. ``cosine`` has none.
    ``trained`` has ``trained_betas`` instead, one for each timestep. ``zero_terminal_snr`` rescales
    the betas as in Lin et al. 2024, algorithm 1.

    ``shift`` moves flow's times towards noise: t' = s t / (1 + (s - 1) t). The shift applies to the
    sampler's grid and to the times drawn in training, so that a backbone is trained at the times of
    sampling. Esser et al. 2024 (section 5.3.2) and diffusers' scripts for SD3 do the same. A
    dynamic shift (Flux) also applies to both; diffusers' script for Flux trains without it.

    ``density`` and its parameters are those of Esser et al. 2024, section 3.1, before the shift;
    ``speed``, for the other objectives, is SpeeD's asymmetric sampling (Wang et al. 2024, section
    3.2). Times are drawn from ``min_time`` to ``max_time``, shares of the process. A trained
    backbone works with any shift, density and range, so they are choices of a run. The other fields
    define the meaning of its predictions (see ``differences``).

    ``scheduler`` is the published scheduler's configuration, if any. Settings for sampling come
    from there and are written back on export. ``scheduler`` is not part of the process's identity.
    """

    objective: Objective
    schedule: NoiseSchedule | None = None
    num_timesteps: int = 1000
    beta_start: float | None = None
    beta_end: float | None = None
    trained_betas: tuple[float, ...] | None = None
    zero_terminal_snr: bool = False
    shift: float | DynamicShift = 1.0
    density: TimestepDensity = TimestepDensity.UNIFORM
    logit_mean: float = 0.0
    logit_std: float = 1.0
    mode_scale: float = MODE_SCALE
    min_time: float = 0.0
    max_time: float = 1.0
    scheduler: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        def fill(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        if isinstance(self.shift, Mapping):
            fill("shift", DynamicShift(**self.shift))
        if self.trained_betas is not None:
            fill("trained_betas", tuple(self.trained_betas))
        if self.schedule is None and self._has_betas:
            trained = self.trained_betas is not None
            fill("schedule", NoiseSchedule.TRAINED if trained else NoiseSchedule.SCALED_LINEAR)
        if self.schedule in _BETAS:
            start, end = _BETAS[NoiseSchedule(self.schedule)]
            fill("beta_start", start if self.beta_start is None else self.beta_start)
            fill("beta_end", end if self.beta_end is None else self.beta_end)
        faults = list(self._faults())
        if faults:
            raise ValueError(format_faults("diffusion process", faults))
        fill("objective", Objective(self.objective))
        fill("schedule", None if self.schedule is None else NoiseSchedule(self.schedule))
        fill("density", TimestepDensity(self.density))

    @property
    def _has_betas(self) -> bool:
        return self.objective not in tuple(Objective) or Objective(self.objective).has_betas

    def _faults(self) -> list[str]:
        faults = [
            f"{name} {value!r} is not one of: {', '.join(kind)}"
            for name, kind, value in (
                ("objective", Objective, self.objective),
                ("schedule", NoiseSchedule, self.schedule),
                ("density", TimestepDensity, self.density),
            )
            if value is not None and value not in tuple(kind)
        ]
        if not 2 <= self.num_timesteps <= _MOST_TIMESTEPS:
            faults.append(
                f"num_timesteps is {self.num_timesteps}; it must be from 2 to {_MOST_TIMESTEPS:,}"
            )
        if not (math.isfinite(self.logit_mean) and 0 < self.logit_std < math.inf):
            faults.append(
                f"logit_mean is {self.logit_mean} and logit_std {self.logit_std}; they must be "
                "finite, the latter positive"
            )
        if not 0 <= self.min_time < self.max_time <= 1:
            faults.append(
                f"min_time is {self.min_time} and max_time {self.max_time}; they need "
                "0 <= min_time < max_time <= 1"
            )
        return faults + self._faults_of_betas() + self._faults_of_flow()

    def _faults_of_betas(self) -> list[str]:
        given = [name for name in _OF_BETAS if getattr(self, name) is not None]
        given += ["zero_terminal_snr"] * self.zero_terminal_snr
        if not self._has_betas:
            return (
                [f"{', '.join(given)}: not allowed, since {self.objective} has no noise schedule"]
                if given
                else []
            )
        faults = []
        if self.schedule in _BETAS:
            start, end = self.beta_start, self.beta_end
            assert start is not None and end is not None
            if not 0 < start <= end < 1:
                faults.append(
                    f"betas run from {start} to {end}; they need 0 < beta_start <= beta_end < 1"
                )
        elif self.beta_start is not None or self.beta_end is not None:
            faults.append(f"beta_start and beta_end: the schedule {self.schedule} has none")
        if (self.trained_betas is not None) != (self.schedule == NoiseSchedule.TRAINED):
            faults.append("trained_betas and schedule='trained' must be given together")
        elif self.trained_betas is not None:
            if len(self.trained_betas) != self.num_timesteps:
                faults.append(
                    f"{len(self.trained_betas)} trained_betas were given for {self.num_timesteps} "
                    "timesteps"
                )
            if not all(isinstance(b, float | int) and 0 < b < 1 for b in self.trained_betas):
                faults.append("trained_betas must be numbers between 0 and 1")
        if self.zero_terminal_snr and self.objective == Objective.EPSILON:
            faults.append(
                "zero_terminal_snr excludes epsilon, which is undefined at zero signal; use v"
            )
        return faults or self._vanishing_signal()

    def _vanishing_signal(self) -> list[str]:
        """Fault of betas that leave no signal in fp32 where the sampler divides by it."""
        if not 2 <= self.num_timesteps <= _MOST_TIMESTEPS:
            return []
        with torch.device("cpu"):  # the products are those of diffusers' schedulers
            if self.trained_betas is not None:
                betas = torch.tensor(self.trained_betas, dtype=torch.float32)
            elif self.beta_start is not None and self.beta_end is not None:
                power = 0.5 if self.schedule == NoiseSchedule.SCALED_LINEAR else 1.0
                ends = self.beta_start**power, self.beta_end**power
                betas = torch.linspace(*ends, self.num_timesteps) ** (1 / power)
            else:
                return []
            signal = (1 - betas).cumprod(0)
        needed = signal if self.objective == Objective.EPSILON else signal[:-1]
        if self.zero_terminal_snr or bool(needed.all()):
            return []
        first = int((signal == 0).int().argmax())
        return [
            f"the betas leave no signal in fp32 from timestep {first} of {self.num_timesteps} on, "
            "where predictions cannot be sampled. Give smaller betas or fewer timesteps"
        ]

    def _faults_of_flow(self) -> list[str]:
        if self._has_betas:
            given = [name for name, default in _OF_FLOW.items() if getattr(self, name) != default]
            if self.density not in (TimestepDensity.UNIFORM, TimestepDensity.SPEED):
                given.append("density")
            return [f"{', '.join(given)}: only for flow, not {self.objective}"] if given else []
        if self.objective == Objective.EDM and self.shift != 1:
            return ["shift: only for flow, not edm; give another mean of ln sigma"]
        if self.density == TimestepDensity.SPEED:
            return [
                f"the density speed is not for {self.objective}: give logit_normal, mode or cosmap"
            ]
        if self.density != TimestepDensity.LOGIT_NORMAL and (
            (self.logit_mean, self.logit_std) != (0, 1)
        ):
            return ["logit_mean and logit_std: only for the density logit_normal"]
        if self.density != TimestepDensity.MODE and self.mode_scale != MODE_SCALE:
            return ["mode_scale: only for the density mode"]
        if not -1 <= self.mode_scale <= 2 / (math.pi - 2):
            return [
                f"mode_scale is {self.mode_scale}; it must be from -1 to {2 / (math.pi - 2):.4g}, "
                "beyond which two numbers have one time"
            ]
        if isinstance(self.shift, DynamicShift):
            return self.shift.faults()
        if not 0 < self.shift < math.inf:
            return [f"shift is {self.shift}; it must be positive (1 is none)"]
        return []

    def experts(self, boundary: float) -> tuple[DiffusionProcess, DiffusionProcess]:
        """Processes of two experts: of the times from ``boundary`` on, and of those below it.

        Raises ValueError for a boundary that is not within the range of times.
        """
        if not self.min_time < boundary < self.max_time:
            raise ValueError(
                f"the boundary {boundary:g} of two experts is not within the times that are "
                f"trained, {self.min_time:g} to {self.max_time:g}"
            )
        return replace(self, min_time=boundary), replace(self, max_time=boundary)

    def for_tokens(self, num_tokens: int) -> DiffusionProcess:
        """Process for pictures of ``num_tokens`` tokens: a dynamic shift becomes a number."""
        if not isinstance(self.shift, DynamicShift):
            return self
        return replace(self, shift=self.shift.at(num_tokens))

    def scheduler_arguments(self) -> dict[str, Any]:
        """Arguments of diffusers' schedulers for the objectives epsilon, v and sample."""
        arguments: dict[str, Any] = {
            "num_train_timesteps": self.num_timesteps,
            "prediction_type": DIFFUSERS_PREDICTION[self.objective],
            "rescale_betas_zero_snr": self.zero_terminal_snr,
        }
        if self.trained_betas is not None:
            return {**arguments, "trained_betas": list(self.trained_betas)}
        assert self.schedule is not None
        arguments |= {"beta_schedule": DIFFUSERS_SCHEDULE[self.schedule], "trained_betas": None}
        if self.beta_start is not None:
            arguments |= {"beta_start": self.beta_start, "beta_end": self.beta_end}
        return arguments

    def timestep(self, u: float) -> float:
        """Training timestep for a uniform number ``u`` in [0, 1).

        A scalar function on purpose. Vectorised kernels round the tail of a tensor differently, so
        a sample's timestep would depend on its place in the microbatch. Raises ValueError for a
        dynamic shift, which depends on the picture (see ``for_tokens``).
        """
        if (self.min_time, self.max_time) != (0, 1):
            first, last = _numbers_of_range(self)
            u = first + u * (last - first)
            t = min(max(self._time(u), self.min_time), math.nextafter(self.max_time, 0))
        else:
            t = self._time(u)
        return self._timestep_at(t)

    def _timestep_at(self, t: float) -> float:
        """Timestep of a time in [0, 1]."""
        if self.objective == Objective.EDM:
            t = min(max(t, _CLOSEST), 1 - _CLOSEST)
            return math.log(t / (1 - t)) / 4
        if self.objective != Objective.FLOW:
            return float(min(int(t * self.num_timesteps), self.num_timesteps - 1))
        return t * self.num_timesteps

    def validation_timestep(self, number: int) -> float:
        """Timestep ``number`` of the ``VALIDATION_TIMES`` at which validation losses are taken.

        They divide the process's range evenly and include its beginning, whatever the density and
        the shift of training: i/8 for the whole process, as in MLPerf's text-to-image benchmark.
        EDM has no noise at the beginning, so its times are the middles of the eighths.
        """
        share = (number + 0.5 * (self.objective == Objective.EDM)) / VALIDATION_TIMES
        return self._timestep_at(self.min_time + share * (self.max_time - self.min_time))

    def _time(self, u: float) -> float:
        """Time in [0, 1] for a uniform number: the inverse of the distribution of times, which
        increases with ``u``."""
        if self.density == TimestepDensity.SPEED:
            weight = _SPEED_FROM + (1 - _SPEED_FROM) / _SPEED_RATIO
            before = _SPEED_FROM / weight
            if u < before:
                return u * weight
            return _SPEED_FROM + (u - before) * weight * _SPEED_RATIO
        if self._has_betas:
            return u
        if isinstance(self.shift, DynamicShift):
            raise ValueError("a dynamic shift has no value before the picture's size is known")
        if self.density == TimestepDensity.LOGIT_NORMAL:
            normal = NormalDist().inv_cdf(min(max(u, 1e-12), 1 - 1e-12))
            u = 1 / (1 + math.exp(-(self.logit_mean + self.logit_std * normal)))
        elif self.density == TimestepDensity.MODE:
            u = u - self.mode_scale * (math.sin(math.pi * u / 2) ** 2 - u)
        elif self.density == TimestepDensity.COSMAP:
            u = 1 - 1 / (math.tan(math.pi * u / 2) + 1)
        if self.shift != 1:
            u = self.shift * u / (1 + (self.shift - 1) * u)
        return u

    def noised(self, x0: Tensor, noise: Tensor, timesteps: Tensor) -> tuple[Tensor, Tensor]:
        """Noisy samples and targets, both ``[b, ...]``, at float32 ``timesteps [b]``.

        ``timesteps`` may be on the host even if the samples are on a GPU.
        """
        timesteps = timesteps.to(x0.device, non_blocking=True)
        if self.objective == Objective.FLOW:
            t = (timesteps / self.num_timesteps).view(-1, *[1] * (x0.dim() - 1)).to(x0.dtype)
            return (1 - t) * x0 + t * noise, noise - x0
        if self.objective == Objective.EDM:
            signal, share = _edm_shares(timesteps, x0)
            return signal * x0 + share * noise, signal * noise - share * x0
        scheduler, steps = _ddpm(self, x0.device), timesteps.long()
        noisy = scheduler.add_noise(x0, noise, steps)
        if self.objective == Objective.EPSILON:
            return noisy, noise
        if self.objective == Objective.SAMPLE:
            return noisy, x0
        return noisy, scheduler.get_velocity(x0, noise, steps)

    def alphas_cumprod(self, timesteps: Tensor) -> Tensor:
        """Share of the signal's variance at float32 ``timesteps [b]``, on their device; not for
        flow."""
        if self.objective == Objective.EDM:
            return 1 / (1 + (8 * timesteps.double()).exp())
        share: Tensor = _ddpm(self, timesteps.device).alphas_cumprod[timesteps.long()]
        return share

    def betas(self) -> Tensor:
        """Variance that each timestep adds, float64 ``[num_timesteps]``; not for flow and EDM."""
        betas: Tensor = _ddpm(self, torch.device("cpu")).betas
        return betas.double()

    def clean(self, noisy: Tensor, prediction: Tensor, timesteps: Tensor) -> Tensor:
        """Clean sample ``[b, ...]`` implied by a ``prediction`` for ``noisy``.

        For epsilon the prediction's error is divided by the remaining signal, so the estimate is
        poor at high noise.
        """
        if self.objective == Objective.SAMPLE:
            return prediction
        timesteps = timesteps.to(noisy.device, non_blocking=True)
        sides = (-1, *[1] * (noisy.dim() - 1))
        if self.objective == Objective.FLOW:
            return noisy - (timesteps / self.num_timesteps).view(sides).to(noisy) * prediction
        if self.objective == Objective.EDM:
            signal, noise = _edm_shares(timesteps, noisy)
            return signal * noisy - noise * prediction
        share = self.alphas_cumprod(timesteps).to(noisy)
        signal, noise = share.sqrt().view(sides), (1 - share).sqrt().view(sides)
        if self.objective == Objective.V:
            return signal * noisy - noise * prediction
        return (noisy - noise * prediction) / signal

    def loss(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Mean squared error over a microbatch, in fp32: a scalar."""
        return F.mse_loss(prediction.float(), target.float())

    def differences(self, other: DiffusionProcess) -> list[str]:
        """Fields in which the predictions of ``other`` differ in meaning: field, value there, value
        here.

        Fields that follow from another difference are merged with it: another schedule has other
        betas, and flow has none.
        """

        def unlike(*names: str) -> list[str]:
            return [
                f"{name} is {_text(getattr(other, name))} there and "
                f"{_text(getattr(self, name))} here"
                for name in names
                if getattr(self, name) != getattr(other, name)
            ]

        found = unlike("objective", "num_timesteps")
        if not (self._has_betas and other._has_betas):
            for noises, without in ((self, other), (other, self)):
                if noises._has_betas:
                    lacks = f"{without.objective} has no noise schedule"
                    found[0] += f" ({lacks}, {noises.objective} {noises._noise()})"
            return found
        if self.schedule != other.schedule:
            return [*found, f"schedule is {other._noise()} there and {self._noise()} here",
                    *unlike("zero_terminal_snr")]  # fmt: skip
        return found + unlike(*_OF_BETAS, "zero_terminal_snr")

    def describe(self, num_tokens: int | None = None, shift_there: float | None = None) -> str:
        """Describe the process in one line; the shift is evaluated for pictures of ``num_tokens``,
        if it is not ``shift_there``."""
        if not self._has_betas:
            shift = f"shift {self.shift:g}" if isinstance(self.shift, float | int) else ""
            if isinstance(self.shift, DynamicShift):
                shift = f"shift {self.shift}"
                if num_tokens is not None:
                    there = self.shift.at(num_tokens) if shift_there is None else shift_there
                    shift += f" ({there:.4g} at {num_tokens} tokens)"
            density = str(self.density)
            if self.density == TimestepDensity.LOGIT_NORMAL:
                density += f"({self.logit_mean:g}, {self.logit_std:g})"
            elif self.density == TimestepDensity.MODE:
                density += f"({self.mode_scale:g})"
            parts = [shift, f"times {density}"]
            if self.objective == Objective.EDM:
                parts = [f"sigma / (1 + sigma) {density}"]
        else:
            parts = [self._noise()]
            parts += [f"times {self.density}"] * (self.density != TimestepDensity.UNIFORM)
        if (self.min_time, self.max_time) != (0, 1):
            parts.append(f"times from {self.min_time:g} to {self.max_time:g}")
        parts += ["zero terminal SNR"] * self.zero_terminal_snr
        return ", ".join([str(self.objective), *parts, f"{self.num_timesteps} timesteps"])

    def _noise(self) -> str:
        """Noise schedule with its first and last beta, of a process that has one."""
        ends = "" if self.beta_start is None else f" {self.beta_start:g} to {self.beta_end:g}"
        return f"{self.schedule} betas{ends}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint or a log; the inverse is
        ``DiffusionProcess(**values)``."""
        plain = {
            name: str(value) if isinstance(value, StrEnum) else value
            for name, value in vars(self).items()
        }
        if isinstance(self.shift, DynamicShift):
            plain["shift"] = {**asdict(self.shift), "kind": str(self.shift.kind)}
        if self.trained_betas is not None:
            plain["trained_betas"] = list(self.trained_betas)
        return {**plain, "scheduler": dict(self.scheduler)}


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a list of {len(value)} from {value[0]:g} to {value[-1]:g}"
    return "none" if value is None else str(value)


def predicted_mean(prediction: Tensor, num_channels: int) -> Tensor:
    """Part of ``prediction [b, c, h, w]`` that predicts the objective's target.

    Models with a learned sigma (DiT, PixArt, Hunyuan-DiT) return 2 x ``num_channels``: the mean's
    prediction, then the variance's (Nichol & Dhariwal 2021). Sampling uses a fixed variance. The
    second half is trained with ``--pulse-learned-sigma`` only (see ``variational_bound``).
    """
    return prediction[:, :num_channels]


def _edm_shares(timesteps: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """EDM's c_in and c_in sigma at float32 ``timesteps [b]``, shaped for samples ``like``."""
    sigma = (4 * timesteps.double()).exp()
    signal = 1 / (1 + sigma.square()).sqrt()
    sides = (-1, *[1] * (like.dim() - 1))
    return signal.view(sides).to(like), (signal * sigma).view(sides).to(like)


@lru_cache(maxsize=8)
def _numbers_of_range(process: DiffusionProcess) -> tuple[float, float]:
    """Uniform numbers whose times are the ends of the process's range, by bisection."""

    def number(time: float) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if process._time(middle) < time else (low, middle)
        return high if time < 1 else 1.0

    first = number(process.min_time) if process.min_time > 0 else 0.0
    return first, number(process.max_time)


@lru_cache(maxsize=8)
def _ddpm(process: DiffusionProcess, device: torch.device) -> Any:
    """diffusers' DDPM scheduler with its table of alphas on ``device``."""
    from diffusers import DDPMScheduler  # a slow import, which flow does not need

    with torch.device("cpu"):
        scheduler = DDPMScheduler(**process.scheduler_arguments())
    scheduler.alphas_cumprod = scheduler.alphas_cumprod.to(device)
    return scheduler
