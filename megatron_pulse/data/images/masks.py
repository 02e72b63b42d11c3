"""Mask of each picture: how much its parts count in the training loss.

The mask of ``photos/a/b.png`` is ``MASKS/a/b.png``, or else the only picture of that name with
another suffix. White counts, black does not.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from megatron_pulse.data.dataset import DiffusionDataset, Variation
from megatron_pulse.data.images.conditioning import (
    ControlPictures,
    Paired,
    Pairing,
    in_unit_range,
)
from megatron_pulse.data.images.folder import ImageFiles


class Masks(ControlPictures):
    """Masks of pictures, cropped and resized as these are."""

    what = "mask"

    def is_black(self, index: int) -> bool:
        """True if no part of the picture counts."""
        return not in_unit_range(self.image(index)).any()


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
