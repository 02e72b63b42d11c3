"""A small captioned data set of real pictures: the emoji of a colour font."""

from __future__ import annotations

import json
import os
import shutil
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from megatron_pulse.data.dataset import DataError
from megatron_pulse.data.images.listing import METADATA
from megatron_pulse.progress import ProgressLine

FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
PACKAGE = "fonts-noto-color-emoji"
_PIXELS = 109  # the one size of the font's bitmaps, 136x128
_CANVAS = 136
_NO_CHARACTER = "\U0010fffe"
_CANDIDATES = range(0xA0, 0x20000)  # above ASCII, whose digits are only parts of keycaps
_NEVER = {"Lo", "Cs", "Co", "Cn"}  # letters without case (Chinese, ...), surrogates, unassigned


def render_emoji(
    folder: str | Path,
    image_size: int = 32,
    font: str | Path = FONT,
    limit: int | None = None,
    progress: bool = True,
) -> int:
    """Write emoji over white as ``image_size`` PNG files, captioned by their Unicode names.

    ``folder`` (new or empty) gets the pictures and ``metadata.jsonl``, all or nothing. The emoji
    are the first ``limit`` single code points with a name and a picture in ``font``. Returns their
    number. Raises DataError if the folder is in use or the font cannot be read.
    """
    folder = Path(folder)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise DataError(f"emoji {folder}", ["it exists and is not empty"], "Name a new folder.")
    face = _open(Path(font))
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        beside.mkdir()
        lines = []
        for character, picture in _pictures(face, limit, progress):
            name = f"{ord(character):05x}.png"
            picture.resize((image_size, image_size), Image.Resampling.BOX).save(beside / name)
            text = unicodedata.name(character).lower()
            lines.append(json.dumps({"file_name": name, "text": text}))
        if not lines:
            raise DataError(f"font {font}", ["it has no emoji"], "Give a colour emoji font.")
        (beside / METADATA).write_text("\n".join(lines) + "\n", encoding="utf-8")
        os.replace(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return len(lines)


def _open(font: Path) -> ImageFont.FreeTypeFont:
    remedy = f"Install it (Debian, Ubuntu: apt-get install {PACKAGE}), or give another --font."
    if not font.is_file():
        raise DataError("emoji", [f"there is no font {font}"], remedy)
    try:
        return ImageFont.truetype(str(font), _PIXELS, layout_engine=ImageFont.Layout.BASIC)
    except OSError as error:
        reason = f"{font} has no bitmaps of {_PIXELS} pixels: {error}"
        raise DataError("emoji", [reason], remedy) from error


def _pictures(
    face: ImageFont.FreeTypeFont, limit: int | None, progress: bool
) -> Iterator[tuple[str, Image.Image]]:
    """Characters with a name and a picture, and the pictures."""
    empty = {_picture(face, character).tobytes() for character in (" ", _NO_CHARACTER)}
    count = 0
    with ProgressLine(
        "rendering emoji", len(_CANDIDATES), "characters", silent=not progress
    ) as line:
        for line.done, character in enumerate(map(chr, _CANDIDATES)):
            if unicodedata.category(character) in _NEVER or not unicodedata.name(character, ""):
                continue
            left, top, right, bottom = face.getbbox(character)
            if left == right or top == bottom:
                continue
            picture = _picture(face, character)
            if picture.tobytes() in empty:
                continue
            yield character, picture
            count += 1
            line.note = f"{count} found"
            if count == limit:
                return


def _picture(face: ImageFont.FreeTypeFont, character: str) -> Image.Image:
    left, top, right, bottom = face.getbbox(character)
    picture = Image.new("RGB", (_CANVAS, _CANVAS), "white")
    corner = ((_CANVAS - right - left) // 2, (_CANVAS - bottom - top) // 2)
    ImageDraw.Draw(picture).text(corner, character, font=face, embedded_color=True)
    return picture
