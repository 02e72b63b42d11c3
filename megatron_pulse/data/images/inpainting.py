"""Masks of inpainting, and the pictures without the parts that are drawn anew.

A mask of one's own is ``MASKS/a/b.png`` for the picture ``photos/a/b.png``; white (from one half
on) is drawn anew. Random masks are unions of rectangles, a function of (seed, sample).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_pulse.backbone.appended_fields import INPAINT_MASK, INPAINTING, MASKED_IMAGE
from megatron_pulse.data.dataset import Derived, DiffusionDataset, FieldSpec, Variation
from megatron_pulse.data.images.conditioning import Paired, Pairing, in_unit_range
from megatron_pulse.data.images.folder import ImageFiles
from megatron_pulse.data.images.masks import Masks, misfit
from megatron_pulse.data.images.opening import UNREADABLE, opened
from megatron_pulse.data.images.pictures import decoded, fitted, upright_size
from megatron_pulse.diffusion.noise import Stream, philox
from megatron_pulse.errors import Faults, UserError, collecting

_MOST_KEPT = 64
"""Pictures, of the largest usual microbatch."""
_MOST_RECTANGLES = 4
_SHORTEST, _LONGEST = 1 / 8, 3 / 4
"""Sides of rectangles as shares of the picture's."""
_WHOLE = 1 / 8
"""Share of random masks that cover the picture."""
_UNIT = 2.0**-64


def random_mask(seed: int, sample: int, size: tuple[int, int]) -> Tensor:
    """Mask of a sample's picture of ``size`` (height, width): float32 ``[1, height, width]`` of
    zeros and ones.
    """
    words = philox(seed, Stream.INPAINT_MASK, sample, 0).random_raw(2 + 4 * _MOST_RECTANGLES)
    whole, count, *places = (float(word) * _UNIT for word in words)
    mask = torch.zeros(1, *size)
    if whole < _WHOLE:
        return mask + 1
    for number in range(1 + int(count * _MOST_RECTANGLES)):
        rectangle = []
        for axis, side in enumerate(size):
            share, place = places[4 * number + 2 * axis :][:2]
            length = max(1, round((_SHORTEST + share * (_LONGEST - _SHORTEST)) * side))
            start = int(place * (side - length + 1))
            rectangle.append(slice(start, start + length))
        mask[0, rectangle[0], rectangle[1]] = 1
    return mask


def inpainting_fields(image: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Fields of a picture ``[c, h, w]`` in [-1, 1] and its mask ``[1, h, w]`` in [0, 1], in pixels.

    As in diffusers' ``StableDiffusionInpaintPipeline``: grey (0) where the mask is one half or
    more.
    """
    return {INPAINT_MASK: (mask >= 0.5).float(), MASKED_IMAGE: image * (mask < 0.5)}


def mask_of_latents(mask: Tensor, spec: FieldSpec) -> Tensor:
    """Mask ``[1, H, W]`` of pixels as the field of latents: ``[1, h, w]``, or ``[r * r, h, w]`` of
    all pixels of each latent.

    The first has the nearest pixel (``torch.nn.functional.interpolate``), as diffusers' pipelines.
    """
    channels, *sides = spec.shape
    if channels == 1:
        return F.interpolate(mask[None], size=sides)[0]
    return F.pixel_unshuffle(mask, mask.shape[-1] // sides[-1])


def inpainting_specs(shape: Sequence[int]) -> dict[str, FieldSpec]:
    """Specs of the fields of pictures of ``shape`` (c, h, w), in pixels."""
    return {INPAINT_MASK: FieldSpec((1, *shape[1:])), MASKED_IMAGE: FieldSpec(tuple(shape))}


class _KeepsPictures(Derived):
    """``source``, whose pictures are kept until their masked pictures are made: decoded once."""

    def __init__(self, source: DiffusionDataset) -> None:
        super().__init__(source)
        self._kept: dict[tuple[int, Variation | None], Tensor] = {}

    def image(self, index: int, variation: Variation | None = None) -> Tensor:
        image = super().image(index, variation)
        self._kept[index, variation] = image
        if len(self._kept) > _MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        return image

    def _picture(self, index: int, variation: Variation | None) -> Tensor:
        kept = self._kept.pop((index, variation), None)
        return self.source.image(index, variation) if kept is None else kept


class RandomlyMasked(_KeepsPictures):
    """``source`` with the fields of inpainting, of random masks of ``seed``."""

    def __init__(self, source: DiffusionDataset, seed: int) -> None:
        super().__init__(source)
        self.fields = {**source.fields, **inpainting_specs(source.image_shape)}
        self._seed = seed

    def conditioning(self, index: int, variation: Variation | None = None) -> dict[str, Tensor]:
        image = self._picture(index, variation)
        mask = random_mask(self._seed, index, (image.shape[-2], image.shape[-1]))
        return super().conditioning(index, variation) | inpainting_fields(image, mask)


class MaskedByFiles(Paired, _KeepsPictures):
    """``source``, whose pictures are ``files``, with the fields of inpainting.

    Masks are in the folder ``root``. Raises DataError listing all pictures without a mask.
    """

    def __init__(
        self, source: DiffusionDataset, files: ImageFiles, root: Path, verify: bool = False
    ) -> None:
        pairing = Pairing.of(files, root, Masks)
        super().__init__(source, files, pairing, files.shapes, 1, verify)
        self.fields = {**source.fields, **inpainting_specs(source.image_shape)}

    def conditioning(self, index: int, variation: Variation | None = None) -> dict[str, Tensor]:
        image = self._picture(index, variation)
        mask = in_unit_range(self._others.image(index, variation))
        return super().conditioning(index, variation) | inpainting_fields(image, mask)


def masked_picture(picture: Path, mask: Path, spec: FieldSpec) -> dict[str, Tensor]:
    """Fields of inpainting of two files, in pixels; ``spec`` is that of the picture.

    Raises Faults if a file is no picture.
    """
    channels, height, width = spec.shape
    found, faults = list[Tensor](), list[str]()
    with suppress(*UNREADABLE), opened(picture) as one, opened(mask) as other:
        if fault := misfit(upright_size(other), picture, upright_size(one)):
            faults.append(f"{mask}: {fault}")
    for path, count in ((picture, channels), (mask, 1)):
        with collecting(faults):
            found.append(one_picture(path, count, (height, width)))
    if faults:
        raise Faults(faults)
    image, grey = found
    return inpainting_fields(image, in_unit_range(grey))


def one_picture(path: Path, channels: int, size: tuple[int, int]) -> Tensor:
    """Picture of a file in sampling, fitted to ``size`` (height, width) as in training.

    Raises UserError if the file is no picture.
    """
    try:
        with opened(path) as file:
            return fitted(decoded(file, channels), size)
    except UNREADABLE as error:
        raise UserError(f"{path}: {error}") from error


def reads_masks(fields: Iterable[str]) -> bool:
    """True if a backbone with these batch fields inpaints."""
    return set(INPAINTING) <= set(fields)
