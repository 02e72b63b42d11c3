"""Picture files: upright, of 8 or 16 bits; what is left aside is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from megatron_pulse.cli.main import main
from megatron_pulse.data.dataset import DataError
from megatron_pulse.data.images.folder import ImageFolder

RAMP = np.linspace(0, 255, 24, dtype=np.uint8)[None].repeat(16, 0)
"""16 high, 24 wide, brighter to the right."""


def alone(folder: Path, name: str, image: Image.Image, **how: object) -> ImageFolder:
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    image.save(folder / name, **how)
    return ImageFolder(folder, 16, channels=1)


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_seen_as_the_camera_was_held(tmp_path, suffix, orientation):
    """A file that says how it is to be turned is the picture that viewers show."""
    turned = {2: 2, 3: 3, 4: 4, 5: 5, 6: 8, 7: 7, 8: 6}  # what undoes each
    upright = Image.fromarray(RAMP)
    notes = Image.Exif()
    notes[ExifTags.Base.Orientation] = turned.get(orientation, 1)
    asleep = Image.Exif()
    asleep[ExifTags.Base.Orientation] = orientation
    with_notes = upright.copy()
    with_notes.info["exif"] = notes.tobytes()
    from PIL import ImageOps

    stored = ImageOps.exif_transpose(with_notes)
    how = {"exif": asleep.tobytes(), "quality": 100}
    data = alone(tmp_path / "a", f"a.{suffix}", stored, **how)
    plain = alone(tmp_path / "b", f"b.{suffix}", upright, quality=100)
    assert (data.image(0) - plain.image(0)).abs().max() < 0.03
    assert data.framing(0) == plain.framing(0) and data.framing(0).original == (16, 24)


def test_grey_of_16_bits_is_not_cut_off_at_white(tmp_path):
    wide = RAMP.astype(np.uint16) * 257
    data = alone(tmp_path / "a", "a.png", Image.fromarray(wide))
    assert Image.open(tmp_path / "a/a.png").mode == "I;16"
    assert torch.equal(
        data.image(0), alone(tmp_path / "b", "b.png", Image.fromarray(RAMP)).image(0)
    )


def test_damaged_notes_leave_a_sound_picture_as_it_is(tmp_path):
    data = alone(tmp_path / "a", "a.jpg", Image.fromarray(RAMP), exif=b"Exif\0\0II*\0\xff\xff\xff")
    assert data.image(0).shape == (1, 16, 16)


def test_what_is_left_aside_is_told(tmp_path, capsys):
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(4):
        Image.fromarray(RAMP).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text("a ramp")
    assert main(["data", "info", f"folder:{folder}", "--image-size", "8"]) == 0
    assert not capsys.readouterr().err
    for name in ("p.txt", "q.txt", "r.txt", "s.txt"):
        (folder / name).write_text("of a picture that is gone")
    Image.fromarray(RAMP).save(folder / "old.bmp")
    (folder / "old.txt").write_text("in a format that is not read")
    for kind in ("folder", "captions"):
        assert main(["data", "info", f"{kind}:{folder}", "--image-size", "8"]) == 0
        told = capsys.readouterr()
        assert "warning: " in told.err and "4 for" not in told.out
        assert "5 texts (old.txt, p.txt, q.txt, ...) without a picture of that name" in told.err
        assert "1 picture (old.bmp) in formats that are not read" in told.err


def test_a_link_to_nothing_is_named(tmp_path):
    """Also where no more than its size is asked for; a folder is no picture."""
    (tmp_path / "class" / "x.png").mkdir(parents=True)
    Image.fromarray(RAMP).save(tmp_path / "class" / "a.png")
    assert len(ImageFolder(tmp_path, 8, channels=1)) == 1
    (tmp_path / "class" / "b.png").symlink_to("nothing.png")
    with pytest.raises(DataError, match=r"b\.png: .*No such file"):
        ImageFolder(tmp_path, 8, channels=1).revision(1)
