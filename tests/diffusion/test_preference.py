"""Diffusion-DPO's loss beside its formula."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_pulse.diffusion.loss import LossChoice
from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.diffusion.preference import BETA, PreferenceLoss, preference_loss
from megatron_pulse.diffusion.process_flags import Objective

DPO = LossChoice(loss="dpo", loss_weighting="min-snr")


def test_the_loss_is_that_of_the_authors_with_weights_of_times() -> None:
    """Wallace et al.: the log-sigmoid of -beta/2 times the difference of differences."""
    drawn = torch.Generator().manual_seed(0)
    model, reference, target = torch.randn(3, 6, 4, 8, 8, generator=drawn)
    times = torch.tensor([10.0, 10.0, 400.0, 400.0, 900.0, 900.0])
    process = DiffusionProcess(Objective.FLOW)
    weights = DPO.weights(process, times)
    found = [DPO.errors(each, target, weights) for each in (model, reference)]
    assert all(each.dtype == torch.float64 for each in found)
    losses, _ = preference_loss(found[0], found[1], 40.0)
    m, r = (
        (each.double() - target.double()).square().mean((1, 2, 3)) * weights
        for each in (model, reference)
    )
    inside = -0.5 * 40.0 * ((m[0::2] - m[1::2]) - (r[0::2] - r[1::2]))
    torch.testing.assert_close(losses, -F.logsigmoid(inside), rtol=1e-12, atol=0)
    assert weights.unique().numel() == 3 and losses.unique().numel() == 3


def test_small_differences_of_errors_count() -> None:
    """In fp32 the errors of these samples would be equal."""
    model = torch.ones(2, 1000)
    model[0, 0] += 1e-5
    errors = DPO.errors(model, torch.zeros(2, 1000))
    loss, accuracy = preference_loss(errors, errors.flip(0), BETA)
    assert loss.item() == pytest.approx(math.log(2) + BETA * 1e-8, abs=1e-6)
    assert accuracy.item() == 0.0


def test_the_implicit_accuracy_counts_equal_pairs_half() -> None:
    reference = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    model = torch.tensor([0.9, 1.0, 1.0, 0.9, 0.8, 0.8])
    assert preference_loss(model, reference, 10.0)[1].tolist() == [1.0, 0.0, 0.5]


def test_errors_of_the_reference_meet_their_microbatches() -> None:
    def errors(prediction: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return (prediction - batch["target"]).square().mean(1)

    preference = PreferenceLoss(errors, 10.0)
    batches = [{"target": torch.full((2, 3), float(i))} for i in range(3)]
    predictions = list(torch.randn(3, 2, 3, generator=torch.Generator().manual_seed(1)))
    for _ in range(2):  # what an unfinished step has left is not the next one's
        preference.begin()
        for prediction, batch in zip(predictions, batches, strict=True):
            assert preference.keep(prediction, batch) == 0
        trained = predictions[0].clone().requires_grad_()
        assert preference(trained, batches[0]).item() == pytest.approx(math.log(2), abs=1e-6)
    preference(trained, batches[1])
    assert [each.item() for each in preference.accuracies()][0] == 0.5
    losses = preference.sample_losses(predictions[2], batches[2])
    assert losses.tolist() == pytest.approx([math.log(2)] * 2, abs=1e-6)
    loss = preference_loss(*(errors(p, batches[0]) for p in (trained, predictions[1])), 10.0)[0]
    loss.sum().backward()
    assert trained.grad is not None and trained.grad.any()
