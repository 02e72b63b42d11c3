"""Diffusion-DPO: preference loss of pairs of samples (Wallace et al. 2023, 2311.12908, eq. 14).

A pair is two consecutive samples with one conditioning, noise and time: winner w, then loser l.
With errors m of the model and r of the frozen reference, its loss is
``-log sigmoid(-beta / 2 ((m_w - m_l) - (r_w - r_l)))``, ln 2 where both are equal. Errors are means
over a sample's elements, and beta contains the paper's number of timesteps. The factor 1/2 is that
of the authors' code; diffusers' script has none, so that its beta is half of this one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

BETA = 5000.0
"""Default beta: the largest of the paper's 2000 to 5000."""

type Errors = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""Function of a prediction and its microbatch that computes the error of each sample, ``[b]``."""


def preference_loss(model: Tensor, reference: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Loss of each pair, and the accuracy of each, both ``[b / 2]``.

    ``model`` and ``reference`` are errors of samples ``[b]``. The implicit accuracy is 1 if the
    model prefers the winner more than the reference does, 0 if less, and 1/2 if as much.
    """
    model_w, model_l = model.view(-1, 2).unbind(1)
    reference_w, reference_l = reference.view(-1, 2).unbind(1)
    logits = -beta / 2 * ((model_w - model_l) - (reference_w - reference_l))
    return -F.logsigmoid(logits), (logits.detach().sign() + 1) / 2


class PreferenceLoss:
    """Preference loss of the microbatches of a step, after a pass of the reference model.

    ``errors`` computes the errors of samples. The reference pass calls ``keep`` in place of a loss.
    The errors stay on their device until the step's pass over the same microbatches, in the same
    order, takes them. ``is_copied``: the reference is a copy of weights that are trained.
    """

    def __init__(self, errors: Errors, beta: float, *, is_copied: bool = False) -> None:
        self._errors, self._beta, self._is_copied = errors, beta, is_copied
        self._reference: deque[Tensor] = deque()
        self._accuracies: list[Tensor] = []

    def describe(self) -> str:
        """Line on the loss and on its reference."""
        of = (
            "a frozen copy of the first weights"
            if self._is_copied
            else "the model without its adapter"
        )
        return (
            f"preference loss: dpo, beta {self._beta:g}; every step runs a first forward pass of "
            f"the reference, {of}"
        )

    def begin(self) -> None:
        """Begin a reference pass; what an unfinished step has left is dropped."""
        self._reference.clear()
        self._accuracies.clear()

    def keep(self, prediction: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Store the reference's errors for a microbatch; returns 0."""
        self._reference.append(self._errors(prediction, batch).detach())
        return prediction.new_zeros(())

    def __call__(self, prediction: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean loss of a microbatch's pairs, in fp32: a scalar."""
        losses, accuracies = self._compared(prediction, batch)
        self._accuracies.append(accuracies.mean().float())
        return losses.mean().float()

    def sample_losses(self, prediction: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Loss of each sample's pair, ``[b]``, for validation."""
        losses, _ = self._compared(prediction, batch)
        return losses.repeat_interleave(2)

    def accuracies(self) -> list[Tensor]:
        """Mean implicit accuracy of each microbatch of the step, where the loss is computed."""
        return list(self._accuracies)

    def _compared(self, prediction: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        reference = self._reference.popleft()
        return preference_loss(self._errors(prediction, batch), reference, self._beta)
