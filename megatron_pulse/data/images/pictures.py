"""Decoding of one picture file: upright, in sRGB, with the requested channels and size."""

from __future__ import annotations

import io
import struct
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from PIL import ExifTags, Image, ImageCms
from PIL.ImageFile import ImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION, TiffImageFile
from torch import Tensor

from megatron_pulse.data.dataset import Variation
from megatron_pulse.data.images.opening import load

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
_SPACES = {"RGB": "RGB", "L": "GRAY", "CMYK": "CMYK", "LAB": "Lab"}
"""ICC's names of what modes are."""
_GREYS = ("1", "LA", "La")
_NOTES = (b"eXIf", b"iTXt", b"tEXt", b"zTXt")
"""Chunks of PNG that may say the orientation."""


def upright_size(file: ImageFile) -> tuple[int, int]:
    """(width, height) of the result of ``decoded`` for an opened file."""
    if isinstance(file, PngImageFile) and _has_notes_behind(file):
        load(file)
    width, height = file.size
    turned = not isinstance(file, TiffImageFile) and _orientation(file) in _SWAPPED
    return (height, width) if turned else (width, height)


def decoded(file: ImageFile, channels: int) -> Image.Image:
    """Decode an opened file to an upright picture, grey (1 channel) or RGB (3).

    Colours of another profile are converted to sRGB, as ``PIL.ImageCms.profileToProfile`` does. Of
    12 or 16 bits the upper 8 are used. Transparency is ignored, as in diffusers' own trainers.
    """
    load(file)  # also what stands behind the pixels
    turn = _UPRIGHT.get(_orientation(file))
    if file.mode.startswith("I"):  # grey of 16 bits: Pillow would make everything above 255 white
        bits, inverted = _grey_scale(file)
        high = (np.asarray(file) >> bits - 8).clip(0, 255).astype(np.uint8)
        image = Image.fromarray(255 - high if inverted else high)
    else:
        image = file
    image = _in_srgb(image, file.info.get("icc_profile"))
    image = image.convert("L" if channels == 1 else "RGB")
    return image if turn is None else image.transpose(turn)


def _grey_scale(file: ImageFile) -> tuple[int, bool]:
    """Bits of a grey sample beyond 8, and whether 0 is white (TIFF 6.0, section 4)."""
    if not isinstance(file, TiffImageFile):
        return 16, False
    bits = file.tag_v2.get(BITSPERSAMPLE, (16,))[0]
    return bits, file.tag_v2.get(PHOTOMETRIC_INTERPRETATION) == 0


def has_alpha(file: ImageFile) -> bool:
    """True if a picture has transparency, which is ignored."""
    return file.has_transparency_data


def fitted(image: Image.Image, size: tuple[int, int], variation: Variation | None = None) -> Tensor:
    """Picture of ``size`` (height, width): float32 [c, height, width] in [-1, 1].

    The image is mirrored if so varied, scaled to cover the size (bicubic, antialiased), and cropped
    to its centre, or where the variation says.
    """
    rows, columns = size
    if variation is not None and variation.flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    part = Crop.of(image.size, size, None if variation is None else variation.crop)
    pixels = np.asarray(image.resize((columns, rows), Image.Resampling.BICUBIC, box=part.box))
    planes = pixels.reshape(rows, columns, -1).transpose(2, 0, 1)
    return torch.from_numpy(planes.astype(np.float32) / 127.5 - 1)


@dataclass(frozen=True)
class Crop:
    """Part of an image that becomes a picture.

    - ``box``: left, top, right and bottom in the image.

    - ``corner``: (top, left) in the image after scaling.
    """

    box: tuple[float, float, float, float]
    corner: tuple[int, int]

    @classmethod
    def of(
        cls,
        image: tuple[int, int],
        size: tuple[int, int],
        place: tuple[float, float] | None = None,
    ) -> Crop:
        """Crop of an ``image`` (width, height) to ``size`` (height, width): at its centre, or at
        ``place`` (down, across) in [0, 1).

        Only the box is read: a whole image of extreme aspect ratio, scaled to cover the size, may
        be too large for memory.
        """
        (width, height), (rows, columns) = image, size
        if rows == columns and place is None:
            side = min(width, height)
            left, top = (width - side) // 2, (height - side) // 2
            box = (left, top, left + side, top + side)
            return cls(box, (round(top * rows / side), round(left * rows / side)))
        if columns * height >= rows * width:  # scaled to these sides, as torchvision's Resize does
            whole = columns, max(rows, height * columns // width)
        else:
            whole = max(columns, width * rows // height), rows
        free = whole[1] - rows, whole[0] - columns
        if place is None:
            top, left = (round(way / 2) for way in free)
        else:
            top, left = (int(at * (way + 1)) for at, way in zip(place, free, strict=True))
        across, down = width / whole[0], height / whole[1]
        right, bottom = min((left + columns) * across, width), min((top + rows) * down, height)
        return cls((left * across, top * down, right, bottom), (top, left))


def _in_srgb(image: Image.Image, profile: object) -> Image.Image:
    """Convert ``image`` by its profile; unchanged without a profile for its kind of pixels."""
    if not isinstance(profile, bytes):
        profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
        return image if image.mode != "LAB" else _in_srgb(image, profile)
    if image.mode not in _SPACES:
        image = image.convert("L" if image.mode in _GREYS else "RGB")
    with suppress(ImageCms.PyCMSError, OSError, ValueError):  # a damaged profile
        transform = _to_srgb(profile, image.mode)
        return image if transform is None else transform.apply(image)
    return image


@lru_cache(maxsize=16)
def _to_srgb(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Transform of a mode's pixels to sRGB; None if the profile is for other pixels, or is sRGB."""
    opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    if opened.profile.xcolor_space.strip() != _SPACES[mode]:
        return None
    transform = ImageCms.buildTransform(opened, ImageCms.createProfile("sRGB"), mode, "RGB")
    return None if mode == "RGB" and _changes_nothing(transform) else transform


def _changes_nothing(transform: ImageCms.ImageCmsTransform) -> bool:
    """True if a profile is sRGB itself, as most are: converting takes twice as long as decoding."""
    levels: np.ndarray = np.linspace(0, 255, 33).round().astype(np.uint8)
    colours = np.stack(np.meshgrid(levels, levels, levels), -1).reshape(33, -1, 3)
    return np.array_equal(np.asarray(transform.apply(Image.fromarray(colours))), colours)


def _has_notes_behind(file: PngImageFile) -> bool:
    """True if a PNG has metadata after its pixels, judged by the heads of its chunks."""
    content, seen = file.fp, False
    assert content is not None
    place = content.tell()
    try:
        content.seek(8)
        while len(head := content.read(8)) == 8:
            length, name = struct.unpack(">I4s", head)
            if seen and name in _NOTES:
                return True
            seen |= name == b"IDAT"
            content.seek(length + 4, io.SEEK_CUR)
        return False
    finally:
        content.seek(place)


def _orientation(file: ImageFile) -> int:
    """EXIF or XMP orientation in the bytes read so far; 1 (upright) if none is legible."""
    try:  # the file's own method would read all of a PNG
        found = Image.Image.getexif(file).get(ExifTags.Base.Orientation, 1)
    except Exception:  # Pillow raises many kinds for damaged notes beside sound pixels
        return 1
    return found if isinstance(found, int) else 1
