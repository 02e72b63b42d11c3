"""Assignment of samples to microbatches: shuffled, resumable, and the same for every layout.

A sample that cannot be read is replaced by another, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from megatron_pulse.data.dataset import CorruptSample, DataError, DiffusionDataset, permutation
from megatron_pulse.diffusion.noise import Stream, philox
from megatron_pulse.errors import format_faults

Item = tuple[int, int]
"""(sample index, global position): the position counts all samples before it in the run."""


class MicrobatchSampler:
    """Endless microbatches of one data-parallel rank, each a list of ``Item``.

    Position p of the run is sample ``permutation_e[p % n]`` of epoch ``e = p // n``. Microbatch m
    of rank r holds the positions ``consumed + m * mbs * dp + r * mbs ...`` (Megatron's layout). A
    global batch is thus a slice of positions, for any data-parallel and microbatch sizes. It may
    continue into the next epoch, and no sample is dropped.

    With ``period`` (a multiple of mbs * dp) positions restart after that many, so that every
    evaluation sees the same samples although its iterator continues. With ``repeats`` each sample
    comes at so many positions in a row.
    """

    def __init__(
        self,
        num_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        seed: int,
        shuffle: bool = True,
        period: int | None = None,
        repeats: int = 1,
    ) -> None:
        faults = []
        for name, value, least in (
            ("num_samples", num_samples, 1),
            ("consumed_samples", consumed_samples, 0),
            ("micro_batch_size", micro_batch_size, 1),
            ("data_parallel_size", data_parallel_size, 1),
        ):
            if value < least:
                faults.append(f"{name} is {value}; it must be {least} or more")
        if not 0 <= data_parallel_rank < data_parallel_size:
            faults.append(
                f"data_parallel_rank {data_parallel_rank} is not below data_parallel_size"
            )
        self._stride = micro_batch_size * data_parallel_size
        if period is not None and (period < 1 or period % max(self._stride, 1)):
            faults.append(f"period {period} is not a multiple of mbs * dp = {self._stride}")
        if faults:
            raise ValueError(format_faults("microbatch sampler", faults))
        self.num_samples = num_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size
        self.seed = seed
        self.shuffle = shuffle
        self.period = period
        self.repeats = repeats
        self._cached: tuple[int, np.ndarray] | None = None

    def item(self, position: int) -> Item:
        """Sample at a global position."""
        epoch, place = divmod(position, self.num_samples)
        if not self.shuffle:
            return place, position
        if self._cached is None or self._cached[0] != epoch:
            self._cached = epoch, permutation(self.num_samples, self.seed, epoch)
        return int(self._cached[1][place]), position

    def __iter__(self) -> Iterator[list[Item]]:
        start = self.consumed_samples
        while True:
            first = start + self.data_parallel_rank * self.micro_batch_size
            positions = range(first, first + self.micro_batch_size)
            yield [self._repeated(p % self.period if self.period else p) for p in positions]
            start += self._stride

    def _repeated(self, position: int) -> Item:
        index, _ = self.item(position // self.repeats)
        return index, position


class PairSampler:
    """Microbatches of pairs: winner and loser of each pair of ``pairs``, at the pair's position."""

    def __init__(self, pairs: MicrobatchSampler) -> None:
        self.pairs = pairs

    def __iter__(self) -> Iterator[list[Item]]:
        for microbatch in self.pairs:
            yield [
                (2 * pair + member, position) for pair, position in microbatch for member in (0, 1)
            ]


TRIES = 64


def readable[T](
    dataset: DiffusionDataset, index: int, seed: int, read: Callable[[int], T]
) -> tuple[int, T]:
    """First readable sample among ``index`` and its replacements, and the result of ``read``.

    A sample is readable if ``read`` does not raise CorruptSample. The choice is a function of
    (``seed``, ``index``) and the files, so it is the same in every layout. Raises DataError after
    ``TRIES`` corrupt replacements.
    """
    for candidate in _candidates(len(dataset), index, seed):
        try:
            return candidate, read(candidate)
        except CorruptSample as error:
            last = error
    raise DataError(
        last.what,
        [*last.faults, f"{TRIES} other samples tried in its place cannot be read either"],
        last.remedy,
    )


def _candidates(size: int, index: int, seed: int) -> Iterator[int]:
    yield index
    for word in philox(seed, Stream.REPLACEMENT, index, 0).random_raw(TRIES):
        yield int(word % size)
