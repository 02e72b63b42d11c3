"""Another picture beside each sample."""

import numpy as np
import pytest
import torch
from PIL import Image

from megatron_pulse.cli.main import main
from megatron_pulse.data.build import open_dataset
from megatron_pulse.data.dataset import DataError, FieldSpec
from megatron_pulse.data.fields import WantedFields
from megatron_pulse.data.microbatches import make_microbatch
from megatron_pulse.diffusion.objectives import DiffusionProcess, Objective

WANTED = WantedFields((3, 8, 8), {"conditioning": FieldSpec((3, 16, 16))})


@pytest.fixture
def photos(tmp_path):
    """Ten pictures and, as JPEGs and PNGs, the others beside them, each of one grey."""
    for i in range(10):
        for folder, suffix in (
            ("photos", "png"),
            ("photos.conditioning", "jpg" if i % 2 else "png"),
        ):
            path = tmp_path / folder / f"{i % 2}" / f"{i}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((20, 24, 3), 20 * i, np.uint8)).save(path)
    return tmp_path / "photos"


def test_each_sample_has_its_own_other_picture(photos):
    train, validation = open_dataset(f"folder:{photos}", wanted=WANTED)
    assert len(train) + len(validation) == 10 and train.num_classes == 2
    for data in (train, validation):
        for i in range(len(data)):
            grey = (data.image(i).mean() + 1) / 2
            other = data.conditioning(i)["conditioning"]
            assert other.shape == (3, 16, 16) and 0 <= other.min() <= other.max() <= 1
            assert (other - grey).abs().max() < 0.01
    items = [(i, 0) for i in range(4)]
    kept, dropped = (
        make_microbatch(train, items, DiffusionProcess(Objective.V), 0, p, needs_image=False)
        for p in (0.0, 1.0)
    )
    assert dropped["dropped"].all() and not kept["dropped"].any()
    assert torch.equal(kept["conditioning"], dropped["conditioning"])
    assert "conditioning" not in open_dataset(f"folder:{photos}", 8)[0].fields


def test_what_is_missing_is_listed(photos):
    beside = photos.with_name("photos.conditioning")
    (beside / "0" / "2.png").unlink()
    for suffix in ("WEBP", "tiff"):
        (beside / "1" / f"3.{suffix}").write_bytes((beside / "1" / "3.jpg").read_bytes())
    with pytest.raises(DataError) as error:
        open_dataset(f"folder:{photos}", wanted=WANTED)
    assert len(error.value.faults) == 2
    assert "there is no" in error.value.faults[0] and "2.png" in error.value.faults[0]
    assert "both exist" in error.value.faults[1]
    beside.rename(photos.with_name("elsewhere"))
    with pytest.raises(DataError, match=r"there is no folder .*photos\.conditioning"):
        open_dataset(f"folder:{photos}", wanted=WANTED)


def test_the_exact_name_comes_first_and_case_does_not_count(photos):
    beside = photos.with_name("photos.conditioning")
    (beside / "0" / "2.png").rename(beside / "0" / "2.PNG")
    (photos / "1" / "3.jpg").write_bytes((beside / "1" / "3.jpg").read_bytes())
    (beside / "1" / "3.png").write_bytes((beside / "0" / "0.png").read_bytes())
    data, _ = open_dataset(f"folder:{photos}", wanted=WANTED, validation_fraction=0)
    others = {data.describe(i): data.conditioning(i)["conditioning"] for i in range(len(data))}
    assert others[f"{photos}/1/3.png"].max() < 0.01 and others[f"{photos}/0/2.png"].min() > 0.1
    assert abs(others[f"{photos}/1/3.jpg"].mean() - 60 / 255) < 0.01 and not data.cautions
    (beside / "1" / "3.png").unlink()
    data, _ = open_dataset(f"folder:{photos}", wanted=WANTED)
    assert "has 1 picture (1/3.jpg) that several pictures share" in data.cautions[0]


def test_a_corrupt_other_picture_makes_the_sample_corrupt(photos):
    (photos.with_name("photos.conditioning") / "0" / "4.png").write_text("no picture")
    train, validation = open_dataset(f"folder:{photos}", wanted=WANTED)
    bad = [(d, i) for d in (train, validation) for i in range(len(d)) if "/4.png" in d.describe(i)]
    ((data, index),) = bad
    for read in (data.image, data.check, data.conditioning):
        with pytest.raises(DataError, match=r"conditioning/0/4\.png: not an image"):
            read(index)


def test_damaged_names_the_files_that_cannot_be_read(photos):
    beside = photos.with_name("photos.conditioning")
    for path in (beside / "0" / "4.png", photos / "1" / "5.png", photos / "0" / "4.png"):
        path.write_text("no picture")
        data, _ = open_dataset(f"folder:{photos}", wanted=WANTED, validation_fraction=0)
        index = next(i for i in range(10) if data.describe(i).endswith(path.name))
        assert str(path) in data.damaged(index)
        assert len(data.damaged(index)) == 1 + (path == photos / "0" / "4.png")


def test_data_check_reads_control_pictures(photos, capsys):
    """A damaged one ends it; another aspect ratio and a missing one are warnings."""
    beside = photos.with_name("photos.conditioning")
    check = ["data", "check", f"folder:{photos}", "--image-size", "8"]
    assert main(check) == 0
    told = capsys.readouterr()
    assert f"{beside}: 10 pictures" in told.out and not told.err
    Image.new("RGB", (40, 20)).save(beside / "0" / "2.png")
    Image.new("RGB", (12, 10)).save(beside / "0" / "6.png")
    (beside / "0" / "8.png").unlink()
    assert main(check) == 0
    told = capsys.readouterr().err
    assert f"{beside}: 1 of 9 control pictures have another aspect ratio" in told
    assert f"there is no {beside / '0' / '8.png'}" in told
    (beside / "0" / "4.png").write_text("no picture")
    assert main(check) == 2
    assert f"{beside / '0' / '4.png'}: not an image" in capsys.readouterr().err


def test_a_picture_of_no_sample_is_told(photos):
    assert not open_dataset(f"folder:{photos}", wanted=WANTED)[0].cautions
    beside = photos.with_name("photos.conditioning")
    (beside / "9z.png").write_bytes((beside / "0" / "2.png").read_bytes())
    (said,) = open_dataset(f"folder:{photos}", wanted=WANTED)[0].cautions
    assert "1 picture (9z.png) without a sample: ignored" in said


def test_info_says_what_a_controlnet_would_see(photos, capsys):
    info = ["data", "info", f"folder:{photos}", "--image-size", "8", "--verify"]
    beside = photos.with_name("photos.conditioning")
    assert main(info) == 0
    told = capsys.readouterr()
    assert f"conditioning another picture of each, in {beside}" in told.out and not told.err
    (beside / "0" / "2.png").unlink()
    (beside / "9z.png").write_text("of no sample")
    assert main(info) == 0
    told = capsys.readouterr()
    assert "conditioning" not in told.out and "warning: image folder" in told.err
    assert f"there is no {beside / '0' / '2.png'}" in told.err
    beside.rename(photos.with_name("elsewhere"))
    assert main(info) == 0
    assert not capsys.readouterr().err
