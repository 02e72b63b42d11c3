"""Decoding of one picture file: upright, in sRGB, with the requested channels, as a square."""

from __future__ import annotations

import io
import struct
from contextlib import suppress
from functools import lru_cache

import numpy as np
import torch
from PIL import ExifTags, Image, ImageCms
from PIL.ImageFile import ImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION, TiffImageFile
from torch import Tensor

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


def squared(image: Image.Image, size: int) -> Tensor:
    """Central square, resized (bicubic, antialiased): float32 [c, size, size] in [-1, 1]."""
    left, top, side = central_square(*image.size)
    box = (left, top, left + side, top + side)
    pixels = np.asarray(image.resize((size, size), Image.Resampling.BICUBIC, box=box))
    planes = pixels.reshape(size, size, -1).transpose(2, 0, 1)
    return torch.from_numpy(planes.astype(np.float32) / 127.5 - 1)


def central_square(width: int, height: int) -> tuple[int, int, int]:
    """Left, top and side of the central square."""
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side


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
