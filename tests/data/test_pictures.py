"""Picture files: upright, of 8 or 16 bits; what is left aside is told."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageCms, ImageOps

from megatron_pulse.cli.main import main
from megatron_pulse.data.dataset import CorruptSample, DataError, FieldSpec
from megatron_pulse.data.images.conditioning import control_picture
from megatron_pulse.data.images.folder import ImageFolder
from megatron_pulse.data.images.opening import MAX_BYTES, SUFFIXES, opened
from megatron_pulse.data.images.pictures import decoded, upright_size

RAMP = np.linspace(0, 255, 24, dtype=np.uint8)[None].repeat(16, 0)
"""16 high, 24 wide, brighter to the right."""


def alone(folder: Path, name: str, image: Image.Image, **how: object) -> ImageFolder:
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    image.save(folder / name, **how)
    return ImageFolder(folder, 16, channels=1)


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "tif"])
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
    stored = ImageOps.exif_transpose(with_notes)
    how = {"exif": asleep if suffix == "tif" else asleep.tobytes(), "quality": 100}
    data = alone(tmp_path / "a", f"a.{suffix}", stored, **how)
    plain = alone(tmp_path / "b", f"b.{suffix}", upright, quality=100)
    assert (data.image(0) - plain.image(0)).abs().max() < 0.03
    assert data.framing(0) == plain.framing(0) and data.framing(0).original == (16, 24)


def opened_by_pillow(path: Path) -> np.ndarray:
    """Picture decoded by Pillow's own functions: upright, and in sRGB."""
    with Image.open(path) as file:
        image = ImageOps.exif_transpose(file)
    if profile := file.info.get("icc_profile"):
        image = ImageCms.profileToProfile(
            image, io.BytesIO(profile), ImageCms.createProfile("sRGB"), outputMode="RGB"
        )
    return np.asarray(image.convert("RGB"))


def ours(path: Path) -> np.ndarray:
    with opened(path) as file:
        size, image = upright_size(file), decoded(file, 3)
    assert image.size == size
    return np.asarray(image)


def test_notes_count_wherever_a_png_has_them(tmp_path):
    """EXIF before and behind the pixels, as text of ImageMagick's, and XMP."""
    notes = Image.Exif()
    notes[ExifTags.Base.Orientation] = 6
    exif, plain = notes.tobytes()[6:], png(24, 16, pixels=RAMP)
    head, end = plain[:33], plain[-12:]
    raw = f"\nexif\n{len(exif):8d}\n{(b'Exif' + bytes(2) + exif).hex()}\n".encode()
    xmp = b'XML:com.adobe.xmp\0\0\0\0\0<x tiff:Orientation="6"/>'
    kinds = {
        "eXIf": exif,
        "tEXt": b"Raw profile type exif\0" + raw,
        "zTXt": b"Raw profile type exif\0\0" + zlib.compress(raw),
        "iTXt": xmp,
    }
    for kind, content in kinds.items():
        note = chunk(kind.encode(), content)
        for where, whole in (
            ("before", head + note + plain[33:]),
            ("behind", plain[:-12] + note + end),
        ):
            path = tmp_path / f"{kind}-{where}.png"
            path.write_bytes(whole)
            found = ours(path)
            assert found.shape == (24, 16, 3), path.name
            assert np.array_equal(found, opened_by_pillow(path)), path.name


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "tif"])
def test_colours_are_converted_to_srgb_as_pillow_does(tmp_path, suffix):
    """From a profile whose red and blue have changed places."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    for tag, other in ((b"rXYZ", b"bXYX"), (b"bXYZ", b"rXYZ"), (b"bXYX", b"bXYZ")):
        at = profile.index(tag, 128)
        profile[at : at + 4] = other
    colour = np.stack([RAMP, RAMP.T[:16, :16].repeat(2, 1)[:, :24], 255 - RAMP], -1)
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(colour).save(path, icc_profile=bytes(profile), quality=100)
    found = ours(path)
    assert np.array_equal(found, opened_by_pillow(path))
    with Image.open(path) as file:
        assert np.abs(found.astype(int) - np.asarray(file.convert("RGB"))).max() > 50
    Image.fromarray(colour).save(path, icc_profile=b"damaged", quality=100)
    with Image.open(path) as file:
        assert np.array_equal(ours(path), np.asarray(file.convert("RGB")))


def test_modes_of_pictures_are_pillows(tmp_path):
    """CMYK, grey with transparency and a profile of grey, palettes, Lab, and what has 32 bits."""
    colour = Image.fromarray(RAMP).convert("RGB")
    for name, image in {
        "a.tif": colour.convert("CMYK"),
        "b.jpg": colour.convert("CMYK"),
        "c.png": colour.convert("LA"),
        "d.gif": colour.quantize(16),
        "e.bmp": colour,
        "f.tif": Image.fromarray(RAMP.astype(np.uint16) * 257),
        "g.png": colour.quantize(16),
        "h.jfif": colour,
    }.items():
        how = {"transparency": 3} if name in ("d.gif", "g.png") else {}
        how |= {"format": "JPEG"} if name == "h.jfif" else {}
        image.save(tmp_path / name, **how)
        expected = opened_by_pillow(tmp_path / name)
        if name == "f.tif":
            expected = np.asarray(colour)
        assert np.array_equal(ours(tmp_path / name), expected), name
    lab = ImageCms.profileToProfile(
        colour, ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), outputMode="LAB"
    )
    lab.save(tmp_path / "i.tif")
    assert np.abs(ours(tmp_path / "i.tif").astype(int) - np.asarray(colour)).max() < 8
    for kind in (np.float32, np.int32):
        Image.fromarray(RAMP.astype(kind)).save(tmp_path / "j.tif")
        with pytest.raises(ValueError, match="its samples have 32 bits"):
            ours(tmp_path / "j.tif")


def grey_tiff(
    path: Path, bits: int, white_is_zero: bool, rows: list[list[int]], order: str = "<"
) -> None:
    """TIFF file of one uncompressed strip of grey samples with this byte order."""
    values = [value for row in rows for value in row]
    packed = "".join(f"{value:0{bits}b}" for value in values)
    data = int(packed, 2).to_bytes(len(packed) // 8, "big")
    if bits == 16:
        data = struct.pack(f"{order}{len(values)}H", *values)
    tags = {
        256: len(rows[0]), 257: len(rows), 258: bits, 259: 1, 262: 0 if white_is_zero else 1,
        273: 8, 277: 1, 278: len(rows), 279: len(data),
    }  # fmt: skip
    form = f"{order}HHIHH"
    entries = b"".join(struct.pack(form, tag, 3, 1, value, 0) for tag, value in tags.items())
    data += bytes(len(data) % 2)
    head = struct.pack(f"{order}2sHI", b"II" if order == "<" else b"MM", 42, 8 + len(data))
    path.write_bytes(head + data + struct.pack(f"{order}H", len(tags)) + entries + bytes(4))


@pytest.mark.parametrize(
    ("bits", "white_is_zero"), [(8, False), (8, True), (12, False), (16, False), (16, True)]
)
def test_grey_of_tiffs_is_as_wide_and_as_bright_as_they_say(tmp_path, bits, white_is_zero):
    levels = [[0, 64, 128, 254], [16, 32, 200, 100]]
    path = tmp_path / "grey.tif"
    grey_tiff(path, bits, white_is_zero, [[v << bits - 8 for v in row] for row in levels])
    with opened(path) as file:
        found = np.asarray(decoded(file, 1))
    assert found.tolist() == [[255 - v if white_is_zero else v for v in row] for row in levels]


@pytest.mark.parametrize(
    ("kind", "why"),
    [("white", "TIFF"), ("big-endian", "TIFF"), ("12-bit", "JPEG"), ("64-bit", "BMP")],
)
def test_kinds_that_pillow_does_not_decode_are_not_called_damaged(tmp_path, kind, why):
    path, rows = tmp_path / "a.tif", [[0, 64], [16, 32]]
    if why == "TIFF":
        grey_tiff(path, 12, kind == "white", rows, ">" if kind == "big-endian" else "<")
    else:
        Image.fromarray(RAMP).save(path, format=why)
        content = bytearray(path.read_bytes())
        place = 28 if why == "BMP" else content.index(b"\xff\xc0") + 4
        content[place] = 64 if why == "BMP" else 12
        path.write_bytes(content)
    said = refused(tmp_path, path.name)
    assert said.startswith(f"it is a {why} file of a kind that Pillow cannot read (")
    assert said.endswith("). Write it again with 8 bits per sample") and "damaged" not in said


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
        Image.fromarray(RAMP + np.uint8(i)).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text("a ramp")
    assert main(["data", "info", f"folder:{folder}", "--image-size", "8"]) == 0
    assert not capsys.readouterr().err
    for name in ("p.txt", "q.txt", "r.txt", "s.txt"):
        (folder / name).write_text("of a picture that is gone")
    for name in ("dataset_info.json", "dataset_infos.json", "state.json"):
        (folder / name).write_text("{}")
    (folder / "old.avif").write_text("a picture")
    (folder / "deep" / ".thumbs").mkdir(parents=True)
    (folder / "deep" / "link").symlink_to(tmp_path)
    for name in ("._0.png", "video.mp4", "README.md", "deep/.thumbs/1.png", "captions.csv"):
        (folder / name).write_text("of another kind")
    (folder / "old.txt").write_text("in a format that is not read")
    for kind in ("folder", "captions"):
        assert main(["data", "info", f"{kind}:{folder}", "--image-size", "8"]) == 0
        told = capsys.readouterr()
        assert "warning: " in told.err and "4 for" not in told.out
        assert "5 texts (old.txt, p.txt, q.txt, ...) without a picture of that name" in told.err
        assert "1 picture (old.avif) in unsupported formats" in told.err
        assert "2 hidden files (._0.png, deep/.thumbs/1.png) with picture names" in told.err
        assert "1 link (deep/link) to folders below class folders, or" in told.err
        assert "1 file (video.mp4) without a picture's suffix" in told.err
        assert "1 table (captions.csv): ignored; captions are read from" in told.err
        assert "README" not in told.err


def test_a_link_to_nothing_is_named(tmp_path):
    """Also where no more than its size is asked for; a folder is no picture."""
    (tmp_path / "class" / "x.png").mkdir(parents=True)
    Image.fromarray(RAMP).save(tmp_path / "class" / "a.png")
    assert len(ImageFolder(tmp_path, 8, channels=1)) == 1
    (tmp_path / "class" / "b.png").symlink_to("nothing.png")
    with pytest.raises(DataError, match=r"b\.png: .*No such file"):
        ImageFolder(tmp_path, 8, channels=1).identity(1)


READ = "supported are PNG, JPEG, WEBP, GIF, BMP and TIFF"


def refused(folder: Path, name: str = "a.png") -> str:
    """Fault of the file, the same in training and as a control image; nothing warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CorruptSample) as error:
            ImageFolder(folder, 8).image(0)
        with pytest.raises(CorruptSample):
            ImageFolder(folder, 8).framing(0)
        with pytest.raises(DataError) as again:
            control_picture(folder / name, FieldSpec((3, 8, 8)))
    (fault,) = error.value.faults
    where, _, said = fault.partition(": ")
    assert where == str(folder / name) and again.value.faults == [said]
    return said


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "PostScript"),
        (b'<?xml version="1.0"?><svg width="9" height="9"/>', "SVG or other XML"),
        (b"<!DOCTYPE html><html>404</html>", "HTML"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIF"),
        (b"root:x:0:0:root:/root:/bin/bash", ""),
        (b"", ""),
        (b"\0\0\0\x1cftypavif\0\0\0\0avifmif1", "AVIF"),
        (b"\xff\x0a\xfa\x7f\x01", "JPEG XL"),
        ("PPM", ""),
        ("TGA", ""),
    ],
)
def test_what_a_file_holds_counts_and_not_its_name(tmp_path, content, what):
    """Pillow would read these by other readers, of which EPS's starts Ghostscript."""
    if isinstance(content, bytes):
        (tmp_path / "a.png").write_bytes(content)
    else:
        Image.fromarray(RAMP).save(tmp_path / "a.png", format=content)
    said = refused(tmp_path)
    assert READ in said
    assert said.startswith(f"it holds {what} despite" if what else ("not an image", "it is empty"))


def test_files_of_the_formats_that_are_read_may_have_each_others_names(tmp_path):
    names = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
    for name in names:
        for suffix in SUFFIXES:
            path = tmp_path / f"{name}{suffix}"
            Image.fromarray(RAMP).save(path, format=name)
    assert len(ImageFolder(tmp_path, 16, verify=True)) == len(names) * len(SUFFIXES)


def chunk(name: bytes, content: bytes) -> bytes:
    crc = struct.pack(">I", zlib.crc32(name + content))
    return struct.pack(">I", len(content)) + name + content + crc


def png(width: int, height: int, *chunks: bytes, pixels: np.ndarray | None = None) -> bytes:
    """PNG file with 8 bits per sample whose header declares this size, with extra chunks before the
    given (or black) pixels.
    """
    colour = 2 if pixels is None else 0
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0))
    rows = bytes(16 * 49)
    if pixels is not None:
        rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    data = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + data + chunk(b"IEND", b"")


def webp(head: bytes) -> bytes:
    return b"RIFF" + struct.pack("<I", 4 + len(head)) + b"WEBP" + head


@pytest.mark.parametrize(
    ("name", "content", "size"),
    [
        ("a.png", png(13370, 13370), "13370x13370 pixels, 178,756,900;"),
        ("a.png", png(89_478_486, 1), "89478486x1 pixels, 89,478,486;"),
        ("a.png", png(100_000, 100_000), "100000x100000 pixels, 10,000,000,000;"),
        ("a.webp", webp(b"VP8X\n\0\0\0" + bytes(4) + b"\xfe\x3f\0" * 2), "16383x16383 pixels"),
        ("a.webp", webp(b"VP8L\5\0\0\0\x2f" + b"\xfe\xbf\xff\x0f"), "16383x16383 pixels"),
        ("a.webp", webp(b"VP8 \n\0\0\0\0\0\0\x9d\1\x2a" + b"\xff\x3f" * 2), "16383x16383 pix"),
    ],
    ids=["png", "thin", "huge", "webp", "lossless", "lossy"],
)
def test_large_pictures_are_refused_by_their_heads(tmp_path, name, content, size):
    (tmp_path / name).write_bytes(content)
    said = refused(tmp_path, name)
    assert said.startswith(f"it has {size}")
    assert said.endswith("at most 89,478,485 are read. Scale it down")


def test_large_files_are_refused_before_they_are_read(tmp_path):
    (tmp_path / "a.webp").write_bytes(webp(b"VP8X\n\0\0\0" + bytes(10)))
    os.truncate(tmp_path / "a.webp", MAX_BYTES + 1)
    assert refused(tmp_path, "a.webp").startswith("it has 715,827,881 bytes; at")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("PNG", png(0, 9)),
        ("PNG", png(9, 9)[:8]),
        ("PNG", png(16, 16, chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(1 << 22))))),
        ("JPEG", b"\xff\xd8\xff"),
        ("WEBP", webp(b"")),
    ],
)
def test_damaged_heads_are_told_as_such(tmp_path, name, content):
    (tmp_path / "a.png").write_bytes(content)
    assert refused(tmp_path).startswith(f"it is a damaged {name} file: ")


def test_odd_pictures_are_read_and_nothing_warns(tmp_path):
    """CMYK, one pixel, a palette with transparency, animations (their first picture), and notes
    in which everything is wrong; a process of its own, whose warnings are seen."""
    colour = Image.fromarray(RAMP).convert("RGB")
    colour.convert("CMYK").save(tmp_path / "cmyk.jpg", quality=100)
    Image.new("RGB", (1, 1), "red").save(tmp_path / "one.png")
    colour.quantize(16).save(tmp_path / "palette.png", transparency=bytes(range(16)))
    others = [Image.new("RGB", colour.size)] * 20
    for name in ("moving.webp", "moving.png"):
        colour.save(tmp_path / name, save_all=True, append_images=others, lossless=True)
    entries = [struct.pack("<HHII", 0x9000 + i, 2, 0xFFFFFFFF, 8) for i in range(500)]
    notes = b"II*\0\x08\0\0\0" + struct.pack("<H", 500) + b"".join(entries) + bytes(4)
    colour.save(tmp_path / "notes.jpg", exif=b"Exif\0\0" + notes, quality=100)
    argv = ["data", "info", f"folder:{tmp_path}", "--image-size", "16", "--verify"]
    code = f"from megatron_pulse.cli.main import main; exit(main({argv}))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    data = ImageFolder(tmp_path, 16)
    by_name = {path.name: data.image(i) for i, path in enumerate(data.files)}
    assert (by_name["one.png"] == torch.tensor([1.0, -1, -1])[:, None, None]).all()
    for name in ("cmyk.jpg", "palette.png", "moving.png", "notes.jpg"):
        assert (by_name[name] - by_name["moving.webp"]).abs().max() < 0.1, name
