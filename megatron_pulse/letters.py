"""Texts of users in pictures: any letter, drawn by a font that has it."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

NO_LETTER = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
"""What no terminal and no XML shows; half of a surrogate pair cannot even be written."""


def printable(text: str) -> str:
    """``text`` with a sign in place of what cannot be shown anywhere."""
    return NO_LETTER.sub("\ufffd", text)


def drawable(text: str) -> tuple[str, list[Path]]:
    """One line that fonts of this machine draw, and these fonts, the usual one first.

    A letter that no font has is written as its number (``U+4E2D``).
    """
    fonts = [_usual()]
    shown = ""
    for letter in " ".join(printable(text).split()):
        font = _font_of(letter)
        if font is not None and font not in fonts:
            fonts.append(font)
        shown += f"U+{ord(letter):04X}" if font is None else letter
    return shown, fonts


def runs(text: str) -> Iterator[tuple[str, Path]]:
    """Parts of a drawable text, in order, each with its font."""
    for font, letters in groupby(drawable(text)[0], lambda letter: _font_of(letter) or _usual()):
        yield "".join(letters), font


@functools.cache
def _usual() -> Path:
    """DejaVu Sans, which matplotlib brings: Latin, Greek, Cyrillic, Arabic, Hebrew, signs."""
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf"


@functools.cache
def _font_of(letter: str) -> Path | None:
    """The first font that has ``letter``; None if none has."""
    usual = _usual()
    if ord(letter) in _letters(usual):
        return usual
    from matplotlib import font_manager

    known = {entry.fname for entry in font_manager.fontManager.ttflist}
    files = sorted(file for file in known if "LastResort" not in file)  # which draws boxes
    return next((Path(file) for file in files if ord(letter) in _letters(Path(file))), None)


@functools.cache
def _letters(font: Path) -> frozenset[int]:
    """The code points that a font of outlines has; none of a font that cannot be read."""
    from matplotlib.ft2font import FT2Font

    try:
        found = FT2Font(str(font))
        return frozenset(found.get_charmap()) if found.scalable else frozenset()
    except (OSError, RuntimeError):
        return frozenset()
