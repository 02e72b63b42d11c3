"""Flags of a diffusion process: one set of options for training, import and sampling.

No torch import here, so that a command's ``--help`` stays fast.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from megatron_pulse.dataclass_flags import flag


class Objective(StrEnum):
    """Quantity predicted by the model: the noise, the velocity, the clean sample, the flow, or
    EDM's preconditioned output."""

    EPSILON = "epsilon"
    V = "v"
    SAMPLE = "sample"
    FLOW = "flow"
    EDM = "edm"

    @property
    def has_betas(self) -> bool:
        """True if the noise grows by a schedule of betas, one per timestep."""
        return self not in (Objective.FLOW, Objective.EDM)


class NoiseSchedule(StrEnum):
    """Growth of the noise with the timestep (flow and EDM need none); ``trained`` is a list of
    betas."""

    SCALED_LINEAR = "scaled_linear"
    LINEAR = "linear"
    COSINE = "cosine"
    TRAINED = "trained"


class TimestepDensity(StrEnum):
    """Distribution of timesteps in training; for flow and EDM all but ``speed``, else uniform or
    speed."""

    UNIFORM = "uniform"
    LOGIT_NORMAL = "logit_normal"
    MODE = "mode"
    COSMAP = "cosmap"
    SPEED = "speed"


class SamplingNoise(StrEnum):
    """Source of sampling noise: each sample's own, or a diffusers generator."""

    PER_SAMPLE = "per-sample"
    DIFFUSERS = "diffusers"


class FlowGrid(StrEnum):
    """A flow's times before the shift: equal steps from 1 to 0, or the scheduler's own."""

    EVEN = "even"
    SCHEDULER = "scheduler"


class TimeShift(StrEnum):
    """Meaning of the value on a dynamic shift's line: the shift's logarithm, or the shift
    itself."""

    EXPONENTIAL = "exponential"
    LINEAR = "linear"


_MOST_MU = 50
"""Largest mu; later times are equal to 1 in double precision."""


@dataclass(frozen=True)
class DynamicShift:
    """Flow shift that grows with the picture, as diffusers' ``use_dynamic_shifting``.

    mu lies on a line through (``base_tokens``, ``base_shift``) and (``max_tokens``, ``max_shift``),
    in tokens of the picture. The shift is exp(mu), or mu itself if ``kind`` is linear. The defaults
    are Flux's.
    """

    base_shift: float = 0.5
    max_shift: float = 1.15
    base_tokens: int = 256
    max_tokens: int = 4096
    kind: TimeShift = TimeShift.EXPONENTIAL

    def at(self, num_tokens: int) -> float:
        """Shift of a picture with ``num_tokens`` tokens."""
        slope = (self.max_shift - self.base_shift) / (self.max_tokens - self.base_tokens)
        mu = self.base_shift + slope * (num_tokens - self.base_tokens)
        return math.exp(mu) if self.kind == TimeShift.EXPONENTIAL else mu

    def faults(self) -> list[str]:
        """Faults of the numbers, one text each."""
        numbers = (self.base_shift, self.max_shift, self.base_tokens, self.max_tokens)
        if self.kind not in tuple(TimeShift):
            return [f"a dynamic shift is {' or '.join(TimeShift)}, not {self.kind!r}"]
        if not all(isinstance(n, int | float) and math.isfinite(n) for n in numbers):
            return [f"a dynamic shift takes four numbers, not {numbers}"]
        if not 0 < self.base_tokens < self.max_tokens:
            return [
                f"a dynamic shift from {self.base_tokens} to {self.max_tokens} tokens: the second "
                "number must be larger"
            ]
        if self.kind == TimeShift.EXPONENTIAL and max(self.base_shift, self.max_shift) > _MOST_MU:
            return [f"a dynamic shift of exp({self.max_shift:g}): at most exp({_MOST_MU})"]
        if self.kind == TimeShift.LINEAR and min(self.base_shift, self.max_shift) <= 0:
            return ["a linear dynamic shift must be positive at both ends"]
        return []

    def __str__(self) -> str:
        kind = "" if self.kind == TimeShift.EXPONENTIAL else f",{self.kind}"
        ends = f"{self.base_shift:g},{self.max_shift:g},{self.base_tokens},{self.max_tokens}"
        return f"dynamic:{ends}{kind}"


def parse_shift(text: str) -> float | DynamicShift:
    """Parse ``3.0``, ``dynamic`` or ``dynamic:0.5,1.15,256,4096[,linear]``; raises ValueError."""
    name, colon, rest = text.partition(":")
    try:
        if name != "dynamic":
            return float(text)
        if not colon:
            return DynamicShift()
        first, last, base, most, *kind = rest.split(",")
        shift = DynamicShift(
            float(first), float(last), int(base), int(most), TimeShift(*kind or ["exponential"])
        )
    except (ValueError, TypeError):
        raise ValueError(
            f"{text!r} is neither a number nor dynamic[:BASE_SHIFT,MAX_SHIFT,BASE_TOKENS,"
            "MAX_TOKENS[,linear]]"
        ) from None
    return shift


def _shift_text(text: str) -> str:
    try:
        parse_shift(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


@dataclass(frozen=True)
class ProcessChoice:
    """Flag values of a diffusion process; None for flags that were not given.

    ``trained_betas`` is a file name, ``flow_shift`` a text (see parse_shift). In the flags' help,
    "{unsaid}" is the source of an option that was not given.
    """

    objective: str | None = flag(
        "target: noise, velocity, clean sample, flow, or EDM's ({unsaid})",
        choices=[str(objective) for objective in Objective],
    )
    noise_schedule: str | None = flag(
        "noise schedule over the timesteps; flow has none (SD, U-ViT: scaled_linear, the default "
        "of a new process; DiT, PixArt: linear)",
        choices=[str(kind) for kind in NoiseSchedule if kind != NoiseSchedule.TRAINED],
    )
    beta_start: float | None = flag(
        "first beta of linear and scaled_linear schedules (new process: 0.00085 scaled, 0.0001 "
        "linear)",
        metavar="BETA",
    )
    beta_end: float | None = flag(
        "last beta of linear and scaled_linear schedules (new process: 0.012 scaled, 0.02 linear)",
        metavar="BETA",
    )
    trained_betas: str | None = flag(
        "JSON file with a list of betas, one per timestep", metavar="FILE"
    )
    zero_terminal_snr: bool | None = flag(
        "rescale the betas so that the last timestep is pure noise (v and sample)"
    )
    num_timesteps: int | None = flag("timesteps of the process (new process: 1000)", metavar="N")
    flow_shift: str | None = flag(
        "shift of flow times towards noise, in training and sampling: a number (SD3: 3), or "
        "dynamic, by the size of the picture (Flux; dynamic:0.5,1.15,256,4096 gives base and "
        "largest mu and their tokens) (new process: 1, no shift)",
        metavar="SHIFT",
        read=_shift_text,
    )
    timestep_density: str | None = flag(
        "density of the times in training: for flow and edm uniform, logit_normal, mode or cosmap, "
        "before the shift (new process: logit_normal); else uniform, or speed, which draws the "
        "last 30 percent, almost pure noise, a fifth as often (SpeeD)",
        choices=[str(density) for density in TimestepDensity],
    )
    logit_mean: float | None = flag(
        "mean of logit-normal times or ln sigma (0; edm 0.7)", metavar="M"
    )
    logit_std: float | None = flag(
        "their standard deviation (new process: 1; edm 1.6)", metavar="S"
    )

    mode_scale: float | None = flag(
        "of mode: above 0 more in the middle (new: 1.29)",
        metavar="S",
    )
    min_time: float | None = flag(
        "train only times from this share on, 0 data, 1 noise",
        metavar="T",
    )
    max_time: float | None = flag("train only times below this share (new process: 1)", metavar="T")

    @property
    def said(self) -> dict[str, Any]:
        """Fields that were given."""
        return {name: value for name, value in vars(self).items() if value is not None}


OF_TRAINING = (
    *("timestep_density", "logit_mean", "logit_std", "mode_scale", "min_time", "max_time"),
)
"""Fields without a meaning outside training."""
