from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch

from megatron_pulse.backbone.shape_buckets import PATCH_CORNER
from megatron_pulse.data.augmentation import Augmentation
from megatron_pulse.data.dataset import ArrayDataset, Derived
from megatron_pulse.data.microbatches import DiffusionLoader, Split
from megatron_pulse.data.patchwise import PatchwiseSampler, patches_of
from megatron_pulse.data.sampler import MicrobatchSampler
from megatron_pulse.diffusion.noise import draw
from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.diffusion.process_flags import Objective

SIZES, SHARES = [(8, 6), (4, 3), (2, 2)], (0.5, 0.3, 0.2)


class Masked(Derived):
    """Samples whose mask is one of their channels."""

    def __init__(self, source):
        super().__init__(source)
        self.fields = {PATCH_CORNER: None}  # as of a chain that takes it

    def mask(self, index, variation=None):
        return (self.image(index, variation)[:1] > 0).float()

    def conditioning(self, index, variation=None):
        return {PATCH_CORNER: torch.tensor([0, 0])}


def data():
    images = np.random.default_rng(0).uniform(-1, 1, (10, 3, 8, 6))
    return Masked(ArrayDataset(images, np.arange(10) % 2, 2))


def sampler(mbs=2, rank=0, replicas=1, consumed=0, group=4):
    return PatchwiseSampler(
        10, shares=SHARES, group_size=group, consumed_samples=consumed, micro_batch_size=mbs,
        data_parallel_rank=rank, data_parallel_size=replicas, seed=3,
    )  # fmt: skip


@pytest.mark.parametrize("step", [1, 2])
def test_microbatch_is_of_patches_of_the_samples_at_their_corners(step):
    """Rows equal a direct computation: the sample's part, noise of its size, the formula of v."""
    whole, process = data(), DiffusionProcess(Objective.V)
    loader = DiffusionLoader(
        patches_of(whole, SIZES, step), sampler(), process, 3, split=Split.TRAIN,
        other_processes=(process, process), augmentation=Augmentation(patchwise=True),
    )  # fmt: skip
    order = iter(MicrobatchSampler(10, 0, 2, 0, 1, 3))
    seen = set()
    for batch in islice(loader, 40):
        size, corners = tuple(batch["noisy"].shape[-2:]), batch[PATCH_CORNER].tolist()
        part = SIZES.index(size)
        for row, ((index, position), corner) in enumerate(zip(next(order), corners, strict=True)):
            assert batch["index"][row] == 10 * part + index
            rows, columns = (slice(c, c + n) for c, n in zip(corner, size, strict=True))
            made = draw(3, 10 * part + index, position, (3, *size))
            clean = whole.image(index)[:, rows, columns]
            noisy, target = process.noised(clean[None], made.noise[None], batch["timesteps"][[row]])
            assert torch.equal(batch["noisy"][row], noisy[0])
            assert torch.equal(batch["target"][row], target[0])
            assert torch.equal(batch["loss_mask"][row], whole.mask(index)[:, rows, columns])
            seen.add((size, *corner))
    assert {corner[1:] for corner in seen if corner[0] == (8, 6)} == {(0, 0)}
    places = {(top, left) for size, top, left in seen if size == (4, 3)}
    assert places <= {(top, left) for top in range(0, 5, step) for left in range(0, 4, step)}
    assert len(places) > 3


def test_order_of_samples_is_that_without_patches_and_a_step_has_one_size():
    plain = [item for items in islice(iter(MicrobatchSampler(10, 0, 1, 0, 1, 3)), 4000)
             for item in items]  # fmt: skip
    found = [item for items in islice(iter(sampler(1)), 4000) for item in items]
    assert [(i % 10, p) for i, p in found] == plain
    sizes = [found[p][0] // 10 for p in range(4000)]
    assert all(len({*sizes[first : first + 4]}) == 1 for first in range(0, 4000, 4))
    shares = Counter(sizes[::4])
    assert [shares[k] / 1000 for k in range(3)] == pytest.approx(SHARES, abs=0.05)
    ranks = [iter(sampler(2, rank, 2, consumed=8)) for rank in range(2)]
    again = [item for m in range(10) for item in next(ranks[m % 2])]
    assert again == found[8:28]
