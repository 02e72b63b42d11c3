"""Buckets in ``pulse data``: counts, sheets, and stores written by several ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megatron_pulse.cli.main import main
from megatron_pulse.data.build import open_parts

SHAPES = ["--resolution", "16", "--buckets", "auto", "--bucket-step", "4"]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """20 wide pictures and 10 high ones, with tags."""
    folder, numbers = tmp_path / "photos", np.random.default_rng(0)
    folder.mkdir()
    for i in range(30):
        size = (12, 20, 3) if i < 20 else (20, 12, 3)
        Image.fromarray(numbers.integers(0, 256, size, dtype=np.uint8)).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text("a bird, " + "red " * (i % 3))
    return folder


def test_buckets_are_counted_and_shown(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = f"captions:{photos}"
    assert main(["data", "info", spec, *SHAPES, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [bucket["pixels"] for bucket in report["buckets"]] == [[12, 20], [20, 12]]
    assert sum(bucket["num_training"] for bucket in report["buckets"]) == 27
    assert [bucket["cropped"] for bucket in report["buckets"]] == [0, 0]
    assert (report["median_caption"], report["longest_caption"]) == (3, 4)
    assert main(["data", "check", spec, "--buckets", "16x16,20x12"]) == 0
    told = capsys.readouterr().out
    assert "20 cropped" in told or "10 cropped" in told
    assert "bucket 16x16: " in told and "% of a picture cropped" in told
    assert main(["data", "show", spec, *SHAPES, "-o", str(tmp_path / "s.png"), "--count", "4"]) == 0
    assert "4 pictures of 20x12" in capsys.readouterr().out
    wide, high = (Image.open(tmp_path / f"s-{size}.png") for size in ("20x12", "12x20"))
    assert high.height > wide.height
    for words, fault in (
        ([*SHAPES, "--image-size", "8"], "--image-size excludes --resolution"),
        (["--buckets", "auto"], "--buckets auto: give the resolution"),
        (["--resolution", "16", "--max-buckets", "2"], "is for buckets that are chosen"),
    ):
        assert main(["data", "info", spec, *words]) == 2
        assert fault in capsys.readouterr().err


def test_ranks_write_stores_byte_for_byte(
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["data", "write-latents", "--from", f"folder:{photos}", *SHAPES, "--shard-size", "4"]

    def write(name: str, ranks: int) -> dict[str, bytes]:
        for rank in range(ranks):
            if ranks > 1:
                monkeypatch.setenv("RANK", str(rank))
                monkeypatch.setenv("WORLD_SIZE", str(ranks))
                monkeypatch.setenv("LOCAL_RANK", str(rank))
            assert main([*argv, "-o", str(tmp_path / name)]) == 0
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        return {str(path.relative_to(tmp_path / name)): path.read_bytes() for path in files}

    alone = write("alone", 1)
    assert {"buckets.json", "order.npy", "20x12/meta.json", "12x20/meta.json"} <= alone.keys()
    assert write("together", 3) == alone
    ((_, train, held),) = open_parts(f"latents:{tmp_path / 'alone'}")
    assert (len(train), len(held), train.num_shapes) == (27, 3, 2)
    ((_, pictures, _),) = open_parts(f"folder:{photos}", [(12, 20), (20, 12)])
    for i in range(len(train)):
        assert train.shape_index(i) == pictures.shape_index(i)
        difference = train.image(i) - pictures.image(i)
        assert difference.abs().max() < 1e-3
    Image.new("RGB", (12, 20)).save(photos / "0.png")  # of another shape now
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name)
    assert main([*argv, "-o", str(tmp_path / "alone")]) == 2
    assert "its samples have other shapes" in capsys.readouterr().err
