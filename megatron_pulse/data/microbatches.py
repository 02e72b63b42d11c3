"""Microbatch tensors from samples: noise, timesteps, dropped conditioning."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megatron_pulse.backbone.appended_fields import FRAME_NOISE
from megatron_pulse.data.augmentation import NO_AUGMENTATION, Augmentation
from megatron_pulse.data.buckets import Buckets
from megatron_pulse.data.dataset import DataError, DiffusionDataset, Variation
from megatron_pulse.data.fields import APART
from megatron_pulse.data.sampler import Item, MicrobatchSampler, PairSampler, readable
from megatron_pulse.diffusion.loss import PLAIN, LossChoice
from megatron_pulse.diffusion.noise import Stream, draw, encoder_drops, offset_noise
from megatron_pulse.diffusion.objectives import VALIDATION_TIMES, DiffusionProcess
from megatron_pulse.encoders.autoencoder import posterior_noise, sampled
from megatron_pulse.encoders.text_recipe import dropped_name, place_of
from megatron_pulse.processes import end_with_parent

_GRACE_S = 2.0
"""Seconds to wait for a worker's exit status after its pipe breaks."""


NO_DROPOUT: Mapping[str, float] = {}
"""No text encoder with a dropout of its own."""


class Split(StrEnum):
    """Split of the data. Training redraws at every visit and drops conditioning; validation does
    not, and has the timestep of its position (see ``validation_timestep``).
    """

    TRAIN = "train"
    VALIDATION = "validation"


def make_microbatch(
    dataset: DiffusionDataset,
    items: Sequence[Item],
    process: DiffusionProcess,
    seed: int,
    drop_probability: float = 0.0,
    null_label: int | None = None,
    split: Split = Split.TRAIN,
    needs_image: bool = True,
    skip_corrupt: bool = False,
    needs_pixels: bool = True,
    loss: LossChoice = PLAIN,
    augmentation: Augmentation = NO_AUGMENTATION,
    encoder_dropout: Mapping[str, float] = NO_DROPOUT,
) -> dict[str, Tensor]:
    """Make one microbatch of b = ``len(items)``, on the CPU. Each row depends on its item alone.

    - ``noisy`` and ``target``: float32 ``[b, c, h, w]``
    - ``timesteps``: float32 ``[b]``
    - ``labels``: int64 ``[b]``
    - the dataset's ``fields``: ``[b, ...]``
    - ``index``: int64 ``[b]``
    - ``dropped``: bool ``[b]``
    - ``positions``: int64 ``[b]``, of the items

    A ``dropped`` sample loses its label and its other conditioning together. Its values become
    ``null_label`` (None keeps labels) and those of the dataset's ``null_of``. A sample with an
    empty caption is ``dropped`` too, but keeps its label. With the fields of ``APART``, two further
    shares of ``drop_probability`` lose one of them alone, as public trainers of SVD do. If the step
    encodes these fields, ``NAME_dropped`` bool ``[b]`` marks samples that lose each.

    ``encoder_dropout`` has probabilities by text encoder, each drawn by itself: the encoder's parts
    of the fields (see ``text_parts``) become those of the empty caption. ``NAME_dropped`` bool
    ``[b]`` of each marks these samples, and the ``dropped``.

    Without ``needs_image`` (a device in the middle of the pipeline) ``noisy`` and ``target`` are
    omitted. No image is read and no noise drawn; the other fields are bit-identical. If the dataset
    has samples of several shapes, ``noisy`` is then a meta tensor that conveys the shape. All
    ``items`` must have one shape.

    Images that are means of posteriors (see ``deviation``) are sampled with noise. For a dataset
    with a ``latent_shape``, the step encodes latents itself. It gets ``pixels``, images float32
    ``[b, c, H, W]`` in [-1, 1], if ``needs_pixels``. If ``needs_image``, ``noise`` and the
    posterior's noise ``posterior`` replace ``noisy`` and ``target``, both float32 ``[b,
    *latent_shape]`` (see ``noised_here``).

    If the dataset has pairs, ``items`` are whole pairs, whose members share noise, timestep,
    dropping and ``augmentation``, which applies in training.

    In training, a dataset with masks has ``loss_mask`` float32 ``[b, 1, h, w]``, averaged over the
    pixels of each latent, if ``needs_image``.

    ``loss`` offsets the noise in training, and adds ``loss_weights`` float32 ``[b]`` unless it is
    the plain mean squared error.

    With ``skip_corrupt``, a sample with a corrupt image is replaced as a whole by a sample from
    ``readable``, even if no image is needed. ``corrupt`` int64 ``[k]`` has the indices of the
    corrupt samples.
    """
    training = split == Split.TRAIN
    stream = Stream.TRAIN if training else Stream.VALIDATION
    number, own = dataset.part_of(items[0][0])
    part, first = dataset.parts[number], items[0][0] - own
    noised = part.latent_shape or part.image_shape
    shape = noised if needs_image else None
    visits = [(i, p if training else 0) for i, p in items]
    # Both members of a pair have the noise, the time and the dropping of their pair.
    draws = [(i // 2, p) for i, p in visits] if part.has_pairs else visits
    rows = [draw(seed, i, p, shape, stream) for i, p in draws]
    without_label = [training and row.drop < drop_probability for row in rows]
    times = [process.timestep(row.u) for row in rows]
    if not training:
        times = [process.validation_timestep(p % VALIDATION_TIMES) for _, p in items]
    timesteps = torch.tensor(times, dtype=torch.float32)

    reads = needs_image if part.latent_shape is None else needs_pixels

    varied = [augmentation.draw(seed, *drawn) if training else None for drawn in draws]

    def read(index: int, variation: Variation | None) -> tuple[int, Tensor | None]:
        """Index of the sample of ``part`` that is used, and its image if needed."""

        def image(candidate: int) -> Tensor | None:
            if reads:
                return part.image(candidate, variation)
            part.check(candidate)
            return None

        if skip_corrupt:
            return readable(part, index, seed, image)
        return index, image(index) if reads else None

    indices = [index - first for index, _ in items]
    taken, images = zip(*map(read, indices, varied), strict=True)
    labels = [
        null_label if drop and null_label is not None else part.label(index)
        for drop, index in zip(without_label, taken, strict=True)
    ]
    dropped = [
        drop or part.uncaptioned(index) for drop, index in zip(without_label, taken, strict=True)
    ]
    batch = {
        "timesteps": timesteps,
        "labels": torch.tensor(labels, dtype=torch.int64),
        "index": torch.tensor(indices, dtype=torch.int64) + first,
        "dropped": torch.tensor(dropped),
        "positions": torch.tensor([p for _, p in items]),
    }
    if skip_corrupt:
        corrupt = [index for index, other in zip(indices, taken, strict=True) if index != other]
        batch["corrupt"] = torch.tensor(corrupt, dtype=torch.int64) + first
    unseen = [_unseen(seed, *drawn, encoder_dropout) if training else () for drawn in draws]
    for name in encoder_dropout if training else ():
        each = zip(dropped, unseen, strict=True)
        batch[dropped_name(name)] = torch.tensor([drop or name in own for drop, own in each])
    if part.fields:
        given = [
            {**part.conditioning(index, variation), **(part.null_of(index) if drop else {})}
            for drop, index, variation in zip(dropped, taken, varied, strict=True)
        ]
        for row, index, names in zip(given, taken, unseen, strict=True):
            row |= _without_texts(row, part, index, names)
        if part.fields.keys() >= {*APART}:
            for row, drawn in zip(given, rows, strict=True):
                if name := _alone(training, drawn.drop, drop_probability):
                    row[name] = torch.zeros_like(row[name])
        batch.update({name: torch.stack([row[name] for row in given]) for name in part.fields})
    if FRAME_NOISE in part.fields:
        alone = [_alone(training, row.drop, drop_probability) for row in rows]
        for name in APART:
            lost = [drop or own == name for drop, own in zip(dropped, alone, strict=True)]
            batch[dropped_name(name)] = torch.tensor(lost)
    found = {"timesteps": timesteps} | ({"pixels": torch.stack(images)} if reads else {})
    visited = list(zip(taken, varied, strict=True)) if needs_image else []
    deviation = _stacked([part.deviation(*one) for one in visited])
    if needs_image:
        found["noise"] = torch.stack([row.noise for row in rows if row.noise is not None])
        if training and loss.noise_offset:
            offsets = torch.stack([offset_noise(seed, *drawn, noised[0]) for drawn in draws])
            sides = [1] * (len(noised) - 1)  # of videos also the frames
            found["noise"] += loss.noise_offset * offsets.view(len(draws), noised[0], *sides)
        if training and loss.weights_samples:
            batch["loss_weights"] = loss.weights(process, timesteps)
        masks = _stacked([part.mask(*one) for one in visited] if training else [])
        if masks is not None:
            batch["loss_mask"] = F.adaptive_avg_pool2d(masks, noised[-2:])
        if part.latent_shape is not None or deviation is not None:
            posteriors = [posterior_noise(seed, *visit, noised) for visit in visits]
            found["posterior"] = torch.stack(posteriors)
    if part.latent_shape is not None:
        batch |= found
    elif needs_image:
        batch |= noised_here(found, found["pixels"], deviation, process)
    if "noisy" not in batch and isinstance(dataset, Buckets):
        batch["noisy"] = torch.empty((len(items), *noised), device="meta")
    return batch


def _alone(training: bool, drop: float, probability: float) -> str:
    """Field of ``APART`` that a sample loses alone; empty for none."""
    share = int(drop / probability) if training and probability else 0
    return APART[share - 1] if 1 <= share <= len(APART) else ""


def _unseen(
    seed: int, index: int, position: int, probabilities: Mapping[str, float]
) -> tuple[str, ...]:
    """Text encoders that do not see the text of a sample at one visit."""
    count = max(map(place_of, probabilities), default=0)
    drops = encoder_drops(seed, index, position, count)
    return tuple(name for name, p in probabilities.items() if drops[place_of(name) - 1] < p)


def _without_texts(
    row: Mapping[str, Tensor], part: DiffusionDataset, index: int, encoders: Sequence[str]
) -> dict[str, Tensor]:
    """Fields of a sample with the empty caption's values where one of ``encoders`` makes them."""
    changed: dict[str, Tensor] = {}
    null = part.null_of(index) if encoders else {}
    for encoder in encoders:
        for name, boxes in part.text_parts[encoder].items():
            changed.setdefault(name, row[name].clone())
            for box in boxes:
                here = tuple(slice(*ends) for ends in box)
                changed[name][here] = null[name][here]
    return changed


def _stacked(rows: Sequence[Tensor | None]) -> Tensor | None:
    """Stack all rows, with zeros for a missing one; None if all are missing."""
    there = [row for row in rows if row is not None]
    if not there:
        return None
    return torch.stack([torch.zeros_like(there[0]) if row is None else row for row in rows])


def noised_here(
    batch: Mapping[str, Tensor],
    mean: Tensor,
    deviation: Tensor | None,
    process: DiffusionProcess,
) -> dict[str, Tensor]:
    """``noisy`` and ``target`` of a microbatch, from posteriors of its images.

    ``mean`` and ``deviation`` are ``[b, *latent_shape]``, stored or encoded by the step. A
    ``deviation`` of None stands for exact latents.
    """
    latents = mean
    if deviation is not None:
        latents = sampled(mean, deviation, batch["posterior"].to(mean, non_blocking=True))
    noise = batch["noise"].to(mean, non_blocking=True)
    noisy, target = process.noised(latents, noise, batch["timesteps"])
    return {"noisy": noisy, "target": target}


@dataclass(frozen=True)
class DiffusionLoader:
    """Endless iterable of microbatches; a plain value that can be pickled.

    ``process`` is that of the dataset's first part, ``other_processes`` those of the other parts.
    Every iterator starts at ``sampler.consumed_samples``. With ``num_workers``, torch DataLoader
    processes make the same microbatches in the same order. With a GPU, microbatches are in pinned
    memory, so that copies do not block the host.
    """

    dataset: DiffusionDataset
    sampler: MicrobatchSampler | PairSampler
    process: DiffusionProcess
    seed: int
    drop_probability: float = 0.0
    null_label: int | None = None
    split: Split = Split.TRAIN
    needs_image: bool = True
    num_workers: int = 0
    skip_corrupt: bool = False
    other_processes: tuple[DiffusionProcess, ...] = ()
    needs_pixels: bool = True
    loss: LossChoice = PLAIN
    augmentation: Augmentation = NO_AUGMENTATION
    encoder_dropout: Mapping[str, float] = field(default_factory=dict)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        pins = torch.cuda.is_available()
        if self.num_workers == 0:
            made = (self.microbatch(items) for items in self.sampler)
            return map(_pinned, made) if pins else made
        by_workers = DataLoader(
            _Microbatches(self),
            batch_size=None,
            sampler=self.sampler,
            num_workers=self.num_workers,
            pin_memory=pins,  # the pinning thread calls _Made.pin_memory
            generator=torch.Generator(),  # else it draws from the run's random numbers
            multiprocessing_context="fork",  # other methods would import torch again, which is slow
            worker_init_fn=_begin_worker,
        )
        return map(_microbatch, _made_by(by_workers))

    def microbatch(self, items: Sequence[Item]) -> dict[str, Tensor]:
        """Microbatch of these items (see make_microbatch)."""
        part, _ = self.dataset.part_of(items[0][0])
        return make_microbatch(
            self.dataset,
            items,
            (self.process, *self.other_processes)[part],
            self.seed,
            self.drop_probability,
            self.null_label,
            self.split,
            self.needs_image,
            self.skip_corrupt,
            self.needs_pixels,
            self.loss,
            self.augmentation,
            self.encoder_dropout,
        )


def _pinned(microbatch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy to pinned memory, except meta tensors."""
    return {
        name: tensor if tensor.is_meta else tensor.pin_memory()
        for name, tensor in microbatch.items()
    }


@dataclass(frozen=True)
class _Made:
    """A worker's microbatch, or its error; torch would pin every tensor of a plain mapping."""

    microbatch: dict[str, Tensor] | DataError

    def pin_memory(self) -> _Made:
        """Called by torch's pinning thread."""
        if isinstance(self.microbatch, DataError):
            return self
        return _Made(_pinned(self.microbatch))


def _begin_worker(number: int) -> None:
    """Set up a worker: it ends with its rank, and leaves stop signals (Ctrl-C) to the rank."""
    os.setsid()
    end_with_parent()


def _made_by(workers: DataLoader[Any]) -> Iterator[Any]:
    """Results of worker processes.

    A worker that was killed becomes a DataError; torch would raise an error of its pipe.
    """
    made = iter(workers)
    while True:
        try:
            yield next(made)
        except StopIteration:
            return
        except (RuntimeError, OSError, EOFError) as error:
            ended: list[str] = []
            for worker in getattr(made, "_workers", ()):
                worker.join(_GRACE_S if not ended else 0)
                if worker.exitcode is not None and worker.exitcode < 0:
                    name = signal.Signals(-worker.exitcode).name
                    ended.append(f"worker process {worker.pid} was killed by {name}")
            if not ended:
                raise
            remedy = "If host memory is full, use fewer --num-workers; 0 needs least."
            raise DataError("batches", ended, remedy) from error


def _microbatch(made: _Made) -> dict[str, Tensor]:
    """Microbatch of a worker; raises the worker's DataError."""
    if isinstance(made.microbatch, DataError):
        raise made.microbatch
    return made.microbatch


class _Microbatches(Dataset[_Made]):
    """Adapter for torch's DataLoader: microbatches by their items.

    DataErrors are returned as values, since torch would replace them by an error whose text is the
    worker's traceback.
    """

    def __init__(self, loader: DiffusionLoader) -> None:
        self.loader = loader

    def __getitem__(self, items: Sequence[Item]) -> _Made:
        try:
            return _Made(self.loader.microbatch(items))
        except DataError as error:
            return _Made(error)
