"""Training losses: error of a prediction, and its weight by the noise of the sample.

A weight depends on the signal-to-noise ratio s of a timestep: abar / (1 - abar), for flow
((1 - t) / t)^2. Published weights of one objective are converted to the others. If the squared
error of the clean sample is e, those of epsilon, v (and EDM) and flow are s e, (s + 1) e and
e / t^2.
Validation uses the plain mean squared error, so that its losses compare between runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pulse.dataclass_flags import ABOVE_ZERO, FROM_ZERO, flag
from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.diffusion.preference import BETA
from megatron_pulse.diffusion.process_flags import Objective

WEIGHTINGS = ("none", "min-snr", "debiased", "p2", "sigma-sqrt", "cosmap")
LOSSES = ("mse", "huber", "dpo")
_LEAST_MASK = 1e-6
"""Lower bound of a mask's sum: below the smallest grey of one pixel."""


def _only_with(name: str, choice: str, value: str) -> Callable[[LossChoice], str | None]:
    """Check of a flag that only one choice reads."""

    def check(given: LossChoice) -> str | None:
        if getattr(given, name) is None or getattr(given, choice) == value:
            return None
        return f"is for --pulse-{choice.replace('_', '-')} {value}"

    return check


def _not_with_dpo(given: LossChoice) -> str | None:
    if given.learned_sigma and given.is_preference:
        return "excludes --pulse-loss dpo, which compares the errors of the mean alone"
    return None


@dataclass(frozen=True)
class LossChoice:
    """Flags of the training loss; None for numbers that were not given."""

    loss: str = flag(
        "training loss: mse (mean squared error), huber (pseudo-Huber, robust to outliers), or dpo "
        "(Diffusion-DPO: on pairs of pictures). Validation uses mse, or dpo (default "
        "mse)",
        "mse",
        choices=LOSSES,
    )
    huber_c: float | None = flag(
        "error at which huber turns from quadratic to linear (default 0.1)",
        metavar="C",
        within=ABOVE_ZERO,
        check=_only_with("huber_c", "loss", "huber"),
    )
    dpo_beta: float | None = flag(
        f"beta of dpo: how close the model stays to the reference (default {BETA:g})",
        metavar="B",
        within=ABOVE_ZERO,
        check=_only_with("dpo_beta", "loss", "dpo"),
    )
    loss_weighting: str = flag(
        "weight of a sample's loss by its noise: min-snr, debiased, p2, or for flow sigma-sqrt or "
        "cosmap (default none)",
        "none",
        choices=WEIGHTINGS,
    )
    snr_gamma: float | None = flag(
        "limit of the signal-to-noise ratio with min-snr (default 5)",
        metavar="G",
        within=ABOVE_ZERO,
        check=_only_with("snr_gamma", "loss_weighting", "min-snr"),
    )
    p2_gamma: float | None = flag(
        "exponent of p2 (default 1)",
        metavar="G",
        within=FROM_ZERO,
        check=_only_with("p2_gamma", "loss_weighting", "p2"),
    )
    learned_sigma: bool = flag(
        "train the learned sigma of predictions with twice the sample's channels (DiT, PixArt, "
        "Hunyuan-DiT) by the variational bound, beside the loss of the mean",
        False,
        check=_not_with_dpo,
    )
    noise_offset: float = flag(
        "noise offset: share of noise that is constant over a channel, for very dark and bright "
        "pictures (usual 0.05 to 0.1; default 0)",
        0.0,
        metavar="X",
        within=FROM_ZERO,
    )

    @property
    def is_preference(self) -> bool:
        """True if the loss is of pairs of samples, the first of which is preferred."""
        return self.loss == "dpo"

    @property
    def beta(self) -> float:
        """Beta of a preference loss."""
        return BETA if self.dpo_beta is None else self.dpo_beta

    @property
    def weights_samples(self) -> bool:
        """True unless the errors are plain mean squared errors."""
        return self.loss == "huber" or self.loss_weighting != "none"

    def faults(self, process: DiffusionProcess) -> list[str]:
        """Faults of these choices for trainings of ``process``."""
        is_flow = process.objective == Objective.FLOW
        if self.loss_weighting in ("sigma-sqrt", "cosmap") and not is_flow:
            return [
                f"--pulse-loss-weighting {self.loss_weighting} is for flow, not for "
                f"{process.objective}: give min-snr, debiased or p2"
            ]
        if self.learned_sigma and not process.objective.has_betas:
            return [
                f"--pulse-learned-sigma: {process.objective} has no variance to learn. Leave it "
                "out, or give --pulse-objective epsilon, v or sample"
            ]
        if process.zero_terminal_snr and self.noise_offset:
            return [
                "--pulse-noise-offset: the process has zero terminal SNR, which serves the same "
                "end; leave it out"
            ]
        return []

    def weights(self, process: DiffusionProcess, timesteps: Tensor) -> Tensor:
        """Weights of samples at float32 ``timesteps [b]``: float32 ``[b]``, on the CPU.

        min-snr: Hang et al. 2023 (2303.09556), section 3.4. debiased: Yu et al. 2023 (2310.08442),
        eq. 10. p2: Choi et al. 2022 (2204.00227), eq. 8, with k = 1. sigma-sqrt and cosmap: Esser
        et al. 2024 (2403.03206), section 3.1.
        """
        if self.loss_weighting == "none":
            return torch.ones_like(timesteps)
        snr = signal_to_noise(process, timesteps)
        if self.loss_weighting in ("sigma-sqrt", "cosmap"):
            sigma = _flow_time(process, timesteps)
            if self.loss_weighting == "sigma-sqrt":
                return (1 / sigma**2).float()
            return (2 / (math.pi * (1 - 2 * sigma + 2 * sigma**2))).float()
        if self.loss_weighting == "min-snr":
            of_sample = snr.clamp(max=5.0 if self.snr_gamma is None else self.snr_gamma)
        elif self.loss_weighting == "debiased":  # of epsilon: 1 / sqrt(snr)
            of_sample = snr.sqrt()
        else:  # of epsilon: 1 / (1 + snr)^gamma
            gamma = 1.0 if self.p2_gamma is None else self.p2_gamma
            of_sample = snr / (1 + snr) ** gamma
        return (of_sample / _error_ratio(process, timesteps, snr)).float()

    def error(
        self,
        prediction: Tensor,
        target: Tensor,
        weights: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Mean of the ``errors`` of a microbatch's samples: a scalar."""
        return self.errors(prediction, target, weights, mask).mean()

    def errors(
        self,
        prediction: Tensor,
        target: Tensor,
        weights: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Weighted mean error of each sample of a microbatch ``[b, ...]``, fp32 ``[b]``.

        ``weights [b]`` are of samples. ``mask [b, 1, h, w]`` weighs the parts of each sample, whose
        mean stays one of its own. Microbatches therefore do not change the result. A sample with
        an empty mask has no loss. Errors of a preference loss are fp64, since it multiplies small
        differences between them by beta.

        huber: 2 c (sqrt(d^2 + c^2) - c) for each difference d. It is the pseudo-Huber loss of Song
        and Dhariwal 2023 (2310.14189) times 2 c, so that small d give d^2.
        """
        wide = torch.float64 if self.is_preference else torch.float32
        squares = (prediction.to(wide) - target.to(wide)) ** 2
        if self.loss == "huber":
            c = 0.1 if self.huber_c is None else self.huber_c
            squares = 2 * c * ((squares + c * c).sqrt() - c)
        if mask is None:
            errors = squares.flatten(1).mean(1)
        else:
            mask = mask.to(squares, non_blocking=True).expand_as(squares).flatten(1)
            errors = (squares.flatten(1) * mask).sum(1) / mask.sum(1).clamp(min=_LEAST_MASK)
        if weights is not None:
            errors = errors * weights.to(prediction.device, non_blocking=True)
        return errors


PLAIN = LossChoice()
"""The mean squared error without weights."""


def signal_to_noise(process: DiffusionProcess, timesteps: Tensor) -> Tensor:
    """Signal-to-noise ratio at float32 ``timesteps [b]``: float64 ``[b]``.

    Flow's times are at least one timestep, where the ratio would have no bound.
    """
    if process.objective == Objective.FLOW:
        t = _flow_time(process, timesteps)
        return ((1 - t) / t) ** 2
    signal = process.alphas_cumprod(timesteps).double()
    return signal / (1 - signal)


def _flow_time(process: DiffusionProcess, timesteps: Tensor) -> Tensor:
    return timesteps.double().clamp(min=1.0) / process.num_timesteps


def _error_ratio(process: DiffusionProcess, timesteps: Tensor, snr: Tensor) -> Tensor:
    """Squared error of the objective's prediction over that of the clean sample."""
    if process.objective == Objective.EPSILON:
        return snr
    if process.objective in (Objective.V, Objective.EDM):
        return snr + 1
    if process.objective == Objective.FLOW:
        return 1 / _flow_time(process, timesteps) ** 2
    return torch.ones_like(snr)
