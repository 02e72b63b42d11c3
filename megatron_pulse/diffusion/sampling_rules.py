"""Rules that a class's pipeline follows in sampling, beyond its scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class SamplingRules:
    """Rules of a pipeline.

    A guided prediction is scaled to the conditional one's ``norms``, which are broadcast to it.
    ``shift`` is that of flow for pictures of a number of tokens, in a number of steps; it replaces
    a scheduler's dynamic shift. ``grid`` are flow's times of a number of steps, in place of even
    ones.
    """

    norms: Callable[[Tensor], Tensor] | None = None
    shift: Callable[[int, int], float] | None = None
    grid: Callable[[int], list[float]] | None = None


NO_RULES = SamplingRules()


def token_norms(prediction: Tensor) -> Tensor:
    """Norm of each token of 2 x 2 positions of ``[b, c, h, w]`` (Qwen-Image)."""
    norms = torch.linalg.vector_norm(F.pixel_unshuffle(prediction, 2), dim=1, keepdim=True)
    return F.interpolate(norms, scale_factor=2)


def row_norms(prediction: Tensor) -> Tensor:
    """Norm of each row of positions of a channel (Lumina 2)."""
    return torch.linalg.vector_norm(prediction, dim=-1, keepdim=True)


def flux2_shift(num_tokens: int, num_steps: int) -> float:
    """Shift of Flux.2: mu lies on lines through those of 10 and of 200 steps."""
    of_200 = 0.00016927 * num_tokens + 0.45666666
    of_10 = 8.73809524e-05 * num_tokens + 1.89833333
    if num_tokens > 4300:
        return math.exp(of_200)
    return math.exp(of_200 + (of_200 - of_10) / 190 * (num_steps - 200))


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
