"""Any letter in pictures and pages."""

from __future__ import annotations

import warnings
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron_pulse.fonts import drawable, printable, runs
from megatron_pulse.planner.draw.canvas import Canvas

TEXTS = [
    "a cat",
    "两只鸟",
    "🙂 smile",
    "مرحبا بالعالم",
    "שלום",
    "é½€",
    "$x^ _{}",
    "<b>&amp;",
    "a\nb\tc",
]


@pytest.mark.parametrize("text", [*TEXTS, "bell \x07", "half \ud800", "", " "])
def test_every_letter_has_a_font_or_a_number(text: str) -> None:
    shown, fonts = drawable(text)
    assert all(font.is_file() and "LastResort" not in font.name for font in fonts)
    assert "".join(part for part, _ in runs(text)) == shown
    shown.encode()
    from matplotlib.ft2font import FT2Font

    for part, font in runs(text):
        letters = FT2Font(str(font)).get_charmap()
        assert all(ord(letter) in letters for letter in part)


def test_what_all_fonts_have_is_written_as_it_is() -> None:
    assert drawable("é  Ω\n½")[0] == "é Ω ½"
    assert printable("a\x00\ud800") == "a\ufffd\ufffd" and printable("两🙂\n") == "两🙂\n"


def test_pictures_are_xml_whatever_is_written(tmp_path: Path) -> None:
    canvas = Canvas(10, 10)
    for text in (*TEXTS, "\x07\x00\ud800\uffff"):
        canvas.text(0, 0, text)
        canvas.hint(canvas.add("rect", x=0), text)
    written = [e.text for e in ElementTree.fromstring(str(canvas)) if e.tag.endswith("text")]
    assert written[: len(TEXTS)] == TEXTS and written[-1] == "\ufffd" * 4


def test_captions_and_headings_are_drawn_without_a_warning(tmp_path: Path) -> None:
    import torch
    from PIL import Image
    from torch.utils.tensorboard import SummaryWriter

    from megatron_pulse.diffusion.grid import save_grid
    from megatron_pulse.integration.loss_curve import draw_loss_curve

    with SummaryWriter(str(tmp_path / "events")) as events:
        events.add_scalar("loss", 0.5, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grid = save_grid(torch.zeros(len(TEXTS), 3, 8, 8), tmp_path / "g.png", 3, TEXTS, scale=8)
        draw_loss_curve(tmp_path / "events", tmp_path / "l.png", title=" ".join(TEXTS))
        draw_loss_curve(tmp_path / "events", tmp_path / "m.png", title="Loss")
    assert Image.open(grid).convert("L").getextrema()[0] < 100  # something is written
    # The only point of a run is there to see: blue, in the middle.
    width, height = (curve := Image.open(tmp_path / "m.png").convert("RGB")).size
    middle = curve.crop((width // 4, height // 4, 3 * width // 4, 3 * height // 4))
    colours = {c for _, c in middle.getcolors(1 << 20) or []}
    assert any(b > 150 and r < 80 for r, g, b in colours)
