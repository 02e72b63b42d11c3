"""What a dataset is here: images (or latents), labels and, if any, conditioning, by index."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_pulse.diffusion.noise import Stream, philox

_MAX_LISTED = 50


class DataError(ValueError):
    """Data that cannot be used; ``faults`` lists every reason, the message says what to do."""

    def __init__(self, what: str, faults: Sequence[str], remedy: str) -> None:
        self.faults = list(faults)
        listed = "".join(f"\n  - {fault}" for fault in self.faults[:_MAX_LISTED])
        if len(self.faults) > _MAX_LISTED:
            listed += f"\n  - and {len(self.faults) - _MAX_LISTED} more (see .faults)"
        super().__init__(f"{what}: {len(self.faults)} fault(s):{listed}\n{remedy}")


class DiffusionDataset(ABC):
    """Samples by index. Image, label and context are read apart, so that a device in the middle
    of the pipeline reads no images.

    ``image_shape`` is ``(c, h, w)``, ``context_shape`` ``(n, d)`` or None.
    """

    image_shape: tuple[int, ...]
    num_classes: int
    context_shape: tuple[int, ...] | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def image(self, index: int, draw: int = 0) -> Tensor:
        """Float32 ``image_shape``, pixels in [-1, 1]; ``draw`` keys random augmentation."""

    @abstractmethod
    def label(self, index: int) -> int:
        """The class, 0 to ``num_classes`` - 1."""

    def context(self, index: int) -> Tensor | None:
        """Float32 ``context_shape`` (text states), or None."""
        return None

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One sample: ``image``, ``label`` and ``index`` (int64 scalars), ``context`` if any."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        sample = {
            "image": self.image(index),
            "label": torch.tensor(self.label(index)),
            "index": torch.tensor(index),
        }
        if (context := self.context(index)) is not None:
            sample["context"] = context
        return sample


class ArrayDataset(DiffusionDataset):
    """Images ``[n, c, h, w]`` float32 and labels ``[n]`` in memory."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, num_classes: int) -> None:
        self.images = torch.from_numpy(np.ascontiguousarray(images, dtype=np.float32))
        self.labels = labels.astype(np.int64)
        self.image_shape = tuple(self.images.shape[1:])
        self.num_classes = num_classes

    def __len__(self) -> int:
        return len(self.images)

    def image(self, index: int, draw: int = 0) -> Tensor:
        return self.images[index]

    def label(self, index: int) -> int:
        return int(self.labels[index])


class Subset(DiffusionDataset):
    """The samples of ``source`` at ``indices``, renumbered from 0."""

    def __init__(self, source: DiffusionDataset, indices: np.ndarray) -> None:
        self.source = source
        self.indices = indices
        self.image_shape = source.image_shape
        self.num_classes = source.num_classes
        self.context_shape = source.context_shape

    def __len__(self) -> int:
        return len(self.indices)

    def image(self, index: int, draw: int = 0) -> Tensor:
        return self.source.image(int(self.indices[index]), draw)

    def label(self, index: int) -> int:
        return self.source.label(int(self.indices[index]))

    def context(self, index: int) -> Tensor | None:
        return self.source.context(int(self.indices[index]))


def permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """A fixed shuffle of ``range(size)``, int64.

    Sorted from raw Philox words: NumPy promises those bits for ever, but not those of
    ``Generator.permutation``, and a resumed run must not depend on NumPy's version.
    """
    words = philox(seed, Stream.ORDER, 0, epoch).random_raw(size)
    return np.argsort(words, kind="stable")


def split_indices(size: int, validation_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """(training, validation) indices, sorted and disjoint: the same split in every run.

    At least one sample is kept for validation unless the fraction is 0.
    """
    if not 0 <= validation_fraction < 1:
        raise ValueError(f"validation_fraction is {validation_fraction}; it must be in [0, 1)")
    held_out = round(size * validation_fraction)
    if validation_fraction > 0:
        held_out = min(max(held_out, 1), size - 1)
    order = permutation(size, seed=0, epoch=0)
    return np.sort(order[held_out:]), np.sort(order[:held_out])
