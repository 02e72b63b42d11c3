"""Rules that a class's pipeline follows in sampling, beyond its scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.diffusion.process_flags import DynamicShift, FlowGrid, TimeShift

type Guide = Callable[[Tensor, Tensor, float | Tensor], Tensor]
"""(conditional prediction, unconditional one, guidance scale) -> guided prediction."""


@dataclass(frozen=True)
class SampleSize:
    """Size of a sample for a shift: its shape, its tokens, and the steps in which it is drawn."""

    shape: tuple[int, ...]
    num_tokens: int
    num_steps: int


def plain_guide(conditional: Tensor, unconditional: Tensor, scale: float | Tensor) -> Tensor:
    """Classifier-free guidance (Ho & Salimans 2022)."""
    return unconditional + scale * (conditional - unconditional)


@dataclass(frozen=True)
class SamplingRules:
    """Rules of a pipeline.

    ``guide`` makes the guidance of one trajectory. ``shift`` replaces a scheduler's dynamic shift,
    also in training if ``trains_shifted``. ``grid`` are flow's times of a number of steps, in place
    of even ones; a time behind them is that of the result, 0 by default. ``flow_grid`` is the
    pipeline's. With ``scales_ends``, the start has the deviation of its time, and the result is
    divided by its share of the signal. ``settings`` replace the scheduler's. ``finish`` changes
    samples ``[b, c, f, h, w]`` that continue given frames. ``caution`` says what the pipeline draws
    otherwise.
    """

    guide: Callable[[], Guide] = lambda: plain_guide
    shift: Callable[[DynamicShift, SampleSize], float] = lambda shift, size: shift.at(
        size.num_tokens
    )
    trains_shifted: bool = False
    grid: Callable[[int], list[float]] | None = None
    flow_grid: FlowGrid = FlowGrid.EVEN
    scales_ends: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    finish: Callable[[Tensor], Tensor] | None = None
    caution: str = ""

    def shifted(self, process: DiffusionProcess, size: SampleSize) -> DiffusionProcess:
        """``process`` whose dynamic shift, if it has one, is a number."""
        if not isinstance(process.shift, DynamicShift):
            return process
        return replace(process, shift=self.shift(process.shift, size))


NO_RULES = SamplingRules()


def rescaled(norms: Callable[[Tensor], Tensor]) -> Callable[[], Guide]:
    """Guidance whose result has the ``norms`` of the conditional prediction."""

    def guide(conditional: Tensor, unconditional: Tensor, scale: float | Tensor) -> Tensor:
        guided = plain_guide(conditional, unconditional, scale)
        return guided * (norms(conditional) / norms(guided))

    return lambda: guide


def token_norms(prediction: Tensor) -> Tensor:
    """Norm of each token of 2 x 2 positions of ``[b, c, h, w]`` (Qwen-Image)."""
    norms = torch.linalg.vector_norm(F.pixel_unshuffle(prediction, 2), dim=1, keepdim=True)
    return F.interpolate(norms, scale_factor=2)


def row_norms(prediction: Tensor) -> Tensor:
    """Norm of each row of positions of a channel (Lumina 2)."""
    return torch.linalg.vector_norm(prediction, dim=-1, keepdim=True)


def extrapolated(conditional: Tensor, unconditional: Tensor, scale: float | Tensor) -> Tensor:
    """Guidance of Cosmos, whose scale counts from the conditional prediction."""
    return conditional + scale * (conditional - unconditional)


class ProjectedGuide:
    """Guidance of HunyuanImage: plain at first, then adaptive and projected (Sadat et al. 2024).

    Later steps add the part of a running difference that is orthogonal to the conditional
    prediction, at a scale of its own. The settings are those of diffusers'
    AdaptiveProjectedMixGuidance.
    """

    _SCALE, _MOMENTUM, _MOST, _NUM_PLAIN = 10.0, -0.5, 10.0, 6

    def __init__(self) -> None:
        self._step, self._running = 0, torch.zeros(())

    def __call__(self, conditional: Tensor, unconditional: Tensor, scale: float | Tensor) -> Tensor:
        self._step += 1
        self._running = conditional - unconditional + self._MOMENTUM * self._running
        if self._step <= self._NUM_PLAIN:
            return plain_guide(conditional, unconditional, scale)
        sides = tuple(range(1, conditional.dim()))
        norm = torch.linalg.vector_norm(self._running, dim=sides, keepdim=True)
        bounded = (self._running * (self._MOST / norm).clamp(max=1)).double()
        along = conditional.double()
        along = along / torch.linalg.vector_norm(along, dim=sides, keepdim=True)
        orthogonal = bounded - (bounded * along).sum(sides, keepdim=True) * along
        return unconditional + self._SCALE * orthogonal.float()


def flux2_shift(shift: DynamicShift, size: SampleSize) -> float:
    """Shift of Flux.2: mu lies on lines through those of 10 and of 200 steps."""
    of_200 = 0.00016927 * size.num_tokens + 0.45666666
    of_10 = 8.73809524e-05 * size.num_tokens + 1.89833333
    if size.num_tokens > 4300:
        return math.exp(of_200)
    return math.exp(of_200 + (of_200 - of_10) / 190 * (size.num_steps - 200))


def lumina2_shift(shift: DynamicShift, size: SampleSize) -> float:
    """Shift of Lumina 2's pipeline, which counts channels as tokens."""
    return shift.at(size.shape[0])


def cogview4_shift(shift: DynamicShift, size: SampleSize) -> float:
    """Shift of CogView 4, which grows with the side of a picture."""
    root = math.sqrt(size.num_tokens / shift.base_tokens)
    mu = root * shift.max_shift + shift.base_shift
    return math.exp(mu) if shift.kind == TimeShift.EXPONENTIAL else mu


def framepack_shift(shift: DynamicShift, size: SampleSize) -> float:
    """Shift of Framepack, 7 at most."""
    return min(shift.at(size.num_tokens), 7.0)


def mochi_grid(num_steps: int) -> list[float]:
    """Times of Mochi: half of the steps remove 0.025 of the noise evenly, the others ever more."""
    slow, removed = num_steps // 2, 0.025
    if not slow:
        return [1.0]
    fast, left = num_steps - slow, slow - removed * num_steps
    square, line = left / (slow * fast**2), removed / slow - 2 * left / fast**2
    gone = [i * removed / slow for i in range(slow)]
    gone += [square * i**2 + line * i + square * slow**2 for i in range(slow, num_steps)]
    return [1 - share for share in gone]


def cogview4_grid(num_steps: int) -> list[float]:
    """Times of CogView 4: whole timesteps from 1000 to 1."""
    stride = 999 / max(num_steps - 1, 1)
    return [int(1000 - i * stride) / 1000 for i in range(num_steps)]


def cosmos_grid(num_steps: int) -> list[float]:
    """Times of Cosmos 2: Karras sigmas from 80 to 0.002, where the result is taken."""
    high, low = 80 ** (1 / 7), 0.002 ** (1 / 7)
    shares = [i / max(num_steps - 1, 1) for i in range(num_steps)]
    sigmas = [(high + share * (low - high)) ** 7 for share in shares]
    times = [sigma / (1 + sigma) for sigma in sigmas]
    return [*times, times[-1]]


def evened_first_frames(samples: Tensor) -> Tensor:
    """Kandinsky 5's first four frames, with mean and deviation near those of the next five."""
    first, next_ones = samples[:, :, :4], samples[:, :, 4:9]
    if not next_ones.shape[2]:
        return samples
    sides = (1, 2, 3, 4)
    mean, deviation = first.mean(sides, keepdim=True), first.std(sides, keepdim=True)
    wanted_mean = next_ones.mean(sides, keepdim=True).clamp(mean - 0.05, mean + 0.1)
    wanted = next_ones.std(sides, keepdim=True).clamp(deviation - 0.1, deviation + 0.25)
    evened = (first - mean) / deviation * wanted + wanted_mean
    return torch.cat([evened, samples[:, :, 4:]], 2)
