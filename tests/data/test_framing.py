"""Sizes and crops that SDXL and Hunyuan-DiT are told are those of each image."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from megatron_pulse.cli.main import main
from megatron_pulse.data.build import open_dataset
from megatron_pulse.data.dataset import DiffusionDataset, FieldSpec
from megatron_pulse.data.fields import WantedFields

SIZE = 16
FILES = {"a.png": (64, 32), "b.png": (20, 60), "c.png": (16, 16), "d.png": (33, 40)}
"""(width, height) of each file."""
SIZES = {name: FieldSpec((6,), "float32") for name in ("time_ids", "image_meta_size")}
FIELDS = {**SIZES, "resolution": FieldSpec((2,), "float32")}
CAPTIONS = {"context": FieldSpec((4, 8)), **FIELDS}


def expected(width: int, height: int) -> list[int]:
    """SDXL's: size of the file, corner of the central square after scaling, size of the picture."""
    side = min(width, height)
    left = (width - side) // 2
    top = (height - side) // 2
    return [height, width, round(top * SIZE / side), round(left * SIZE / side), SIZE, SIZE]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    lines = []
    for name, (width, height) in FILES.items():
        columns = np.linspace(0, 255, width, dtype=np.uint8)[None].repeat(height, 0)
        Image.fromarray(columns[..., None].repeat(3, 2)).save(root / name)
        lines.append(json.dumps({"file_name": name, "text": name}))
    (root / "metadata.jsonl").write_text("\n".join(lines))
    return root


def check(dataset: DiffusionDataset) -> None:
    """Every sample is told its own; images are recognized by the number of their sizes."""
    found = []
    for i in range(len(dataset)):
        given = dataset.conditioning(i)
        ids = given["time_ids"].tolist()
        found.append(ids)
        assert given["image_meta_size"].tolist() == [*ids[:2], *ids[4:], *ids[2:4]]
        assert given["resolution"].tolist() == [SIZE, SIZE]
    assert sorted(found) == sorted(expected(*size) for size in FILES.values())


@pytest.mark.parametrize("kind", ["folder", "captions"])
def test_images_of_a_folder_and_their_latents(images: Path, tmp_path: Path, kind: str) -> None:
    fields = CAPTIONS if kind == "captions" else FIELDS
    wanted = WantedFields((3, SIZE, SIZE), fields)
    dataset, _ = open_dataset(f"{kind}:{images}", wanted=wanted, validation_fraction=0.0)
    check(dataset)
    argv = ["data", "write-latents", "--from", f"{kind}:{images}", "--image-size", str(SIZE)]
    argv += ["--text-states", "4x8"] if kind == "captions" else []
    assert main([*argv, "-o", str(tmp_path / "latents")]) == 0
    latents, _ = open_dataset(
        f"latents:{tmp_path / 'latents'}", wanted=wanted, validation_fraction=0.0
    )
    check(latents)


def test_what_has_no_files_is_its_own_size() -> None:
    wanted = WantedFields((1, SIZE, SIZE), SIZES)
    dataset, _ = open_dataset("digits8", wanted=wanted)
    assert dataset.conditioning(3)["time_ids"].tolist() == [SIZE, SIZE, 0, 0, SIZE, SIZE]
    assert torch.equal(dataset.conditioning(3)["time_ids"], dataset.conditioning(4)["time_ids"])
