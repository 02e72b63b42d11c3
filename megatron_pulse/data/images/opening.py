"""Safe opening of picture files: only supported formats, and only sizes that fit into memory.

The first bytes of a file determine its format, not its name. Pillow would try some forty formats,
and a few start other programs (EPS starts Ghostscript). Here a file goes to the one matching reader
or is rejected.
"""

from __future__ import annotations

import io
import re
import struct
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from megatron_pulse.data.stored_file import StoredFile, open_stored

UNREADABLE = (OSError, SyntaxError, ValueError)
"""Exceptions for files without a whole picture, and for storage errors."""
_DAMAGED = (EOFError, IndexError, KeyError, TypeError, OverflowError, struct.error, zlib.error)
"""Further exceptions of Pillow's readers for damaged files."""
_UNSUPPORTED = re.compile("unknown pixel mode|cannot handle .* layers?|Unsupported BMP")
"""Messages of Pillow's readers for pictures that are whole, of a kind that they do not decode."""
SUFFIXES = (".png", ".jpg", ".jpeg", ".jfif", ".webp", ".gif", ".bmp", ".tif", ".tiff")
"""Suffixes of files that are taken for pictures."""
MAX_PIXELS = 89_478_485
"""Largest picture in pixels: Pillow's own limit, beyond which it warns (256 MiB as RGB).

Decoding, rotating and resizing such a picture takes a process up to 1.4 GB.
"""
MAX_BYTES = 8 * MAX_PIXELS
"""Largest file in bytes: the largest picture, uncompressed, with transparency and 16 bits."""

_READERS: Mapping[str, type[ImageFile]] = {
    "PNG": PngImageFile,
    "JPEG": JpegImageFile,
    "WEBP": WebPImageFile,
    "GIF": GifImageFile,
    "BMP": BmpImageFile,
    "TIFF": TiffImageFile,
}
_READ = "supported are PNG, JPEG, WEBP, GIF, BMP and TIFF"
_HEAD = 64
_BEGINNINGS = {
    name: re.compile(pattern, re.DOTALL)
    for name, pattern in {
        "PNG": rb"\x89PNG\r\n\x1a\n",
        "JPEG": rb"\xff\xd8\xff",
        "WEBP": rb"RIFF....WEBP",
        "GIF": rb"GIF8",
        "BMP": rb"BM",
        "TIFF": rb"II\*\0|MM\0\*",
        "AVIF": rb"....ftypavi[fs]",
        "HEIF": rb"....ftyp(?:hei|hev|mif)",
        "JPEG 2000": rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51",
        "JPEG XL": rb"\xff\x0a|\0\0\0\x0cJXL ",
        "PSD": rb"8BPS",
        "ICO": rb"\0\0\x01\0",
        "PostScript": rb"%!PS|\xc5\xd0\xd3\xc6",
        "PDF": rb"%PDF",
        "HTML": rb"\s*<(?i:!doctype html|html)",
        "SVG or other XML": rb"\s*<(?:\?xml|svg)",
    }.items()
}
"""Patterns of the first bytes, including formats often found under other suffixes."""

# Pillow warns of damaged metadata in sound pictures, and of ignored transparency.
warnings.filterwarnings("ignore", module=r"PIL\.")


@contextmanager
def opened(path: StoredFile) -> Iterator[ImageFile]:
    """Open a picture file and read only its beginning (all of a WEBP file, as its reader does).

    Raises ``UNREADABLE`` for files that are not regular, or of a format outside ``_READERS``. Also
    raises for samples of 32 bits, and for files above ``MAX_PIXELS`` or ``MAX_BYTES``.
    """
    with open_stored(path) as content:
        head = content.read(_HEAD)
        name = _format_of(head)
        if (size := content.seek(0, io.SEEK_END)) > MAX_BYTES:
            raise ValueError(
                f"it has {size:,} bytes; at most {MAX_BYTES:,} are read. Write it again"
            )
        if name == "WEBP":  # its reader allocates memory for all pixels at once
            _require_small(*_webp_size(head))
        content.seek(0)
        try:
            # Without its name the file is not mapped. Pillow 13 maps rotated TIFF files wrongly.
            file = _READERS[name](content)
        except (*UNREADABLE, *_DAMAGED) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            if _UNSUPPORTED.match(str(error)):
                raise ValueError(
                    f"it is a {name} file of a kind that Pillow cannot read ({error}). Write it "
                    "again with 8 bits per sample"
                ) from error
            raise ValueError(f"it is a damaged {name} file: {error}") from error
        with file:
            _require_small(*file.size)
            if file.mode == "F" or (file.mode == "I" and name == "TIFF"):
                raise ValueError("its samples have 32 bits. Write it again with 8 or 16")
            yield file


def load(file: ImageFile) -> None:
    """Read the pixels of an opened file and the metadata after them; raises ``UNREADABLE``."""
    try:
        file.load()
    except _DAMAGED as error:
        raise ValueError(f"it is damaged: {error}") from error


def _require_small(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise ValueError(
            f"it has {width}x{height} pixels, {width * height:,}; at most {MAX_PIXELS:,} are "
            "read. Scale it down"
        )


def _webp_size(head: bytes) -> tuple[int, int]:
    """(width, height) from the header of a WEBP file; its own reader reports faults."""

    def number(start: int, end: int) -> int:
        return int.from_bytes(head[start:end], "little")

    match head[12:16]:
        case b"VP8X":  # canvas of an animation, or of a picture with metadata
            return number(24, 27) + 1, number(27, 30) + 1
        case b"VP8L":
            return (number(21, 25) & 0x3FFF) + 1, (number(21, 25) >> 14 & 0x3FFF) + 1
        case _:
            return number(26, 28) & 0x3FFF, number(28, 30) & 0x3FFF


def _format_of(head: bytes) -> str:
    """Key in ``_READERS`` for a file with this beginning; raises ValueError for other formats."""
    if not head:
        raise ValueError(f"it is empty: {_READ}")
    for name, beginning in _BEGINNINGS.items():
        if beginning.match(head):
            if name in _READERS:
                return name
            raise ValueError(f"it holds {name} despite its name: {_READ}; convert it")
    raise ValueError(f"not an image: {_READ}")
