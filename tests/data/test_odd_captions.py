"""Odd names, texts and links in a folder of captioned pictures: read right, or said."""

from pathlib import Path

import pytest
from PIL import Image

from megatron_pulse.data.captions import CaptionedImages
from megatron_pulse.data.dataset import DataError


def picture(path: Path, shade: int = 0) -> None:
    Image.new("RGB", (8, 8), (shade, 0, 0)).save(path)


@pytest.mark.parametrize(
    ("name", "content", "caption"),
    [
        ("plain", b"a cat", "a cat"),
        ("bom", b"\xef\xbb\xbfa cat", "a cat"),
        ("crlf", b"a cat\r\n", "a cat"),
        ("caf\u00e9", "caf\u00e9".encode(), "caf\u00e9"),
        ("cafe\u0301", "cafe\u0301".encode(), "cafe\u0301"),
        ("\u732b", "\u732b\u304c\u3044\u308b".encode(), "\u732b\u304c\u3044\u308b"),
        ("emoji \U0001f408", "\U0001f408".encode(), "\U0001f408"),
        ("two  blanks", b"  a cat  ", "a cat"),
        ("dots.in.name", b"a cat", "a cat"),
        ("-dash", b"a cat", "a cat"),
        ("quote'\"", b"a cat", "a cat"),
        ("100%", b"100%", "100%"),
        ("#hash", b"a cat", "a cat"),
        ("blank", b" \r\n ", ""),
        ("empty", b"", ""),
        ("utf16", "a cat".encode("utf-16"), None),
        ("latin", b"caf\xe9", None),
        ("zeros", b"a\0cat", None),
    ],
)
def test_texts_are_read_or_refused_by_name(
    tmp_path: Path, name: str, content: bytes, caption: str | None
) -> None:
    picture(tmp_path / "other.png")
    (tmp_path / "other.txt").write_text("other")
    picture(tmp_path / f"{name}.png", 50)
    (tmp_path / f"{name}.txt").write_bytes(content)
    if caption is None:
        with pytest.raises(DataError, match=f"{name}.txt"):
            CaptionedImages(tmp_path, 8)
        return
    data = CaptionedImages(tmp_path, 8)
    found = {Path(data.describe(i)).name: data.caption(i) for i in range(len(data))}
    assert found == {"other.png": "other", f"{name}.png": caption}


def test_a_link_back_to_the_folder_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    picture(folder / "a.png")
    (folder / "a.txt").write_text("a")
    (folder / "self").symlink_to(folder)
    (folder / "above").symlink_to(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    picture(tmp_path / "elsewhere/b.png", 50)
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    data = CaptionedImages(folder, 8)
    assert sorted(Path(data.describe(i)).name for i in range(len(data))) == ["a.png", "b.png"]
    assert any("2 links (above, self)" in told and "itself" in told for told in data.cautions)
