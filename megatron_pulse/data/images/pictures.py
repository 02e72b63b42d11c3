"""One picture file: upright, in the channels asked for, as a square of pixels."""

from __future__ import annotations

import numpy as np
import torch
from PIL import ExifTags, Image
from torch import Tensor

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What sets a picture upright, by EXIF's Orientation."""
_SWAPPED = (5, 6, 7, 8)
"""Those that swap width and height."""


def upright_size(file: Image.Image) -> tuple[int, int]:
    """(width, height) of what ``decoded`` makes of an opened file."""
    width, height = file.size
    return (height, width) if _orientation(file) in _SWAPPED else (width, height)


def decoded(file: Image.Image, channels: int) -> Image.Image:
    """The whole picture of an opened file, grey (1 channel) or RGB (3), as its camera was held.

    Of 16 bits the upper 8 count; transparency is left out, as diffusers' own trainers do.
    """
    turn = _UPRIGHT.get(_orientation(file))
    if file.mode.startswith("I"):  # grey of 16 bits: Pillow would make everything above 255 white
        high = np.asarray(file) >> 8
        image = Image.fromarray(high.clip(0, 255).astype(np.uint8))
    else:
        image = file
    image = image.convert("L" if channels == 1 else "RGB")
    return image if turn is None else image.transpose(turn)


def squared(image: Image.Image, size: int) -> Tensor:
    """Its central square, resized (bicubic, antialiased): float32 [c, size, size] in [-1, 1]."""
    left, top, side = central_square(*image.size)
    box = (left, top, left + side, top + side)
    pixels = np.asarray(image.resize((size, size), Image.Resampling.BICUBIC, box=box))
    planes = pixels.reshape(size, size, -1).transpose(2, 0, 1)
    return torch.from_numpy(planes.astype(np.float32) / 127.5 - 1)


def central_square(width: int, height: int) -> tuple[int, int, int]:
    """Left, top and side of the square in the middle."""
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side


def _orientation(file: Image.Image) -> int:
    """EXIF's, of what stands before the pixels; 1, upright, where nothing (legible) does."""
    try:  # the file's own method would read all of a PNG, where notes may follow the pixels
        found = Image.Image.getexif(file).get(ExifTags.Base.Orientation, 1)
    except Exception:  # Pillow raises many kinds for damaged notes beside sound pixels
        return 1
    return found if isinstance(found, int) else 1
