"""Record of a run's data, and detection of changed data in a continued run."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path

import pytest
from PIL import Image

from megatron_pulse.cli.main import main
from megatron_pulse.data import data_record
from megatron_pulse.data.build import open_dataset
from megatron_pulse.data.data_record import (
    DataRecord,
    describe_changes,
    moved_classes,
    record_of,
    recorded_data,
    recorded_provenance,
    saved_faults,
    to_saved,
)


def picture(path: Path, grey: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (8, 8), grey).save(path)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Ten pictures of each of two classes."""
    for i in range(20):
        picture(tmp_path / "photos" / ("cat" if i < 10 else "dog") / f"{i}.png", 10 * i)
    return tmp_path / "photos"


def recorded(spec: str, labelled: bool = True) -> list[DataRecord]:
    return [record_of(*open_dataset(spec, 8), labelled, whole=True)]


def changes(before: list[DataRecord], spec: str) -> list[str]:
    return describe_changes(before, recorded(spec))


def test_pictures_that_are_added_removed_or_edited_are_counted(photos: Path) -> None:
    spec = f"folder:{photos}"
    before = recorded(spec)
    assert not changes(before, spec)
    for i in range(20, 40):
        picture(photos / "cat" / f"{i}.png", i)
    (added,) = changes(before, spec)
    was = "samples: 36 for training, 4 for validation (was 18 and 2), 20 added, 0 removed"
    assert added.startswith(was)
    for i in range(20, 40):
        (photos / "cat" / f"{i}.png").unlink()
    (photos / "dog" / "10.txt").write_text("a dog")  # captions are of the samples too
    assert "1 added, 1 removed" in changes(before, spec)[0]
    (photos / "dog" / "10.txt").unlink()
    (photos / "dog" / "12.png").rename(photos / "dog" / "99.png")
    (moved,) = changes(before, spec)
    assert "(was 18 and 2), in another order" in moved


def test_of_many_samples_counts_and_a_digest_are_kept(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_record, "MOST_LISTED", 10)
    before = recorded(f"folder:{photos}")
    assert not before[0].samples and not changes(before, f"folder:{photos}")
    picture(photos / "cat" / "1.png", 255)
    (edited,) = changes(before, f"folder:{photos}")
    assert edited.endswith("(was 18 and 2), other samples or another order")
    picture(photos / "dog" / "x.png", 254)
    assert changes(before, f"folder:{photos}") == [
        "samples: 19 for training, 2 for validation (was 18 and 2)"
    ]


def test_names_of_classes_stand_for_labels_also_in_latents(photos: Path, tmp_path: Path) -> None:
    def write(name: str) -> str:
        argv = ["data", "write-latents", "--from", f"folder:{photos}", "--image-size", "8"]
        assert main([*argv, "-o", str(tmp_path / name)]) == 0
        return f"latents:{tmp_path / name}"

    before = {"folder": recorded(f"folder:{photos}"), "latents": recorded(write("before"))}
    assert all(one.classes == ("cat", "dog") and one.samples for (one,) in before.values())
    assert not changes(before["latents"], write("same"))
    (photos / "dog").rename(photos / "ant")
    for name, spec in (("folder", f"folder:{photos}"), ("latents", write("after"))):
        now = recorded(spec)
        moved = moved_classes(before[name], now)
        assert moved == "cat is class 1 (was 0)"
        unlabelled = recorded(spec, labelled=False)
        assert not moved_classes(before[name], unlabelled)
    (photos / "ant").rename(photos / "elk")
    told = changes(before["folder"], f"folder:{photos}")
    assert told == ["classes: cat, elk (was cat, dog)"]
    flat = tmp_path / "flat"
    shutil.copytree(photos / "cat", flat)
    assert recorded(f"folder:{flat}")[0].classes == ()


def test_what_a_checkpoint_keeps_is_read_back_and_checked(photos: Path) -> None:
    records = {"base": recorded(f"folder:{photos}"), "upper": [DataRecord(3, 1)]}
    saved = to_saved(records)
    assert not saved_faults(saved)
    assert recorded_data(Namespace(pulse_data_record=saved)) == records
    assert recorded_data(Namespace()) == {}
    assert recorded_provenance(recorded_data(Namespace(pulse_data_record=saved))["base"]) == {}
    for one in saved["base"]:  # as an earlier version wrote it
        del one["made_by"]
    assert not saved_faults(saved)
    assert recorded_provenance(recorded_data(Namespace(pulse_data_record=saved))["base"]) is None
    saved["base"][0] |= {"num_train": -1, "classes": "cat"}
    del saved["upper"][0]["digest"]
    assert len(saved_faults(saved)) == 3
