import importlib.util
import os

import numpy as np
import pytest
import torch
from PIL import Image

from megatron_pulse.data.build import open_dataset
from megatron_pulse.data.dataset import CorruptSample, DataError, split_indices
from megatron_pulse.data.fields import WantedFields
from megatron_pulse.data.images.digits import load_digits, open_digits
from megatron_pulse.data.images.folder import ImageFolder


@pytest.mark.parametrize(
    "source, size, count",
    [("mnist", None, 5000), ("digits8", None, 1797), ("mnist", 16, 5000), ("mnist", 32, 5000)],
)
def test_digits(source, size, count):
    train, held_out = open_digits(source, size)
    assert len(train) + len(held_out) == count and len(held_out) == round(count / 10)
    sample = train[0]
    assert sample["image"].dtype == torch.float32
    assert sample["label"].dtype == sample["index"].dtype == torch.int64
    assert train.images.min() == -1 and 0.9 < train.images.max() <= 1
    assert np.bincount(held_out.labels, minlength=10).min() > 5
    assert train.image_shape[1] == (size or (28 if source == "mnist" else 8))


def test_digits_whose_package_is_missing_say_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="datasets/data/digits.csv.gz(?s:.*)pip install scikit"):
        load_digits.__wrapped__("digits8")


def test_mnist_at_32_is_padded():
    small, large = open_digits("mnist")[0], open_digits("mnist", 32)[0]
    assert torch.equal(large.images[..., 2:-2, 2:-2], small.images)
    assert (large.images[..., :2, :] == -1).all()


def test_split_is_fixed_and_whole():
    train, held_out = split_indices(100, 0.1)
    assert sorted([*train, *held_out]) == list(range(100)) and len(held_out) == 10
    assert held_out.tolist() == split_indices(100, 0.1)[1].tolist()
    assert [len(part) for part in split_indices(3, 0.01)] == [2, 1]
    assert [len(part) for part in split_indices(3, 0)] == [3, 0]


@pytest.fixture
def folder(tmp_path):
    for i, name in enumerate(["cat/a.png", "cat/b.JPG", "dog/deep/c.webp", "dog/d.png"]):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.zeros((20, 30, 3), dtype=np.uint8)
        pixels[:, :15], pixels[:, 15:] = 60 * i, 255
        Image.fromarray(pixels).save(path)
    return tmp_path


def test_folder(folder):
    dataset = ImageFolder(folder, 10, verify=True)
    assert dataset.class_names == ["cat", "dog"] and dataset.labels == [0, 0, 1, 1]
    image = dataset[0]["image"]
    assert image.shape == (3, 10, 10)
    assert (image[:, :, 0] == -1).all() and (image[:, :, -1] == 1).all()
    assert ImageFolder(folder, 10, channels=1).image(0).shape == (1, 10, 10)
    assert ImageFolder(folder / "cat", 10).num_classes == 1


def test_all_unreadable_files_are_listed_at_once(folder):
    (folder / "cat/a.png").write_bytes(b"no image")
    whole = (folder / "dog/d.png").read_bytes()
    (folder / "dog/d.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError) as error:
        ImageFolder(folder, 10, verify=True)
    assert len(error.value.faults) == 2
    assert "a.png: not an image" in str(error.value) and "d.png" in str(error.value)
    with pytest.raises(CorruptSample, match="a.png") as error:
        ImageFolder(folder, 10).image(0)
    command = f"'pulse data info folder:{folder} --image-size 10 --channels 3 --verify' lists them"
    assert command in str(error.value) and "--pulse-skip-corrupt" in str(error.value)
    (folder / "cat/a.png").unlink()
    dataset = ImageFolder(folder, 10)
    (folder / "dog/d.png").unlink()  # after it was listed: storage fails, no image does
    with pytest.raises(DataError, match="No such file") as error:
        dataset.check(dataset.files.index(folder / "dog/d.png"))
    assert not isinstance(error.value, CorruptSample)


def test_pipes_are_no_images_and_are_not_waited_for(folder):
    for name in ("cat/pipe.png", "dog/pipe.png"):
        os.mkfifo(folder / name)
    with pytest.raises(DataError) as error:
        ImageFolder(folder, 10, verify=True)
    assert [fault.split(": ")[1] for fault in error.value.faults] == [
        "it is not a regular file"
    ] * 2
    with pytest.raises(CorruptSample, match="cat/pipe.png: it is not a regular file"):
        flat = ImageFolder(folder / "cat", 10)
        flat.image(flat.files.index(folder / "cat/pipe.png"))


def test_folders_that_make_no_dataset(folder, tmp_path):
    with pytest.raises(DataError, match="not a folder"):
        ImageFolder(tmp_path / "nowhere", 8)
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match="class folder empty has no images"):
        ImageFolder(folder, 8)
    Image.new("L", (4, 4)).save(folder / "stray.png")
    with pytest.raises(DataError, match="1 images beside 3 class folders"):
        ImageFolder(folder, 8)


def test_open_dataset(folder):
    train, held_out = open_dataset(f"folder:{folder}", 8, validation_fraction=0.25)
    assert (len(train), len(held_out)) == (3, 1) and train[2]["image"].shape == (3, 8, 8)
    assert open_dataset("digits8", wanted=WantedFields((1, 8, 8)))[0].num_classes == 10
    with pytest.raises(DataError, match="folder:PATH"):
        open_dataset("imagenet")
    with pytest.raises(DataError, match="1x32x32, the backbone takes 3x32x32"):
        open_dataset("digits8", wanted=WantedFields((3, 32, 32)))
    with pytest.raises(DataError, match="--image-size"):
        open_dataset(f"folder:{folder}")
