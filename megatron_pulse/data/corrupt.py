"""What takes the place of a sample that cannot be read: another one, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron_pulse.data.dataset import CorruptSample, DataError, DiffusionDataset
from megatron_pulse.diffusion.noise import Stream, philox

TRIES = 64


def readable[T](
    dataset: DiffusionDataset, index: int, seed: int, read: Callable[[int], T]
) -> tuple[int, T]:
    """The first of ``index`` and what may replace it for which ``read`` does not raise
    CorruptSample, and what it returned.

    A function of (``seed``, ``index``) and the files: whoever asks, in whichever layout, gets the
    same. Raises DataError if most of the data must be corrupt.
    """
    for candidate in _candidates(len(dataset), index, seed):
        try:
            return candidate, read(candidate)
        except CorruptSample as error:
            last = error
    raise DataError(
        last.what,
        [*last.faults, f"nor could any of {TRIES} other samples be read in its place"],
        last.remedy,
    )


def _candidates(size: int, index: int, seed: int) -> Iterator[int]:
    yield index
    for word in philox(seed, Stream.REPLACEMENT, index, 0).random_raw(TRIES):
        yield int(word % size)
