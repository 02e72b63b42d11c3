"""Several datasets as one pool of samples."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from megatron_pulse.data.dataset import DiffusionDataset, Framing, Variation


class Joined(DiffusionDataset):
    """Concatenation of ``datasets`` with the same fields.

    Properties that differ between datasets are those of the first. Splits and records are made of
    the single datasets (``members``).
    """

    def __init__(self, datasets: Sequence[DiffusionDataset]) -> None:
        self._joined = tuple(datasets)
        self._ends = list(accumulate(map(len, self._joined)))
        self.image_shape = self._joined[0].image_shape
        self.latent_shape = self._joined[0].latent_shape
        self.num_classes = max(each.num_classes for each in self._joined)
        self.class_names = self._joined[0].class_names
        self.fields = self._joined[0].fields
        self.frames = any(each.frames for each in self._joined)
        self.has_captions = any(each.has_captions for each in self._joined)
        self.has_pairs = self._joined[0].has_pairs
        parts = [each.text_parts for each in self._joined]
        self.text_parts = parts[0] if all(one == parts[0] for one in parts) else {}
        self.cautions = [caution for each in self._joined for caution in each.cautions]

    @property
    def members(self) -> tuple[DiffusionDataset, ...]:
        return tuple(member for each in self._joined for member in each.members)

    @property
    def sources(self) -> tuple[DiffusionDataset, ...]:
        return tuple(source for each in self._joined for source in each.sources)

    def _at(self, index: int) -> tuple[int, int]:
        """Number of a sample's dataset, and the sample's index there."""
        number = bisect_right(self._ends, index)
        return number, index - (self._ends[number - 1] if number else 0)

    def _own(self, index: int) -> tuple[DiffusionDataset, int]:
        number, own = self._at(index)
        return self._joined[number], own

    def __len__(self) -> int:
        return self._ends[-1]

    def image(self, index: int, variation: Variation | None = None) -> Tensor:
        dataset, own = self._own(index)
        return dataset.image(own, variation)

    def deviation(self, index: int, variation: Variation | None = None) -> Tensor | None:
        dataset, own = self._own(index)
        return dataset.deviation(own, variation)

    def mask(self, index: int, variation: Variation | None = None) -> Tensor | None:
        dataset, own = self._own(index)
        return dataset.mask(own, variation)

    def label(self, index: int) -> int:
        dataset, own = self._own(index)
        return dataset.label(own)

    def caption(self, index: int) -> str:
        dataset, own = self._own(index)
        return dataset.caption(own)

    def excess(self, index: int) -> int:
        dataset, own = self._own(index)
        return dataset.excess(own)

    def uncaptioned(self, index: int) -> bool:
        dataset, own = self._own(index)
        return dataset.uncaptioned(own)

    def check(self, index: int) -> None:
        dataset, own = self._own(index)
        dataset.check(own)

    def describe(self, index: int) -> str:
        dataset, own = self._own(index)
        return dataset.describe(own)

    def damaged(self, index: int) -> Sequence[str]:
        dataset, own = self._own(index)
        return dataset.damaged(own)

    def conditioning(self, index: int, variation: Variation | None = None) -> dict[str, Tensor]:
        dataset, own = self._own(index)
        return dataset.conditioning(own, variation)

    def null_of(self, index: int) -> dict[str, Tensor]:
        dataset, own = self._own(index)
        return dataset.null_of(own)

    def null_conditioning(self) -> dict[str, Tensor]:
        return self._joined[0].null_conditioning()

    def framing(self, index: int, variation: Variation | None = None) -> Framing:
        dataset, own = self._own(index)
        return dataset.framing(own, variation)

    @property
    def pixel_size(self) -> tuple[int, int]:
        return self._joined[0].pixel_size
