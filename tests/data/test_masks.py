"""Masks of pictures: found by name, averaged to the loss's resolution, normalised by sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from megatron_pulse.data.build import open_buckets
from megatron_pulse.data.dataset import DataError, DiffusionDataset
from megatron_pulse.data.fields import WantedFields
from megatron_pulse.data.images.survey import require_white, surveys
from megatron_pulse.data.microbatches import Split, make_microbatch
from megatron_pulse.diffusion.loss import LossChoice
from megatron_pulse.diffusion.objectives import DiffusionProcess, Objective

FLOW = DiffusionProcess(Objective.FLOW)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve pictures in ``photos``, with masks whose upper rows are white in ``masks``."""
    for name in ("photos", "masks"):
        (tmp_path / name).mkdir()
    draw = np.random.default_rng(0)
    for i in range(12):
        picture = draw.integers(0, 256, (8, 8), dtype=np.uint8)
        Image.fromarray(picture).save(tmp_path / f"photos/{i}.png")
        mask = np.zeros((8, 8), np.uint8)
        mask[: i % 4 + 1] = 255
        Image.fromarray(mask).save(tmp_path / f"masks/{i}.png")
    return tmp_path


def opened(folder: Path, latent: tuple[int, ...] | None = None) -> DiffusionDataset:
    wanted = WantedFields((1, 8, 8), latent_shape=latent)
    masks = str(folder / "masks")
    return open_buckets(f"folder:{folder / 'photos'}", [wanted], masks=masks)[0]


def rows_of(data: DiffusionDataset, index: int) -> int:
    return int(Path(data.describe(index)).stem) % 4 + 1


def test_mask_is_that_of_the_picture_and_only_trained_with(folder: Path):
    data = opened(folder)
    items = [(i, i) for i in range(4)]
    batch = make_microbatch(data, items, FLOW, 7)
    for row in range(4):
        count = rows_of(data, row)
        assert (batch["loss_mask"][row, 0, :count] == 1).all()
        assert not batch["loss_mask"][row, 0, count:].any()
    assert "loss_mask" not in make_microbatch(data, items, FLOW, 7, split=Split.VALIDATION)
    assert "loss_mask" not in make_microbatch(data, items, FLOW, 7, needs_image=False)


def test_mask_of_latents_is_the_mean_over_their_pixels(folder: Path):
    data = opened(folder, latent=(4, 2, 2))
    mask = make_microbatch(data, [(i, i) for i in range(4)], FLOW, 7)["loss_mask"]
    expected = [[[[rows_of(data, i) / 4] * 2, [0, 0]]] for i in range(4)]
    torch.testing.assert_close(mask, torch.tensor(expected))


def test_masked_loss_is_a_mean_of_the_sample_in_any_microbatch(folder: Path):
    batch = make_microbatch(opened(folder), [(i, i) for i in range(4)], FLOW, 7)
    target, mask = batch["target"], batch["loss_mask"]
    prediction = torch.zeros_like(target).requires_grad_()
    weights = torch.tensor([1.0, 2.0, 0.5, 3.0])
    choice = LossChoice()
    whole = choice.error(prediction, target, weights, mask)
    by_hand = [(target[i][mask[i] == 1] ** 2).mean() * weights[i] for i in range(4)]
    torch.testing.assert_close(whole, torch.stack(by_hand).mean())
    parts = [
        choice.error(*(each[i : i + 1] for each in (prediction, target, weights, mask))) / 4
        for i in range(4)
    ]
    torch.testing.assert_close(sum(parts), whole)
    (gradient,) = torch.autograd.grad(whole, prediction)
    assert not gradient[mask == 0].any() and gradient[mask == 1].all()
    (of_parts,) = torch.autograd.grad(sum(parts), prediction)
    torch.testing.assert_close(of_parts, gradient)


def test_empty_mask_has_no_loss_and_no_gradient():
    prediction = torch.ones(1, 2, 3, 3, requires_grad=True)
    loss = LossChoice().error(prediction, torch.zeros(1, 2, 3, 3), None, torch.zeros(1, 1, 3, 3))
    loss.backward()
    assert loss == 0 and prediction.grad is not None and not prediction.grad.any()


def test_missing_mask_is_refused_by_name(folder: Path):
    (folder / "masks/3.png").unlink()
    with pytest.raises(DataError, match=r"(?s)there is no .*masks/3\.png.*needs a mask"):
        opened(folder)


def paint_black(folder: Path, count: int) -> None:
    for i in range(count):
        Image.new("L", (8, 8)).save(folder / f"masks/{i}.png")


def test_black_masks_are_counted(folder: Path):
    paint_black(folder, 2)
    _, masks = found = surveys([opened(folder)], whole=True)
    (caution,) = masks.cautions
    assert "2 of 12 masks are all black, so nothing is learned" in caution
    require_white(found)


@pytest.mark.parametrize("whole", [True, False])
def test_masks_that_are_all_black_are_refused(whole: bool, folder: Path):
    paint_black(folder, 11)
    data = opened(folder)
    require_white(surveys([data], whole))
    paint_black(folder, 12)
    with pytest.raises(DataError, match=r"(?s)masks: .*all 12 are black.*White counts"):
        require_white(surveys([data], whole))
