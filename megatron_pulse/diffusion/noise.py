"""Random numbers of training as a pure function of (seed, sample, draw).

The numbers are computed on the CPU and depend on no rank, microbatch or worker. The same run on
another layout, or on GPUs, therefore sees the same numbers. Philox is counter-based (Salmon et al.
2011): a sample's counter begins at (sample, draw), so no state is carried.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_WORD = (1 << 64) - 1


class Stream(IntEnum):
    """Independent streams of random numbers under one seed."""

    TRAIN = 0
    VALIDATION = 1
    SAMPLING = 2
    ORDER = 4
    REPLACEMENT = 5
    POSTERIOR = 6
    SELF_CONDITIONING = 7
    NOISE_OFFSET = 8
    VARIATION = 9
    PATCH_SIZE = 10
    ENCODER_DROPOUT = 11
    INPAINT_MASK = 12
    FIRST_FRAME = 13


class Draw(NamedTuple):
    """Random numbers of one sample: ``noise`` ~ N(0, I), ``u`` and ``drop`` uniform in [0, 1).

    ``u`` chooses the timestep. The label is dropped if ``drop`` < the dropout probability.
    """

    noise: Tensor | None
    u: float
    drop: float


def philox(seed: int, stream: Stream, index: int, draw: int) -> np.random.Philox:
    """Bit generator of one (seed, stream, index, draw)."""
    # The low words count the generator's own blocks; index and draw are the high ones. Two
    # different (index, draw) thus never overlap.
    return np.random.Philox(
        key=np.array([seed & _WORD, stream], dtype=np.uint64),
        counter=np.array([0, 0, index & _WORD, draw & _WORD], dtype=np.uint64),
    )


def draw(
    seed: int,
    sample_index: int,
    draw: int,
    shape: tuple[int, ...] | None,
    stream: Stream = Stream.TRAIN,
) -> Draw:
    """Random numbers of one sample at one visit; ``noise`` is float32 of ``shape``.

    ``draw`` is the global position of the sample (samples consumed before it), so noise differs
    between epochs. With ``shape`` None no noise is drawn; ``u`` and ``drop`` are the same either
    way. Validation always uses ``draw`` 0 of its own stream.
    """
    generator = np.random.Generator(philox(seed, stream, sample_index, draw))
    u, drop = generator.random(2)
    noise = None
    if shape is not None:
        noise = torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))
    return Draw(noise, float(u), float(drop))


def offset_noise(seed: int, sample_index: int, draw: int, num_channels: int) -> Tensor:
    """Standard normal number of each channel: float32 ``[num_channels, 1, 1]``."""
    generator = np.random.Generator(philox(seed, Stream.NOISE_OFFSET, sample_index, draw))
    return torch.from_numpy(generator.standard_normal((num_channels, 1, 1), dtype=np.float32))


def first_frame_noise(
    seed: int, sample_index: int, draw: int, shape: tuple[int, ...]
) -> tuple[float, Tensor]:
    """Normal number that decides the strength of a first frame's noise, and the noise of ``shape``
    itself."""
    generator = np.random.Generator(philox(seed, Stream.FIRST_FRAME, sample_index, draw))
    strength = float(generator.standard_normal())
    return strength, torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))


def encoder_drops(seed: int, sample_index: int, draw: int, count: int) -> list[float]:
    """Uniform numbers in [0, 1), one for the text encoder at each place; each is independent of
    ``count``.
    """
    generator = np.random.Generator(philox(seed, Stream.ENCODER_DROPOUT, sample_index, draw))
    drops: list[float] = generator.random(count).tolist()
    return drops


def start_noise(seed: int, indices: range, shape: tuple[int, ...], step: int = 0) -> Tensor:
    """Sampling noise ``[len(indices), *shape]`` float32; a row depends on (seed, index,
    step) only."""
    noise = [draw(seed, index, step, shape, Stream.SAMPLING).noise for index in indices]
    return torch.stack([row for row in noise if row is not None])


def sample_noises(seed: int, indices: range, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Noise of ``start_noise`` for step 0, 1, 2, ... without end."""
    return (start_noise(seed, indices, shape, step) for step in count())


def diffusers_noises(
    seed: int, total: int, indices: range, shape: tuple[int, ...], before: tuple[int, ...] = ()
) -> Iterator[Tensor]:
    """Rows ``indices`` of a diffusers pipeline's noise for a batch of ``total`` samples.

    The noise is that of ``randn_tensor`` in float32 with ``torch.Generator().manual_seed(seed)``:
    the starting noise first, then that of each stochastic step. A whole batch is one draw, so the
    values depend on ``total``. A pipeline that adds noise to its first frames draws it ``before``.
    """
    generator = torch.Generator().manual_seed(seed)
    if before:
        torch.randn(before, generator=generator)
    while True:
        yield torch.randn((total, *shape), generator=generator)[indices.start : indices.stop]
