"""A flipped bit of a text file of ours is always seen; what a person wrote is read as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import FileError, read_json, read_yaml, write_with_checksum

TEXTS: dict[str, tuple[str, Callable[..., object]]] = {
    "lines": ('{\n "a": [1, 2.5],\n "b": {"ä": null, "c": " # "}\n}\n', read_json),
    "one line": ('{"a": [1, 2.5], "b": {"ä": null, "c": " # "}}\n', read_json),
    "yaml": ("# Ours\n\na: [1, 2.5]\nb:\n  ä: null  # said\n  c: ' # '\n", read_yaml),
}
SAID = {"a": [1, 2.5], "b": {"ä": None, "c": " # "}}


@pytest.fixture(params=TEXTS)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Callable[..., object]]:
    text, read = TEXTS[request.param]
    write_with_checksum(tmp_path / "file", text)
    return tmp_path / "file", read


def test_every_single_bit(written: tuple[Path, Callable[..., object]]) -> None:
    path, read = written
    content = path.read_bytes()
    assert read(path, FileKind.TIMES) == SAID
    for at in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[at // 8] ^= 1 << at % 8
        path.write_bytes(damaged)
        with pytest.raises(FileError, match=r"^.*file cannot be read as a file of times: "):
            read(path, FileKind.TIMES)


def test_without_its_line_it_is_read_as_it_is(written: tuple[Path, Callable[..., object]]) -> None:
    path, read = written
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines).replace("2.5", "3.5"))
    with pytest.raises(FileError, match="damaged, or was edited.*remove its line 'xxh3_128'"):
        read(path, FileKind.TIMES)
    path.write_text("".join(line for line in lines if "xxh3_128" not in line))
    assert read(path, FileKind.TIMES) == SAID
