"""Mask of each picture: how much its parts count in the training loss.

The mask of ``photos/a/b.png`` is ``MASKS/a/b.png``, or else the only picture of that name with
another suffix. White counts, black does not.
"""

from __future__ import annotations

from pathlib import Path

from PIL import Image
from torch import Tensor

from megatron_pulse.data.dataset import DiffusionDataset, Variation
from megatron_pulse.data.images.conditioning import (
    ControlPictures,
    Paired,
    Pairing,
    in_unit_range,
)
from megatron_pulse.data.images.folder import ImageFiles
from megatron_pulse.data.images.opening import opened
from megatron_pulse.data.images.pictures import upright_size
from megatron_pulse.data.stored_file import StoredFile


class Masks(ControlPictures):
    """Masks of pictures, cropped and resized as these are.

    One of other proportions than its picture is corrupt: its crop would be another part.
    """

    what = "mask"

    def _decoded(self, index: int) -> Image.Image:
        mask = super()._decoded(index)
        photo = self.photos[index]
        with self._told(index), opened(photo) as file:
            if fault := misfit(mask.size, photo, upright_size(file)):
                self._sound[index] = 0
                raise ValueError(fault)
        return mask

    def is_black(self, index: int) -> bool:
        """True if no part of the picture counts."""
        return not in_unit_range(self.image(index)).any()


def misfit(size: tuple[int, int], picture: StoredFile, of_picture: tuple[int, int]) -> str:
    """Fault of a mask whose proportions are not its picture's, to a pixel; empty if they are.

    Sizes are (width, height), upright.
    """
    (width, height), (whole_width, whole_height) = size, of_picture
    other = abs(whole_width * height - width * whole_height)
    if other <= max(whole_width, whole_height):
        return ""
    return (
        f"it has {width}x{height} pixels, and its picture {picture} has "
        f"{whole_width}x{whole_height}: their proportions differ"
    )


class Masked(Paired):
    """``source``, whose pictures are ``files``, with masks from the folder ``root``.

    Raises DataError listing all pictures without a mask.
    """

    def __init__(
        self, source: DiffusionDataset, files: ImageFiles, root: Path, verify: bool = False
    ) -> None:
        pairing = Pairing.of(files, root, Masks)
        super().__init__(source, files, pairing, files.shapes, 1, verify)

    def mask(self, index: int, variation: Variation | None = None) -> Tensor:
        return in_unit_range(self._others.image(index, variation))
