"""Data of a run: its diffusion process, its datasets, and each rank's microbatches."""

from __future__ import annotations

import argparse
import hashlib
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.core import parallel_state
from torch import Tensor

from megatron_pulse.backbone.appended_fields import APPENDED, IMAGE_EMBEDDING, TIME_IDS
from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.layer_selection import class_option
from megatron_pulse.backbone.shape_buckets import PATCH_CORNER, at_shape
from megatron_pulse.data.buckets import BucketSampler, buckets_of
from megatron_pulse.data.build import InpaintMasks, no_data_named, open_buckets, unvaried
from megatron_pulse.data.captions import cut_short
from megatron_pulse.data.data_record import DataRecord, record_of
from megatron_pulse.data.dataset import DataError, DiffusionDataset
from megatron_pulse.data.fields import WantedFields, fields_of_samples
from megatron_pulse.data.images.inpainting import reads_masks
from megatron_pulse.data.images.survey import require_readable, require_white, surveys
from megatron_pulse.data.microbatches import DiffusionLoader, Split
from megatron_pulse.data.opened_images import OpenedImages
from megatron_pulse.data.patchwise import PatchwiseSampler, patches_of
from megatron_pulse.data.picture_choice import RANDOM, ClipChoice
from megatron_pulse.data.sampler import MicrobatchSampler, PairSampler
from megatron_pulse.data.videos.folder import VideoFolder
from megatron_pulse.dataclass_flags import flag_name
from megatron_pulse.diffusion.learned_sigma import variational_bound
from megatron_pulse.diffusion.objectives import DiffusionProcess, predicted_mean
from megatron_pulse.diffusion.preference import PreferenceLoss
from megatron_pulse.diffusion.process_flags import DynamicShift
from megatron_pulse.diffusion.sampling_rules import NO_RULES, SampleSize
from megatron_pulse.encoders.text_recipe import VAE, is_text
from megatron_pulse.errors import Faults, collecting
from megatron_pulse.integration.flags.pulse_options import PulseOptions
from megatron_pulse.integration.loop_encoders import (
    DeviceEncoders,
    LoopEncoders,
    loop_encoders,
)
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.planner.program.plan import Plan
from megatron_pulse.planner.schedule.operations import BubbleTask
from megatron_pulse.profile.trainable import copies_reference
from megatron_pulse.runtime.collectives import gather_objects
from model_specs import known_frames, sampling_rules, text_recipe

_RARE = 1e-3
"""Number of samples that stands for none, since each shape has a share above 0."""
_MOST_NAMED = 20
"""Largest number of corrupt files named in a run's log; further ones are only counted."""


def can_drop(backbone: Backbone) -> bool:
    """True if a label can be dropped: the model has a null label, or reads no label."""
    if backbone.parts:
        return all(map(can_drop, backbone.parts.values()))
    return backbone.num_classes is None or backbone.null_label is not None


def makes_pixels(args: argparse.Namespace) -> bool:
    """True if a model trained with these flags makes pixels; false for latents or unknown data."""
    return _are_pixels(args.pulse_data, getattr(args, "pulse_encoders", None))


def _are_pixels(data: str | None, encoders: str | None) -> bool:
    if data is None or data.startswith("latents:"):
        return False
    if encoders is None:
        return True
    place = Path(encoders)  # if it has moved, it is taken for that of latents
    return place.is_dir() and not (place / VAE).is_dir()


def wanted_by(backbone: Backbone) -> WantedFields:
    """Fields that ``backbone`` reads of every sample of its first shape, for the data readers.

    The caller of the chain converts masks (``fields_of_samples``).
    Stored text must consist of the encoder states that the backbone's family reads.
    """
    recipe = None
    with suppress(ValueError):  # the family's text recipe is unknown
        recipe = text_recipe(backbone.name, backbone)
    return WantedFields(
        shape=backbone.sample_spec.shape,
        fields=fields_of_samples(backbone),
        num_classes=backbone.num_classes,
        class_option=class_option(backbone.record),
        made_by={} if recipe is None else {name: recipe.told(name) for name in recipe.fields},
    )


@contextmanager
def _naming_encoders(options: PulseOptions, wanted: WantedFields) -> Iterator[None]:
    """Add to a DataError on missing fields how a run can encode them itself."""
    try:
        yield
    except DataError as error:
        lost = [name for name in wanted.made_by if any(f" {name} (" in f for f in error.faults)]
        if options.encoders is not None or not lost:
            raise
        make = f"Encode captions in the loop (--pulse-encoders DIR provides {', '.join(lost)})"
        raise DataError(error.what, error.faults, f"{make}. {error.remedy}") from error


def _open_encoders(options: PulseOptions, backbone: Backbone) -> LoopEncoders | None:
    """Encoders that a run applies itself; raises Faults, also for noise that they do not draw."""
    faults, found = list[str](), None
    with collecting(faults):
        found = loop_encoders(options, backbone)
    embeds = options.encoders is not None and IMAGE_EMBEDDING in backbone.batch_fields
    draws = found.embeds if found is not None else embeds and bool(faults)
    if options.clips.frame_noise is not None and not draws:
        faults.append(
            "--pulse-frame-noise: no first frames of SVD are encoded in the loop. Leave it out"
        )
    if faults:
        raise Faults(faults)
    return found


def trained_process(process: DiffusionProcess, chain: Backbone) -> DiffusionProcess:
    """Process of training ``chain``, of samples of one shape: a dynamic shift becomes a number."""
    name = chain.record.get("name")
    rules = NO_RULES if name is None or chain.parts else sampling_rules(name)
    if not rules.trains_shifted:
        return process.for_tokens(chain.image_tokens)
    size = SampleSize(chain.sample_spec.shape, chain.image_tokens, process.num_timesteps)
    return rules.shifted(process, size)


def described(process: DiffusionProcess, chain: Backbone) -> str:
    """Line about the process of training ``chain``."""
    shift = trained_process(process, chain).shift
    return process.describe(chain.image_tokens, shift if isinstance(shift, float) else None)


class DiffusionData:
    """``--pulse-data``, opened for ``backbone`` and ``process`` at the backbone's resolutions.

    Raises DataError with all faults, if the data lack a field that the backbone reads or do not fit
    otherwise. ``images`` are those that this start has opened.
    """

    def __init__(
        self,
        options: PulseOptions,
        backbone: Backbone,
        process: DiffusionProcess,
        seed: int,
        images: OpenedImages | None = None,
    ) -> None:
        chains = [at_shape(backbone, shape_index) for shape_index in range(backbone.num_shapes)]
        patchwise = PATCH_CORNER in backbone.batch_fields
        sizes = [chain.sample_spec.shape[-2:] for chain in chains]
        if patchwise:  # one shape of data; patches have the noise of their wholes
            chains = chains[:1]
        at_sizes = [trained_process(process, chain) for chain in chains]
        self.process, self._known_frames = at_sizes[0], known_frames(backbone.record)
        self.dynamic_shift = process.shift if isinstance(process.shift, DynamicShift) else None
        """Shift that depends on a sample's size, which ``process`` has for the first shape."""
        self.description = " or ".join(dict.fromkeys(described(process, each) for each in chains))
        self._seed = seed
        self._class_dropout = options.class_dropout
        self._encoder_dropout = {
            name: float(rate) for name, rate in options.encoder_dropout.items() if float(rate)
        }
        self._loss = options.training_loss
        self._copies_reference = copies_reference(backbone.record)
        self._skip_corrupt = options.skip_corrupt
        self._bucket_batch = options.bucket_batch
        self._caption_flags = [
            flag_name(f"pulse_{name}")
            for name, given in (
                ("default_caption", options.default_caption),
                ("caption_prefix", options.augmented.caption_prefix),
                ("shuffle_tags", options.augmented.shuffle_tags),
            )
            if given
        ]
        self._times = options.validation_times
        self.waited_s = 0.0
        """Seconds for which this process has waited for training microbatches."""
        self._corrupt: set[str] = set()
        """Corrupt training files skipped in this process."""
        self._null_label = backbone.null_label
        self._num_classes = backbone.num_classes
        self._class_option = class_option(backbone.record)
        self.homes: dict[str, tuple[int, ...]] = {}
        """Pipeline devices of each encoder in the loop, from the plan."""
        self._num_channels = backbone.sample_spec.shape[0]
        self._bound = 1.0 if _are_pixels(options.data, options.encoders) else math.inf
        for chain in chains:
            _require_prediction(chain, options.self_conditioning)
            if self._loss.learned_sigma:
                _require_sigma(chain)
        if options.data is None:
            raise no_data_named()
        images = images or OpenedImages()
        images.clips = options.clips
        self.in_loop = _open_encoders(options, backbone)
        """Encoders that the run applies itself."""
        autoencodes = self.in_loop is not None and self.in_loop.autoencodes
        _require_appended(options, backbone, autoencodes=autoencodes)
        wanted = [wanted_by(chain) for chain in chains]
        if self.in_loop is not None:
            wanted = [self.in_loop.unencoded(one) for one in wanted]
        with _naming_encoders(options, wanted[0]):
            self.train, self.validation, shapes = open_buckets(
                options.data,
                wanted,
                options.default_caption,
                options.validation_data,
                options.masks,
                pairs=self._loss.is_preference,
                prefixes=options.augmented.caption_prefix,
                images=images,
                inpaint=InpaintMasks(options.inpaint_masks, seed),
            )
        self._augmentation = options.augmented.augmentation
        if any(isinstance(source, VideoFolder) for source in self.train.sources):
            moved = options.clips.motion_bucket != ClipChoice().motion_bucket
            if moved and TIME_IDS not in backbone.batch_fields:
                fault = "the backbone reads no motion, as SVD does"
                raise DataError("--pulse-motion-bucket", [fault], "Leave it out.")
            random = options.augmented.clip_start == "random"
            self._augmentation = replace(self._augmentation, random_start=random)
        elif options.clips != ClipChoice():
            names = [flag_name(f"pulse_{name}") for name in vars(options.clips)]
            fault = f"{', '.join(names)}: it has no films"
            raise DataError(f"--pulse-data {options.data}", [fault], "Leave these flags out.")
        if faults := list(unvaried(self.train, self._augmentation)):
            remedy = "Leave these flags out, or give other data."
            raise DataError(f"--pulse-data {options.data}", faults, remedy)
        if self._encoder_dropout:
            _require_encoders(f"--pulse-data {options.data}", self.train, self._encoder_dropout)
        self._patches: Mapping[Split, DiffusionDataset] = {}
        """In patch-wise training, training samples with their patches, and whole ones."""
        self.shares: tuple[float, ...] = ()
        """Fraction of the training microbatches of each of the backbone's shapes."""
        self._processes = [at_sizes[shape_index] for shape_index in shapes]
        self._shapes = shapes
        if patchwise:
            self._begin_patches(backbone, sizes)
        elif backbone.num_shapes > 1:
            counts = dict(zip(shapes, map(len, self.train.parts), strict=True))
            every = [counts.get(shape, 0) for shape in range(backbone.num_shapes)]
            self.shares = tuple(max(count, _RARE) / len(self.train) for count in every)
        self.held_out, _ = max(
            zip(self.validation.parts, shapes, strict=True),
            key=lambda each: (len(each[0]) > 0, each[1] == 0),
        )
        """Validation samples of the first shape, if any, else of the first part."""

    def _begin_patches(self, backbone: Backbone, sizes: Sequence[tuple[int, ...]]) -> None:
        """Train on patches of ``sizes`` too. Raises DataError where that cannot be."""
        faults = []
        if self.train.latent_shape is not None:
            faults.append("the autoencoder runs in the loop, which encodes whole pictures")
        if self._loss.is_preference:
            faults.append("--pulse-loss dpo compares whole pictures")
        if faults:
            remedy = "Write latents ('pulse data write-latents'), or leave patchwise out."
            raise DataError("--pulse-option patchwise", faults, remedy)
        whole_and_patches = [(height, width) for height, width in sizes]
        step = backbone.patch_size
        self._patches = {
            Split.TRAIN: patches_of(self.train, whole_and_patches, step),
            Split.VALIDATION: patches_of(self.validation, whole_and_patches[:1], step),
        }
        self.shares = backbone.shares
        self._processes *= len(sizes)
        self._augmentation = replace(self._augmentation, patchwise=True)

    @property
    def cautions(self) -> list[str]:
        """Notes on training data left unused, for the log; reads captions."""
        return [*self.train.cautions, *cut_short(self.train), *self._without_effect()]

    @property
    def several_shapes(self) -> bool:
        """True if the samples have several shapes, which come in groups of one shape."""
        return len(self.train.parts) > 1

    def shapes_digest(self) -> str:
        """Digest of the shapes of all samples, which ranks find by themselves; empty for one."""
        if not self.several_shapes:
            return ""
        halves = (self.train, self.validation)
        names = [
            (number, part.revision(i))
            for half in halves
            for number, part in enumerate(half.parts)
            for i in range(len(part))
        ]
        return hashlib.sha256(repr(names).encode()).hexdigest()[:16]

    def _without_effect(self) -> Iterator[str]:
        """Notes on labels without samples, and on a flag without effect."""
        most, given = self._num_classes or 0, self.train.num_classes
        if given < most:
            labels = (
                f"label {given} is" if given == most - 1 else f"labels {given} to {most - 1} are"
            )
            fewer = f" (--pulse-option {self._class_option}={given})" if self._class_option else ""
            yield (
                f"the data has {given} class{'es' * (given > 1)}, the backbone {most}{fewer}: "
                f"{labels} never trained"
            )
        if (
            self._caption_flags
            and self.in_loop is None
            and not any(map(is_text, self.train.fields))
        ):
            yield f"{', '.join(self._caption_flags)} has no effect: the backbone reads no captions"
        if self._bucket_batch is not None and not self.several_shapes:
            yield "--pulse-bucket-batch has no effect: all samples have one shape"

    def survey(self) -> list[str]:
        """Describe the image files for the log; opens all of them.

        Raises DataError with each unreadable file, unless corrupt files are skipped.
        """
        found = surveys([self.train, self.validation])
        if not self._skip_corrupt:
            require_readable(found)
        require_white(found)
        held = f"{len(self.train):,} training samples, {len(self.validation):,} validation samples"
        told = [each.describe() for each in found]
        told = [f"{told[0]}; {held}"] if len(told) == 1 else [*told, *[f"all: {held}"] * bool(told)]
        if self.several_shapes:
            found_in = buckets_of(self.train, self.validation)
            told += [bucket.describe(of=len(self.train)) for bucket in found_in]
            in_a_row = f"{self._bucket_batch} samples" if self._bucket_batch else "a global batch"
            told.append(
                f"buckets: {in_a_row} in a row have one shape. Samples left at the end of an epoch "
                "come first in the next one"
            )
        if self._patches:
            shapes = [part.image_shape for part in self._patches[Split.TRAIN].parts]
            told.append(
                "patch-wise training: "
                + ", ".join(
                    f"{share:.0%} of steps see {'x'.join(map(str, shape))}"
                    for share, shape in zip(self.shares, shapes, strict=True)
                )
            )
        return told + [f"warning: {caution}" for each in found for caution in each.cautions]

    def count_corrupt(self) -> int:
        """Number of corrupt training files that all ranks have skipped (collective)."""
        if not self._skip_corrupt:
            return 0
        return len(set().union(*gather_objects(self._corrupt)))

    def place_encoders(self, plan: Plan, given: PlanFile | None) -> list[str]:
        """Assign the encoders in the loop to the devices of the plan; return the faults."""
        filled = () if given is None else given.schedule.bubble_tasks
        if self.in_loop is None:
            names = ", ".join(task.name for task in filled)
            told = (
                f"the plan runs {names} in pipeline bubbles. Give --pulse-encoders DIR, or, if "
                "the data has their results, a plan tuned without --encoders"
            )
            return [told] if names else []
        self.homes = self.in_loop.homes(filled, plan.placement.num_devices)
        return self.in_loop.filling_faults(filled, plan.routes, plan.backbone)

    def describe_encoders(self, bubble_tasks: Sequence[BubbleTask], num_devices: int) -> list[str]:
        """Lines on when and where each encoder in the loop runs."""
        return [] if self.in_loop is None else [self.in_loop.describe(bubble_tasks, num_devices)]

    @property
    def encoded_by(self) -> dict[str, str]:
        """Digests of the encoders in the loop, by folder name."""
        return {} if self.in_loop is None else self.in_loop.encoded_by

    def record(self, whole: bool) -> dict[str, list[DataRecord]]:
        """The record of each dataset, of the one chain; reads of all files if ``whole``."""
        pairs = zip(self.train.members, self.validation.members, strict=True)
        return {"": [record_of(*pair, self._num_classes is not None, whole) for pair in pairs]}

    def encoders(self, device: int) -> DeviceEncoders:
        """Load the encoders in the loop of one pipeline device, with weights."""
        assert self.in_loop is not None
        return DeviceEncoders(self.in_loop, self.homes, device, self._processes[0])

    def loss(self, prediction: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Training loss of a microbatch, in fp32.

        A prediction with twice the sample's channels has a learned sigma in its second half, which
        counts with --pulse-learned-sigma only (see predicted_mean).
        """
        mean, target = self._predicted(prediction, batch)
        if "loss_weights" in batch or "loss_mask" in batch:
            weights, mask = batch.get("loss_weights"), batch.get("loss_mask")
            loss = self._loss.error(mean, target, weights, mask)
        else:
            loss = self.process.loss(mean, target)
        if not self._loss.learned_sigma:
            return loss
        noisy = batch["noisy"].to(mean.device, non_blocking=True)[:, : self._num_channels]
        bounds = variational_bound(self.process, prediction, noisy, target, batch["timesteps"])
        return loss + bounds.mean()

    def _predicted(self, prediction: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Predicted mean and its target, without frames that are given."""
        mean = predicted_mean(prediction, self._num_channels)
        target = batch["target"].to(mean.device, non_blocking=True)
        if not self._known_frames:
            return mean, target
        return mean[:, :, self._known_frames :], target[:, :, self._known_frames :]

    def preference(self) -> PreferenceLoss | None:
        """New preference loss, if that is what is trained."""
        if not self._loss.is_preference:
            return None
        of = self._sample_errors, self._loss.beta
        return PreferenceLoss(*of, is_copied=self._copies_reference)

    def _sample_errors(self, prediction: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Error of each sample of a microbatch, fp64 ``[b]``; weighted in training."""
        mean, target = self._predicted(prediction, batch)
        return self._loss.errors(mean, target, batch.get("loss_weights"))

    def sample_losses(self, prediction: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Validation loss of each sample of a microbatch: its mean squared error, fp32 ``[b]``."""
        mean, target = self._predicted(prediction, batch)
        return (mean.float() - target.float()).square().flatten(1).mean(1)

    @property
    def num_validation(self) -> int:
        """Number of validation losses: of every sample, at each of its times."""
        return self._times * len(self.validation)

    def estimate(self, prediction: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Clean samples implied by the predictions for a microbatch, in fp32.

        Pixels are clamped to [-1, 1], as in sampling.
        """
        mean = predicted_mean(prediction, self._num_channels).float()
        noisy = batch["noisy"].to(mean.device, non_blocking=True)[:, : self._num_channels]
        clean = self.process.clean(noisy, mean, batch["timesteps"])
        return clean.clamp(-self._bound, self._bound)

    def iterators(
        self, args: argparse.Namespace, plan: Plan, chain: int = 0
    ) -> tuple[Iterator[dict[str, Tensor]], Iterator[dict[str, Tensor]]]:
        """Endless (training, validation) microbatches of this rank, for one chain of a cascade.

        Every evaluation reads the same validation samples in the same order, shuffled by the seed,
        with the same noise and times. Losses of evaluations are thus comparable. In training, a
        shape's microbatches have the size of ``plan.shapes``.
        """
        placement = plan.placement
        stages = placement.stages_of_device(parallel_state.get_pipeline_model_parallel_rank())
        num_samples = args.eval_iters * args.eval_global_batch_size
        device = parallel_state.get_pipeline_model_parallel_rank()
        reads_pixels = self.in_loop is None or device in self.homes.get(VAE, ())

        first, last = placement.starts[chain], placement.ends[chain]
        first_to_read = first in stages and not parallel_state.get_tensor_model_parallel_rank()

        def loader(split: Split) -> Iterator[dict[str, Tensor]]:
            training = split is Split.TRAIN
            dataset = self._read_in(split)
            if training and self.several_shapes and args.rank == 0:
                self._tell_small(self._bucket_batch or args.global_batch_size)
            batch = args.global_batch_size if training else args.eval_global_batch_size
            sampler = self._sampler(
                split,
                batch,
                consumed_samples=args.consumed_train_samples if training else 0,
                micro_batch_size=args.micro_batch_size if training else args.eval_micro_batch_size,
                sizes_of_shapes=_sizes_of(plan) if training else (),
                data_parallel_rank=parallel_state.get_data_parallel_rank(),
                data_parallel_size=parallel_state.get_data_parallel_world_size(),
                period=None if training else num_samples or None,
                repeats=1 if training else self._times,
            )
            batches = iter(
                self._loader(
                    split,
                    sampler,
                    needs_image=first in stages or last in stages,
                    num_workers=args.num_workers,
                    needs_pixels=reads_pixels,
                )
            )
            if training:
                batches = self._timed(batches)
            if not self._skip_corrupt:
                return batches
            return self._counted(batches, dataset, training, first_to_read)

        return loader(Split.TRAIN), loader(Split.VALIDATION)

    def _tell_small(self, in_a_row: int) -> None:
        """Warn of shapes with fewer samples than are drawn in a row."""
        few = [
            f"{len(part)} of {'x'.join(map(str, part.image_shape))}"
            for part in self.train.parts
            if 0 < len(part) < in_a_row
        ]
        if few:
            least = min(len(part) for part in self.train.parts if len(part))
            print(
                f"warning: {in_a_row} consecutive samples have one shape, but the data has only "
                f"{', '.join(few)}: these come several times together, then not for some epochs "
                f"(the fewest for {in_a_row / least:.0f}). Use --pulse-bucket-batch N, a smaller "
                "number, to mix shapes within a step",
                flush=True,
            )

    def first_microbatches(
        self, plan: Plan, micro_batch_size: int, global_batch_size: int
    ) -> Iterator[dict[str, Tensor]]:
        """Microbatches of all replicas from the beginning of training, in one process."""
        sampler = self._sampler(
            Split.TRAIN,
            global_batch_size,
            consumed_samples=0,
            micro_batch_size=micro_batch_size,
            sizes_of_shapes=_sizes_of(plan),
            data_parallel_rank=0,
            data_parallel_size=1,
        )
        return iter(self._loader(Split.TRAIN, sampler))

    def _sampler(
        self,
        split: Split,
        global_batch_size: int,
        sizes_of_shapes: Sequence[int] = (),
        **places: Any,
    ) -> MicrobatchSampler | PairSampler:
        """Sampler of a split; ``places`` assign samples to ranks.

        ``sizes_of_shapes`` are microbatch sizes of the backbone's shapes, if these have their own.
        """
        if split is Split.TRAIN and self._patches:
            return PatchwiseSampler(
                len(self.train),
                shares=self.shares,
                group_size=global_batch_size,
                seed=self._seed,
                micro_batch_sizes=sizes_of_shapes,
                **places,
            )
        parts = (self.train if split is Split.TRAIN else self.validation).parts
        sizes = [len(part) for part in parts]
        in_a_row = self._bucket_batch or global_batch_size
        micro = [sizes_of_shapes[shape] for shape in self._shapes] if sizes_of_shapes else []
        if self._loss.is_preference:  # all numbers of samples become those of pairs
            sizes, in_a_row = [size // 2 for size in sizes], in_a_row // 2
            micro = [size // 2 for size in micro]
            for name in ("consumed_samples", "micro_batch_size", "period"):
                if places.get(name) is not None:
                    places[name] //= 2
        order = {**places, "seed": self._seed}
        if len(sizes) > 1:
            sampler: MicrobatchSampler = BucketSampler(
                sizes, **order, group_size=in_a_row, micro_batch_sizes=micro
            )
        elif micro:
            sampler = MicrobatchSampler(sizes[0], **{**order, "micro_batch_size": micro[0]})
        else:
            sampler = MicrobatchSampler(sizes[0], **order)
        return PairSampler(sampler) if self._loss.is_preference else sampler

    def _loader(
        self, split: Split, sampler: MicrobatchSampler | PairSampler, **how: Any
    ) -> DiffusionLoader:
        return DiffusionLoader(
            self._read_in(split),
            sampler,
            self._processes[0],
            self._seed,
            self._class_dropout,
            self._null_label,
            split,
            skip_corrupt=self._skip_corrupt,
            other_processes=tuple(self._processes[1:]),
            loss=self._loss,
            augmentation=self._augmentation,
            encoder_dropout=self._encoder_dropout,
            **how,
        )

    def _read_in(self, split: Split) -> DiffusionDataset:
        """Dataset whose samples microbatches of ``split`` number."""
        whole = self.train if split is Split.TRAIN else self.validation
        return self._patches.get(split, whole)

    def _timed(self, batches: Iterator[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        """Add the time that each of ``batches`` takes to ``waited_s``."""
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            self.waited_s += time.perf_counter() - began
            if batch is None:
                return
            yield batch

    def _counted(
        self,
        batches: Iterator[dict[str, Tensor]],
        dataset: DiffusionDataset,
        training: bool,
        tells: bool,
    ) -> Iterator[dict[str, Tensor]]:
        """Count corrupt files and drop indices of samples from ``batches``; the first are named."""
        files: dict[int, Sequence[str]] = {}
        named: set[str] = set()
        for batch in batches:
            for index in batch.pop("corrupt").tolist():
                if index not in files:
                    files[index] = dataset.damaged(index)
                if training:
                    self._corrupt.update(files[index])
                for file in files[index] if tells else ():
                    if file in named or len(named) == _MOST_NAMED:
                        continue
                    named.add(file)
                    more = "; further ones are not listed" if len(named) == _MOST_NAMED else ""
                    print(f"corrupt, skipped: {file}{more}", flush=True)
            yield batch


def _sizes_of(plan: Plan) -> list[int]:
    return [shape.micro_batch_size for shape in plan.shapes]


def _require_encoders(what: str, data: DiffusionDataset, encoders: Collection[str]) -> None:
    """Raise DataError unless the parts of all text fields that ``encoders`` make are known."""
    known = set.intersection(*({*part.text_parts} for part in data.parts))
    if not known and any(map(is_text, data.fields)):
        raise DataError(
            what,
            ["--pulse-encoder-dropout: it does not record which text encoder made which states"],
            "Give its 'pulse data write-latents' command again, which adds the record.",
        )
    faults = [
        f"--pulse-encoder-dropout: the backbone reads no texts of {name}"
        + (f", but of {', '.join(sorted(known))}" if known else "")
        for name in encoders
        if name not in known
    ]
    if faults:
        raise DataError(what, faults, "Leave these encoders out.")


def _require_appended(options: PulseOptions, backbone: Backbone, *, autoencodes: bool) -> None:
    """Raise DataError if appended fields cannot be made, or a flag has none to make."""
    what = f"backbone {backbone.name}"
    appended = sorted(APPENDED & set(backbone.batch_fields))
    if options.inpaint_masks != RANDOM and not reads_masks(appended):
        fault = f"--pulse-inpaint-masks {options.inpaint_masks}: it reads no masks"
        raise DataError(what, [fault], "Leave the flag out.")
    makes_frames = IMAGE_EMBEDDING in backbone.batch_fields  # of SVD
    if appended and autoencodes and not makes_frames:
        raise DataError(
            what,
            [f"it reads {', '.join(appended)}, which the autoencoder in the loop does not make"],
            "Write latents first: 'pulse data write-latents --encoders DIR --backbone NAME'.",
        )


def _require_sigma(backbone: Backbone) -> None:
    """Raise DataError unless the backbone predicts a variance behind the mean."""
    num_channels, given = backbone.sample_spec.shape[0], backbone.output_spec.shape[0]
    if given != 2 * num_channels:
        raise DataError(
            f"backbone {backbone.name}",
            [f"--pulse-learned-sigma: it predicts {given} channels for samples of {num_channels}"],
            "A learned sigma needs twice the sample's channels; leave the flag out.",
        )


def _require_prediction(backbone: Backbone, self_conditioning: float | None) -> None:
    """Raise DataError unless the backbone predicts the mean, perhaps with the variance behind it.

    A self-conditioned backbone takes twice the channels that it predicts.
    """
    taken, given = backbone.input_spec.shape, backbone.output_spec.shape
    fault, remedy = f"it takes samples of {taken} but predicts {given}", ""
    if backbone.takes_prediction:
        if self_conditioning is not None:
            return
        remedy = "Half of its channels are for self-conditioning: give --pulse-self-conditioning P."
    elif self_conditioning is not None:
        fault = f"--pulse-self-conditioning {self_conditioning:g}: {fault}"
        remedy = (
            "Self-conditioning needs twice as many input channels as predicted ones, e.g. UNets, "
            "SD3, PixArt and diffusers classes with --pulse-option in_channels=8 and "
            "out_channels=4."
        )
    elif given in (taken, (2 * taken[0], *taken[1:])):
        return
    else:
        remedy = "A prediction must have the sample's shape, or twice its channels (learned sigma)."
    raise DataError(f"backbone {backbone.name}", [fault], remedy)
