"""Glyphs for user texts in pictures: any letter, drawn by a font that has it."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
"""Characters that no terminal and no XML shows; unpaired surrogates cannot even be written."""


def printable(text: str) -> str:
    """Replace unprintable characters of ``text``."""
    return UNPRINTABLE.sub("\ufffd", text)


def drawable(text: str) -> tuple[str, list[Path]]:
    """Text on one line that installed fonts can draw, and these fonts, the default first.

    A letter that no font has becomes its code point (``U+4E2D``).
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
    """Split a drawable text into parts of one font each, in order."""
    for font, letters in groupby(drawable(text)[0], lambda letter: _font_of(letter) or _usual()):
        yield "".join(letters), font


@functools.cache
def _usual() -> Path:
    """DejaVu Sans, bundled with matplotlib: Latin, Greek, Cyrillic, Arabic, Hebrew, symbols."""
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf"


@functools.cache
def _font_of(letter: str) -> Path | None:
    """First font that has ``letter``; None without one."""
    usual = _usual()
    if ord(letter) in _letters(usual):
        return usual
    from matplotlib import font_manager

    known = {entry.fname for entry in font_manager.fontManager.ttflist}
    files = sorted(file for file in known if "LastResort" not in file)  # LastResort draws boxes
    return next((Path(file) for file in files if ord(letter) in _letters(Path(file))), None)


@functools.cache
def _letters(font: Path) -> frozenset[int]:
    """Code points of an outline font; empty if unreadable."""
    from matplotlib.ft2font import FT2Font

    try:
        found = FT2Font(str(font))
        return frozenset(found.get_charmap()) if found.scalable else frozenset()
    except (OSError, RuntimeError):
        return frozenset()
