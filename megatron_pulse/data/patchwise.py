"""Patch-wise training: samples and random patches of them, with their places.

Patch Diffusion (Wang et al. 2023, 2304.12526): each step trains on whole samples, or on patches of
one size whose places the model is told. Noise is added to the patch, and the loss is the patch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_pulse.backbone.shape_buckets import PATCH_CORNER
from megatron_pulse.data.buckets import Buckets, GroupSampler
from megatron_pulse.data.dataset import Derived, DiffusionDataset, Variation
from megatron_pulse.data.sampler import Item
from megatron_pulse.diffusion.noise import Stream, philox

_UNIT = 2.0**-64


class Patch(Derived):
    """Patches ``[c, *size]`` of the samples of ``source``, one each, whose field is their corner.

    A corner is a multiple of ``step``. Without a variation it is the first.
    """

    def __init__(self, source: DiffusionDataset, size: tuple[int, int], step: int) -> None:
        super().__init__(source)
        self._whole, self._step = source.image_shape[-2:], step
        self.image_shape = (*source.image_shape[:-2], *size)

    def corner(self, variation: Variation | None) -> tuple[int, int]:
        """Top and left of a sample's patch, in elements."""
        place = (0.0, 0.0) if variation is None or variation.patch is None else variation.patch
        top, left = (
            int(fraction * ((whole - side) // self._step + 1)) * self._step
            for fraction, whole, side in zip(place, self._whole, self.image_shape[-2:], strict=True)
        )
        return top, left

    def _cut(self, whole: Tensor, variation: Variation | None) -> Tensor:
        """Patch of a sample, or of its mask; both have the same height and width."""
        (top, left), (height, width) = self.corner(variation), self.image_shape[-2:]
        return whole[..., top : top + height, left : left + width]

    def image(self, index: int, variation: Variation | None = None) -> Tensor:
        return self._cut(super().image(index, variation), variation)

    def deviation(self, index: int, variation: Variation | None = None) -> Tensor | None:
        whole = super().deviation(index, variation)
        return None if whole is None else self._cut(whole, variation)

    def mask(self, index: int, variation: Variation | None = None) -> Tensor | None:
        whole = super().mask(index, variation)
        return None if whole is None else self._cut(whole, variation)

    def conditioning(self, index: int, variation: Variation | None = None) -> dict[str, Tensor]:
        corner = torch.tensor(self.corner(variation))
        return {**super().conditioning(index, variation), PATCH_CORNER: corner}


def patches_of(data: DiffusionDataset, sizes: Sequence[tuple[int, int]], step: int) -> Buckets:
    """Buckets of all samples of ``data`` at each of ``sizes``, the first of which is the whole."""
    return Buckets([data, *(Patch(data, size, step) for size in sizes[1:])])


class PatchwiseSampler(GroupSampler):
    """Sampler for ``patches_of`` a dataset: the order of samples without patches, and sizes.

    Positions ``g * group_size ...`` of the run are of one size, drawn with the probabilities
    ``shares``. The size is a function of (seed, g).
    """

    def __init__(self, num_samples: int, *, shares: Sequence[float], **order: Any) -> None:
        super().__init__(num_samples, **order)
        self._bounds = list(accumulate(shares))[:-1]

    def item(self, position: int) -> Item:
        index, _ = super().item(position)
        return self.part_of(position // self.group_size) * self.num_samples + index, position

    def part_of(self, group: int) -> int:
        """Number of the size of a group's patches; 0 is the whole."""
        word = float(philox(self.seed, Stream.PATCH_SIZE, 0, group).random_raw())
        return sum(word * _UNIT >= bound for bound in self._bounds)
