"""The emoji of a font as captioned images."""

import json

import numpy as np
import pytest
from PIL import Image

from megatron_pulse.data.captions import CaptionedImages
from megatron_pulse.data.dataset import DataError
from megatron_pulse.data.images.emoji import FONT, PACKAGE, render_emoji

needs_font = pytest.mark.skipif(not FONT.is_file(), reason=f"needs {FONT}: install {PACKAGE}")


@needs_font
def test_all_emoji(tmp_path):
    count = render_emoji(tmp_path / "emoji", progress=False)
    lines = (tmp_path / "emoji" / "metadata.jsonl").read_text().splitlines()
    texts = {record["file_name"]: record["text"] for record in map(json.loads, lines)}
    assert count == len(texts) > 1200 and [p.name for p in tmp_path.iterdir()] == ["emoji"]
    assert texts["1f600.png"] == "grinning face" and texts["02764.png"] == "heavy black heart"
    assert "00031.png" not in texts, "digits are parts of keycaps"
    data = CaptionedImages(tmp_path / "emoji", 32, verify=True)
    face = np.asarray(Image.open(tmp_path / "emoji" / "1f600.png"), dtype=float)
    assert face.shape == (32, 32, 3) and (face[0, 0] == 255).all()
    assert face[6, 16, 0] > 200 and face[6, 16, 2] < 140, "yellow"
    shown = [(data.image(i) < 0.95).any() for i in range(len(data))]
    assert all(shown), "no picture is blank"


@needs_font
def test_size_and_limit(tmp_path):
    (tmp_path / "emoji").mkdir()
    assert render_emoji(tmp_path / "emoji", 16, limit=5, progress=False) == 5
    data = CaptionedImages(tmp_path / "emoji", 16)
    assert data.captions[:2] == ["copyright sign", "registered sign"]
    assert Image.open(data.files[0]).size == (16, 16)


@needs_font
def test_all_or_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(Image.Image, "save", lambda *a, **k: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        render_emoji(tmp_path / "emoji", limit=5, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_rendered(tmp_path):
    with pytest.raises(DataError, match=f"apt-get install {PACKAGE}"):
        render_emoji(tmp_path / "emoji", font=tmp_path / "no.ttf")
    (tmp_path / "broken.ttf").write_text("no font")
    with pytest.raises(DataError, match="no bitmaps of 109 pixels"):
        render_emoji(tmp_path / "emoji", font=tmp_path / "broken.ttf")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine").touch()
    with pytest.raises(DataError, match="not empty"):
        render_emoji(tmp_path / "used")
    assert {p.name for p in tmp_path.iterdir()} == {"broken.ttf", "used"}
