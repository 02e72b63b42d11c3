"""Microbatches from samples of several shapes; all samples of a microbatch have one shape."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from megatron_pulse.data.dataset import CorruptSample, DiffusionDataset, permutation
from megatron_pulse.data.images.shapes import cropped_fraction
from megatron_pulse.data.joined import Joined
from megatron_pulse.data.sampler import Item, MicrobatchSampler
from megatron_pulse.errors import format_faults


class Buckets(Joined):
    """Concatenation of ``parts``, each with a sample shape of its own."""

    @property
    def parts(self) -> tuple[DiffusionDataset, ...]:
        return self._joined

    def part_of(self, index: int) -> tuple[int, int]:
        return self._at(index)


@dataclass(frozen=True)
class Bucket:
    """Samples of one shape of pictures: ``pixels`` (height, width), counts, the mean fraction of a
    picture that is ``cropped`` (None if unknown), and ``frames``.
    """

    pixels: tuple[int, int]
    num_training: int
    num_validation: int
    cropped: float | None
    frames: int = 1

    def describe(self, of: int) -> str:
        """Line on this bucket ``of`` so many training samples in all."""
        height, width = self.pixels
        frames = f"x{self.frames}" if self.frames > 1 else ""
        told = f"{self.num_training:,} samples ({self.num_training / max(of, 1):.1%})"
        if self.cropped is not None:
            told += f", {self.cropped:.1%} of a picture cropped on average"
        return f"bucket {width}x{height}{frames}: {told}"


def buckets_of(train: DiffusionDataset, validation: DiffusionDataset) -> list[Bucket]:
    """Buckets of both sides: ``parts``, or shapes of data that are not yet divided."""
    found = []
    if len(train.parts) > 1 or train.num_shapes == 1:
        for one, other in zip(train.parts, validation.parts, strict=True):
            cropped = _mean_cropped(one, range(len(one)))
            counts = len(one), len(other)
            found.append(Bucket(one.pixel_size, *counts, cropped, one.frames_of(0)))
        return found
    shapes = [[half.shape_index(i) for i in range(len(half))] for half in (train, validation)]
    for shape in sorted({*shapes[0], *shapes[1]}):
        own = [i for i, each in enumerate(shapes[0]) if each == shape]
        cropped = _mean_cropped(train, own)
        counts = len(own), shapes[1].count(shape)
        found.append(Bucket(train.pixels_of(shape), *counts, cropped, train.frames_of(shape)))
    return found


def _mean_cropped(data: DiffusionDataset, indices: Sequence[int]) -> float | None:
    """Mean fraction of the pictures at ``indices`` that is cropped, if they are files."""
    if not data.frames or not len(indices) or not all(one.has_files for one in data.sources):
        return None
    found = []
    for index in indices:
        with suppress(CorruptSample):  # told where it is read
            framing = data.framing(index)
            found.append(cropped_fraction(framing.original, framing.target))
    return sum(found) / len(found) if found else None


class GroupSampler(MicrobatchSampler, ABC):
    """Sampler whose positions ``g * group_size ... (g + 1) * group_size`` are all of one part.

    ``micro_batch_sizes`` are those of the parts, if each has its own; a replica's share of a group
    is then cut into microbatches of its part's size.

    ``order`` and ``named`` are those of ``MicrobatchSampler``. Raises ValueError if the microbatch
    size does not divide the group size or the consumed samples, and if replicas with microbatches
    of several sizes do not begin and end groups together.
    """

    def __init__(
        self,
        num_samples: int,
        *order: Any,
        group_size: int,
        micro_batch_sizes: Sequence[int] = (),
        **named: Any,
    ) -> None:
        super().__init__(num_samples, *order, **named)
        whole = {
            "consecutive samples of one shape": group_size,
            "consumed samples": self.consumed_samples,
        }
        faults = [
            f"{count} {what} are not a multiple of the microbatch size {self.micro_batch_size}"
            for what, count in whole.items()
            if count % self.micro_batch_size
        ]
        if micro_batch_sizes and self.consumed_samples % group_size:
            faults.append(
                f"{self.consumed_samples} consumed samples end within {group_size} of one shape"
            )
        faults += [
            f"{group_size} consecutive samples of one shape are not a multiple of mbs * dp = "
            f"{size} * {self.data_parallel_size}"
            for size in sorted({*micro_batch_sizes})
            if group_size % (size * self.data_parallel_size)
        ]
        if faults:
            raise ValueError(format_faults("microbatches of several shapes", faults))
        self.group_size = group_size
        self.micro_batch_sizes = tuple(micro_batch_sizes)

    @abstractmethod
    def part_of(self, group: int) -> int:
        """Number of the part of a group."""

    def __iter__(self) -> Iterator[list[Item]]:
        if not self.micro_batch_sizes:
            yield from super().__iter__()
            return
        start = self.consumed_samples
        while True:
            size = self.micro_batch_sizes[self.part_of(start // self.group_size)]
            first = start + self.data_parallel_rank * size
            yield [self.item(position) for position in range(first, first + size)]
            start += size * self.data_parallel_size


class BucketSampler(GroupSampler):
    """Sampler of microbatches whose samples are all of one part of ``Buckets``.

    ``sizes`` are the sample counts of the parts. Group g of the run has the positions ``g * u ...
    (g + 1) * u``, all of one part, with u the ``group_size``. In an epoch e, part k has the groups
    floor(e * n_k / u) to floor((e + 1) * n_k / u) of its own stream. The stream repeats all n_k
    samples, shuffled anew each time. No sample is dropped, and the frequency of a part is
    proportional to its samples. The groups of an epoch are shuffled. The sample at a position is a
    function of (seed, position, group size); microbatch size and data-parallel degree only cut
    groups.
    """

    def __init__(self, sizes: Sequence[int], *order: Any, **named: Any) -> None:
        super().__init__(sum(sizes), *order, **named)
        self.sizes = tuple(sizes)
        self._firsts = (0, *accumulate(sizes))
        self._epoch: tuple[int, np.ndarray] | None = None
        self._orders: dict[int, tuple[int, np.ndarray]] = {}

    def part_of(self, group: int) -> int:
        """Number of the part of a group."""
        return self._group(group)[0]

    def item(self, position: int) -> Item:
        group, place = divmod(position, self.group_size)
        part, number = self._group(group)
        epoch, own = divmod(number * self.group_size + place, self.sizes[part])
        if self.shuffle:
            own = int(self._order(part, epoch)[own])
        return self._firsts[part] + own, position

    def _order(self, part: int, epoch: int) -> np.ndarray:
        if self._orders.get(part, (None,))[0] != epoch:
            self._orders[part] = epoch, permutation(self.sizes[part], self.seed, epoch)
        return self._orders[part][1]

    def _begins(self, epoch: int) -> list[int]:
        """Number of groups of each part before an epoch."""
        return [epoch * size // self.group_size for size in self.sizes]

    def _group(self, group: int) -> tuple[int, int]:
        """Part of a group of the run, and the group's number within the part."""
        epoch = group * self.group_size // self.num_samples
        while sum(self._begins(epoch + 1)) <= group:
            epoch += 1
        begins = self._begins(epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            counts = [b - a for a, b in zip(begins, self._begins(epoch + 1), strict=True)]
            ordered: np.ndarray = np.repeat(np.arange(len(counts)), counts)
            self._epoch = epoch, ordered[permutation(len(ordered), self.seed, epoch)]
        parts = self._epoch[1]
        place = group - sum(begins)
        part = int(parts[place])
        return part, begins[part] + int((parts[:place] == part).sum())
