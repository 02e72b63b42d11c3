"""Validation data has nothing in common with training data."""

from __future__ import annotations

import json
import shutil
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from megatron_pulse.cli.main import main
from megatron_pulse.data import split_groups
from megatron_pulse.data.buckets import BucketSampler
from megatron_pulse.data.build import open_buckets, open_dataset
from megatron_pulse.data.dataset import DataError, DiffusionDataset, split_indices
from megatron_pulse.data.fields import WantedFields
from megatron_pulse.data.latents.layout import LatentLayout, LatentType
from megatron_pulse.data.latents.writer import LatentWriter
from megatron_pulse.data.split_groups import same_files, units_of
from tests.reference import unsealed_record


def test_units_join_what_shares_a_tie_with_another() -> None:
    ties = [("a",), ("b", "x"), ("c",), ("a", "y"), ("d", "y"), ("x",), ()]
    assert units_of(ties) == [0, 1, 2, 0, 0, 1, 3]


def test_units_are_held_back_whole() -> None:
    units = [i // 5 for i in range(100)]
    train, held_out = split_indices(100, 0.1, units)
    assert len(held_out) == 10 and not {units[i] for i in train} & {units[i] for i in held_out}
    alone = split_indices(100, 0.1, list(range(100)))
    assert [part.tolist() for part in alone] == [part.tolist() for part in split_indices(100, 0.1)]
    large = [0] * 60 + [1] * 40
    assert [len(part) for part in split_indices(100, 0.1, large)] == [60, 40]
    assert len(split_indices(100, 0.0, units)[1]) == 0


def test_files_of_equal_bytes_are_found(tmp_path: Path) -> None:
    """Also where they differ in the middle alone, of one size."""
    content = bytes(20_000)
    for name, byte in (("a", 0), ("b", 1), ("c", 0), ("d", 0)):
        (tmp_path / name).write_bytes(content + bytes([byte]) + content)
    (tmp_path / "e").write_bytes(b"another size")
    a, b, c, d, e, gone = same_files([tmp_path / name for name in "abcdef"])
    assert a == c == d and len({a, b, e, gone}) == 4


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """20 pictures: 10 with three captions each, and 10 in five groups; a copy of one is listed."""
    folder = tmp_path / "photos"
    folder.mkdir()
    rows = []
    for i in range(20):
        pixels = np.full((16, 16, 3), 10 * i, np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
        said = {"file_name": f"{i}.png", "text": f"caption of {i}"}
        rows += [said | {"text": f"{j}. {i}"} for j in range(3)] if i < 10 else []
        rows += [said | {"group": i % 5}] if i >= 10 else []
    (folder / "copy.png").write_bytes((folder / "3.png").read_bytes())
    rows.append({"file_name": "copy.png", "text": "a copy"})
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def kinds(data: DiffusionDataset) -> set[object]:
    """Properties that stay on one side: brightness of each picture, by groups from 10 on."""
    seen = {round((float(data.image(i).mean()) + 1) * 12.75) for i in range(len(data))}
    return {value if value < 10 else f"group {value % 5}" for value in seen}


def test_pictures_and_groups_are_on_one_side(photos: Path, tmp_path: Path) -> None:
    """Samples of caption lists, and of latents written from them."""
    out = tmp_path / "latents"
    argv = ["data", "write-latents", "--from", f"captions:{photos}", "--image-size", "8"]
    assert main([*argv, "--text-states", "2x4", "-o", str(out)]) == 0
    for spec in (f"captions:{photos}", f"folder:{photos}", f"latents:{out}"):
        for fraction in (0.1, 0.3, 0.5):
            train, held_out = open_dataset(spec, 8, validation_fraction=fraction)
            assert len(train) + len(held_out) == 41
            assert abs(len(held_out) - 41 * fraction) < 4
            assert kinds(train) and kinds(held_out) and not kinds(train) & kinds(held_out)


def test_a_picture_in_stores_of_two_sizes_is_on_one_side(photos: Path, tmp_path: Path) -> None:
    wanted, names = [], []
    for size in (8, 4):
        names.append(f"latents:{tmp_path / str(size)}")
        argv = ["data", "write-latents", "--from", f"folder:{photos}", "--image-size", str(size)]
        assert main([*argv, "-o", names[-1].partition(":")[2]]) == 0
        wanted.append(WantedFields((3, size, size)))
    train, held_out, shapes = open_buckets(",".join(names), wanted)
    assert shapes == (0, 1) and [len(part) for part in held_out.parts] == [4, 4]
    assert not kinds(train) & kinds(held_out)


def test_copies_in_classes_are_on_one_side(photos: Path) -> None:
    (photos / "metadata.jsonl").unlink()
    for i in range(21):
        name = "copy.png" if i == 20 else f"{i}.png"
        place = photos / ("a" if i % 2 else "b") / name
        place.parent.mkdir(exist_ok=True)
        (photos / name).rename(place)
    for fraction in np.linspace(0.05, 0.6, 12):
        parts = open_dataset(f"folder:{photos}", 8, validation_fraction=fraction)
        names = [{Path(p.describe(i)).name for i in range(len(p))} for p in parts]
        assert all(len({"3.png", "copy.png"} & side) != 1 for side in names)


def test_copies_in_another_folder_are_on_one_side(photos: Path, tmp_path: Path) -> None:
    """Two folders are named at once; file names give no hint."""
    other = tmp_path / "copies"
    other.mkdir()
    for i in range(20):
        (other / f"copy_{19 - i}.png").write_bytes((photos / f"{i}.png").read_bytes())
        (other / f"copy_{i}.txt").write_text("a copy")
    for kind in ("folder", "captions"):
        wanted = [WantedFields((3, 16, 16))]
        spec = f"{kind}:{photos},{kind}:{other}"
        train, held_out, _ = open_buckets(spec, wanted)
        sides = [
            {Path(part.describe(i)).read_bytes() for part in half.parts for i in range(len(part))}
            for half in (train, held_out)
        ]
        assert sides[1] and not sides[0] & sides[1]


def test_units_keep_the_sides_that_others_decided() -> None:
    """Also where one side then has none, and where all samples are of one unit."""
    sides = {0: True, 1: False, 2: False}
    for units, held_back in (([0, 0, 0], 3), ([1, 2, 1, 1], 0), ([1, 1], 0), ([0, 1, 2], 1)):
        train, held_out = split_indices(len(units), 0.1, units, sides)
        assert len(held_out) == held_back and all(sides[units[i]] for i in held_out)
        assert not any(sides[units[i]] for i in train)
    assert [len(part) for part in split_indices(4, 0.1, [9] * 4, sides)] == [3, 1]
    assert sides == {0: True, 1: False, 2: False, 9: False}


@pytest.mark.parametrize("side", ["trained on", "held back"])
def test_a_folder_of_copies_keeps_their_sides(photos: Path, tmp_path: Path, side: str) -> None:
    for name in ("metadata.jsonl", "copy.png"):
        (photos / name).unlink()
    halves = open_dataset(f"folder:{photos}", 16)
    copied = halves[side == "held back"]
    other = tmp_path / "copies"
    other.mkdir()
    for i in range(2):
        shutil.copy(copied.describe(i), other / f"another_{i}.png")
    names = f"folder:{photos}", f"folder:{other}"
    for spec in (",".join(names), ",".join(reversed(names))):
        train, held_out, _ = open_buckets(spec, [WantedFields((3, 16, 16))])
        told = [caution for caution in train.cautions if str(other) in caution]
        seen = []
        for half in (train, held_out):
            sampler = BucketSampler([*map(len, half.parts)], 0, 1, 0, 1, 0, group_size=2)
            indices = {index for ((index, _),) in islice(sampler, 2 * len(half) + 4)}
            assert indices == set(range(len(half)))
            seen.append({Path(half.describe(index)).read_bytes() for index in indices})
        assert len(train) + len(held_out) == 22 and not seen[0] & seen[1]
        if spec.endswith(str(other)):
            left = "validation" if side == "trained on" else "training"
            assert [len(part) for part in (train.members[1], held_out.members[1])].count(0) == 1
            assert len(told) == 1 and told[0].startswith(f"the 2 samples of folder:{other} ")
            assert told[0].endswith(f"no sample is left for {left}")


def test_too_many_pictures_to_compare_are_said(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(photos, other := tmp_path / "other")
    monkeypatch.setattr(split_groups, "MOST_COMPARED", 21)
    spec = f"folder:{photos},folder:{other}"
    assert not any("too many" in said for said in open_dataset(f"folder:{photos}", 8)[0].cautions)
    for most, count in ((21, 42), (20, 21)):
        monkeypatch.setattr(split_groups, "MOST_COMPARED", most)
        train, _, _ = open_buckets(spec, [WantedFields((3, 16, 16))])
        told = [caution for caution in train.cautions if "too many to compare" in caution]
        assert told and all(f"folder:{photos}" in told[0] and f"{count} pic" in s for s in told)
        assert len(told) == (1 if count == 42 else 2)


def test_one_picture_cannot_be_divided_and_is_said(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    rows = [json.dumps({"file_name": "a.png", "text": str(i)}) for i in range(4)]
    (tmp_path / "metadata.jsonl").write_text("\n".join(rows))
    train, held_out = open_dataset(f"captions:{tmp_path}", 8)
    assert (len(train), len(held_out)) == (3, 1)
    (said,) = train.cautions
    assert said.startswith(f"the 4 samples of captions:{tmp_path} belong to one picture or group")


@pytest.mark.parametrize("hashed", [True, False])
def test_equal_latents_of_earlier_versions_are_on_one_side(tmp_path: Path, hashed: bool) -> None:
    """Folders of earlier versions have no picture hashes."""
    with LatentWriter(tmp_path, LatentLayout((1, 2, 2), 1, LatentType.FLOAT32, shard_size=7)) as to:
        for i in range(30):
            to.add(torch.full((1, 2, 2), float(i % 10)), 0)
    if not hashed:
        content = unsealed_record(tmp_path / "meta.json")
        for shard in content["shards"]:
            shard["hashes"] = None
        (tmp_path / "meta.json").write_text(json.dumps(content))
    train, held_out = open_dataset(f"latents:{tmp_path}")
    sides = [{float(part.image(i).mean()) for i in range(len(part))} for part in (train, held_out)]
    assert len(held_out) == 3 and not sides[0] & sides[1]


def pictures_of(root: Path, seeds: dict[str, range]) -> str:
    """A folder of 8x8 pictures, one of each seed in its class folder; its name as data."""
    for label, own in seeds.items():
        (root / label).mkdir(parents=True)
        for seed in own:
            pixels = np.random.default_rng(seed).integers(0, 256, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(root / label / f"{seed}.png")
    return f"folder:{root}"


def test_own_validation_set_is_held_out_as_a_whole(tmp_path: Path):
    spec = pictures_of(tmp_path / "a", {"cat": range(5), "dog": range(5, 9)})
    own = pictures_of(tmp_path / "b", {"dog": range(8, 12)})
    wanted = [WantedFields((1, 8, 8), num_classes=2)]
    train, held, _ = open_buckets(spec, wanted, validation=own)
    assert (len(train), len(held)) == (9, 4)
    assert {held.label(i) for i in range(4)} == {1}, "a class has one label on both sides"
    assert [len(part) for part in train.members] == [9, 0]
    assert any(f"1 pictures of {own} are also trained on" in told for told in train.cautions)


def test_validation_set_of_other_classes_or_of_the_training_data_is_refused(tmp_path: Path):
    spec = pictures_of(tmp_path / "a", {"cat": range(3), "dog": range(3, 6)})
    own = pictures_of(tmp_path / "b", {"bird": range(6, 9)})
    wanted = [WantedFields((1, 8, 8), num_classes=3)]
    with pytest.raises(ValueError, match="no class of the training data is called bird"):
        open_buckets(spec, wanted, validation=own)
    with pytest.raises(DataError, match="is also trained on"):
        open_buckets(spec, wanted, validation=spec)
