"""Sampling from a checkpoint on one process."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from megatron_pulse.backbone.appended_fields import (
    APPENDED,
    FRAME_NOISE,
    IMAGE_LATENT,
    INPAINTING,
    KNOWN_VIDEO,
    REFERENCE_IMAGE,
)
from megatron_pulse.backbone.chain import COMPUTE, Backbone
from megatron_pulse.backbone.shape_buckets import PATCH_CORNER
from megatron_pulse.data.captions import WordEncoder
from megatron_pulse.data.data_record import recorded_data, recorded_provenance
from megatron_pulse.data.dataset import LATENT, Framing
from megatron_pulse.data.fields import APART, PICTURE_STATES, SIZES, constants, made_otherwise
from megatron_pulse.data.images.conditioning import CONDITIONING
from megatron_pulse.data.picture_choice import RANDOM
from megatron_pulse.diffusion.noise import diffusers_noises
from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.diffusion.process_flags import (
    DynamicShift,
    FlowGrid,
    Objective,
    ProcessChoice,
    SamplingNoise,
)
from megatron_pulse.diffusion.process_from_flags import chosen_process
from megatron_pulse.diffusion.sampling import Fields, GuidanceScale, sample
from megatron_pulse.diffusion.sampling_rules import NO_RULES, SampleSize, SamplingRules
from megatron_pulse.encoders.text_encoders import TextEncoders
from megatron_pulse.encoders.tokens import changed_since, recorded_by
from megatron_pulse.errors import format_faults
from megatron_pulse.integration.checkpoint.folders import Step
from megatron_pulse.integration.checkpoint.published_weights import load_whole
from megatron_pulse.integration.checkpoint.saved_run import SavedRun, read_saved_run
from megatron_pulse.integration.flags.pulse_options import pulse_options
from megatron_pulse.integration.flags.sample_flags import DEFAULT_BATCH
from megatron_pulse.integration.training_data import (
    DiffusionData,
    makes_pixels,
    wanted_by,
)
from megatron_pulse.runtime.tensor_settings import compute_device
from model_specs import compare_models, known_frames, sampling_rules

NO_FIELDS: Fields = MappingProxyType({})


class Predict(Protocol):
    """Prediction for ``noisy [b, ...]``, in forward passes of ``batch_size`` rows (None: one).

    Bits depend on the rows of a pass.
    """

    def __call__(
        self, noisy: Tensor, timesteps: Tensor, conditioning: Fields, batch_size: int | None = None
    ) -> Tensor:
        """Prediction of the model's shape."""
        ...


@dataclass(frozen=True)
class TrainedModel:
    """Backbone with the weights of a checkpoint: ``predict(x_t, timesteps, conditioning)``.

    ``process`` is the diffusion process of its training, at the backbone's own resolution.
    """

    backbone: Backbone
    process: DiffusionProcess
    predict: Predict
    arguments: argparse.Namespace
    folder: Path
    changes: tuple[str, ...] = ()
    """Differences from the model as it was trained, in words."""
    move: Callable[[torch.device], object] = lambda device: None
    """Move the weights to a device."""
    dynamic_shift: DynamicShift | None = None
    """Shift of flow that depends on the sample's size, if the process has one."""

    @property
    def rules(self) -> SamplingRules:
        """Rules of the pipeline of the backbone's class."""
        name = self.backbone.record.get("name")
        return NO_RULES if name is None or self.backbone.parts else sampling_rules(name)

    def process_of(self, num_steps: int) -> DiffusionProcess:
        """Process of sampling in a number of steps, shifted as by the class's pipeline."""
        if self.dynamic_shift is None:
            return self.process
        shape, num_tokens = self.backbone.sample_spec.shape, self.backbone.image_tokens
        size = SampleSize(shape, num_tokens, num_steps)
        return self.rules.shifted(replace(self.process, shift=self.dynamic_shift), size)

    def flow_grid(self, asked: FlowGrid | None) -> FlowGrid:
        """Grid of flow's times: ``asked``, or that of an imported model's pipeline."""
        if asked is not None:
            return asked
        is_flow = self.process.objective == Objective.FLOW
        return self.rules.flow_grid if is_flow and self.process.scheduler else FlowGrid.EVEN

    @property
    def known_frames(self) -> int:
        """Number of first frames that a sample is given."""
        return known_frames(self.backbone.record)

    @property
    def num_classes(self) -> int | None:
        """Number of classes; None if the model is not class-conditional."""
        return self.backbone.num_classes

    @property
    def is_conditional(self) -> bool:
        """True if it reads a class, a text or anything else beside the sample and its time."""
        return bool(set(self.backbone.batch_fields) - {"timesteps"})

    @property
    def makes_pixels(self) -> bool:
        """True if the model was trained on pixels in [-1, 1], and not on latents or imported."""
        return makes_pixels(self.arguments)

    @property
    def no_words(self) -> str:
        """Reason why captions cannot be encoded as words; empty if the model was trained on such.

        Training on ``captions:`` data encodes words without a text encoder.
        """
        data = self.arguments.pulse_data or "unknown data"
        if data.startswith(("captions:", "pairs:", "videos:")):
            return ""
        return (
            f"{self.folder} was trained on {data} without captions, so its text encoders are "
            "unknown. Give their pipeline folder (--encoders DIR), or use --from-data"
        )

    @property
    def word_encoder(self) -> WordEncoder:
        """Encoder of captions as words, for the text that the backbone reads."""
        return WordEncoder(wanted_by(self.backbone).fields)

    @property
    def is_self_conditioned(self) -> bool:
        """True if the model reads its own prediction of the previous sampling step."""
        return getattr(self.arguments, "pulse_self_conditioning", None) is not None


@dataclass(frozen=True)
class Request:
    """Requested samples: conditioning ``fields [count, ...]``, and ``null`` values if dropped.

    Null values are of all samples, or ``[count, ...]`` as the fields.
    """

    count: int
    fields: Fields
    null: Fields
    drawn_before: tuple[int, ...] = ()
    """Shape of what a diffusers pipeline's generator draws before the noise of samples."""

    def part(self, first: int, end: int) -> Request:
        """Request for the samples from ``first`` to ``end`` (excluded).

        Beyond the last sample it is repeated.
        """
        rows = self.rows(first, end)
        fields = {name: value[rows] for name, value in self.fields.items()}
        null = {
            name: value[rows] if value.dim() == fields[name].dim() else value
            for name, value in self.null.items()
        }
        return replace(self, count=end - first, fields=fields, null=null)

    def rows(self, first: int, end: int) -> Tensor:
        """Indices of the samples of a part."""
        return torch.arange(first, end).clamp(max=self.count - 1)


def request_classes(
    model: TrainedModel, labels: Sequence[int], beside: Fields = NO_FIELDS
) -> Request:
    """Request for samples of these classes, with the fields in ``beside``.

    A model that is not class-conditional ignores the classes.

    Raises ValueError if the model reads more fields.
    """
    return _request(model, len(labels), {"labels": torch.tensor(labels), **beside}, {})


def request_prompts(
    model: TrainedModel, prompts: Sequence[str], beside: Fields = NO_FIELDS
) -> Request:
    """Request for samples of prompts encoded like captions of the training, with fields ``beside``.

    Raises ValueError if the model was not trained on captions.
    """
    if model.no_words:
        raise ValueError(model.no_words)
    encode = model.word_encoder
    if not encode.fields:
        raise ValueError(f"{model.backbone.name} reads no text")
    encoded = [encode(prompt) for prompt in prompts]
    given = {name: torch.stack([row[name] for row in encoded]) for name in encode.fields}
    given["labels"] = torch.zeros(len(prompts), dtype=torch.int64)
    return _request(model, len(prompts), given | dict(beside), encode(""))


def request_encoded(
    model: TrainedModel,
    prompts: Sequence[str],
    encode: TextEncoders,
    pixel_size: tuple[int, int],
    negative: str | None = None,
    beside: Fields = NO_FIELDS,
    pictures: Sequence[Tensor] = (),
) -> Request:
    """Request for samples of prompts encoded by ``encode``, with the fields in ``beside``.

    Guidance is away from ``negative``, or from the empty prompt if None. ``pixel_size`` is the size
    (height, width) of the pictures. ``pictures`` are read beside the prompts by an encoder that
    ``sees``. Raises ValueError if the model reads more fields.
    """
    if pictures and encode.recipe.sees:
        pairs = list(zip(prompts, pictures, strict=True))
        rows = [encode(prompt, picture=picture) for prompt, picture in pairs]
        against = [encode(negative or "", True, picture) for picture in pictures]
        null = {name: torch.stack([row[name] for row in against]) for name in against[0]}
    else:
        encoded = {prompt: encode(prompt) for prompt in dict.fromkeys(prompts)}
        rows = [encoded[prompt] for prompt in prompts]
        null = encode.null() if negative is None else encode(negative, negative=True)
    given = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    wanted = wanted_by(model.backbone).fields
    defaults = constants(wanted, {n: wanted[n] for n in given}, Framing.whole(pixel_size))
    given = {n: v.expand(len(prompts), *v.shape) for n, v in defaults.items()} | given
    given["labels"] = torch.zeros(len(prompts), dtype=torch.int64)
    given |= dict(beside)
    return _request(model, len(prompts), given, null)


def request_from_data(model: TrainedModel, indices: Sequence[int]) -> Request:
    """Request with the conditioning of the validation samples ``indices``.

    Reads the data set of the training, at its path of that time. Raises ValueError if the data set
    cannot be read or has fewer samples.
    """
    if model.arguments.pulse_data is None:
        raise ValueError(
            f"{model.folder} holds imported weights without data. Name a data set: --data"
        )
    # A run with a plan takes its backbone from there, not from a flag.
    options = replace(pulse_options(model.arguments), backbone=model.backbone.record["name"])
    seed = model.arguments.seed
    data = DiffusionData(options, model.backbone, model.process, seed)
    _require_alike(model, data)
    held_out = data.held_out
    if max(indices) >= len(held_out):
        raise ValueError(f"the data has {len(held_out)} validation samples")
    rows = [
        {"labels": torch.tensor(held_out.label(i)), **held_out.conditioning(i)} for i in indices
    ]
    null = held_out.null_conditioning()
    if data.in_loop is not None and (texts := data.in_loop.texts(None)) is not None:
        if changed := changed_since(data.in_loop.folder, recorded_by(model.arguments)):
            remedy = "Give the folder with the original encoders: --encoders DIR."
            raise ValueError(format_faults(f"encoders {data.in_loop.folder}", changed, remedy))
        rows = [row | texts.encode(row) for row in rows]
        null = null | texts.null()
    if data.in_loop is not None and data.in_loop.embeds:
        shapes = {name: model.backbone.batch_fields[name].shape for name in APART}
        encode = data.in_loop.frame_fields(shapes)
        rows = [
            row | encode(held_out.image(i), row.pop(FRAME_NOISE))
            for i, row in zip(indices, rows, strict=True)
        ]
    given = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    given |= _sizes(model, len(indices), held_out.pixel_size)
    return _request(model, len(indices), given, null)


def _require_alike(model: TrainedModel, data: DiffusionData) -> None:
    """Raise ValueError if other encoders made the data's conditioning than that of the training."""
    trained = recorded_provenance(recorded_data(model.arguments).get("", ())) or {}
    given = recorded_provenance(data.record(whole=False)[""]) or {}
    given.pop(LATENT, None)
    if faults := made_otherwise(given, trained):
        remedy = "Give data of the encoders of the training: --data SPEC."
        raise ValueError(format_faults(f"the data {model.arguments.pulse_data}", faults, remedy))


def _sizes(model: TrainedModel, count: int, size: tuple[int, int]) -> dict[str, Tensor]:
    """Size conditioning for the size asked for, independent of the data's images."""
    wanted = {
        name: spec for name, spec in wanted_by(model.backbone).fields.items() if name in SIZES
    }
    values = constants(wanted, {}, Framing.whole(size))
    return {name: value.expand(count, *value.shape) for name, value in values.items()}


def _request(model: TrainedModel, count: int, given: Fields, null: Fields) -> Request:
    """Fields that the backbone reads, from those given and from defaults."""
    wanted = wanted_by(model.backbone)
    if model.makes_pixels:
        text = {name: spec for name, spec in wanted.fields.items() if name in given}
        height, width = wanted.shape[-2:]
        whole = Framing.whole((height, width))
        defaults = constants(wanted.fields, text, whole)
        given = {name: v.expand(count, *v.shape) for name, v in defaults.items()} | dict(given)
    if PATCH_CORNER in wanted.fields:
        given = {PATCH_CORNER: torch.zeros(count, 2, dtype=torch.int64), **given}
    read = set(model.backbone.batch_fields) - {"timesteps"}
    if lacking := read - set(given):
        with_ = ["--prompt"] if lacking - {CONDITIONING} - APPENDED else []
        with_ += ["--control-image"] if CONDITIONING in lacking else []
        with_ += ["--image and --mask"] if lacking & {*INPAINTING} else []
        with_ += ["--image"] if lacking & {KNOWN_VIDEO, IMAGE_LATENT, REFERENCE_IMAGE} else []
        with_ = [] if lacking & PICTURE_STATES else with_
        raise ValueError(
            f"{model.backbone.name} also reads {', '.join(sorted(lacking))}. Give "
            f"{' and '.join(with_)}{', or ' * bool(with_)}--from-data"
        )
    if read >= {*APART}:
        null = {**{name: torch.zeros_like(given[name][0]) for name in APART}, **null}
    if (no_class := model.backbone.null_label) is not None:
        null = {**null, "labels": torch.tensor(no_class)}
    return Request(
        count,
        {name: given[name] for name in read},
        {name: value for name, value in null.items() if name in read},
    )


def load_model(
    load: str | Path,
    iteration: Step | None = None,
    *,
    averaged: bool,
    data: str | None = None,
    options: Mapping[str, str] = MappingProxyType({}),
    choice: ProcessChoice | None = None,
    chain: str | None = None,
    frozen_folder: Path | None = None,
    on_host: bool = False,
) -> TrainedModel:
    """Load the backbone of a checkpoint on one process, with EMA weights if ``averaged``.

    ``data`` replaces the data set of the training. ``options`` replace options that are not part of
    the model. ``choice`` replaces settings of the diffusion process. ``chain`` names one chain of a
    cascade. ``frozen_folder`` is the present place of an adapter's frozen weights. ``on_host``
    keeps the weights on the host (see ``TrainedModel.move``). Raises CheckpointError if there is no
    checkpoint, no EMA, or another model in it.
    Raises ValueError for invalid options or choices.
    """
    saved = read_saved_run(load, iteration, frozen_folder).of_chain(chain)
    backbone, stage = load_whole(saved, averaged=averaged, options=options)
    device = compute_device()
    stage.to("cpu" if on_host else device).eval()
    kinds = {
        name: torch.float32 if spec.dtype == COMPUTE else getattr(torch, spec.dtype)
        for name, spec in backbone.batch_fields.items()
    }

    @torch.no_grad()
    def predict(
        noisy: Tensor, timesteps: Tensor, conditioning: Fields, batch_size: int | None = None
    ) -> Tensor:
        given = {"timesteps": timesteps, **conditioning}
        fields = {name: given[name].to(device, kinds[name]) for name in backbone.batch_fields}
        found, size = [], batch_size or len(noisy)
        for first in range(0, len(noisy), size):
            rows = slice(first, first + size)
            part = {name: value[rows] for name, value in fields.items()}
            outputs, _, _ = stage((noisy[rows].to(device).float(),), {}, part)
            found.append(outputs[0].to(noisy.device))
        return torch.cat(found)

    return replace(trained_model(saved, backbone, predict, data, choice), move=stage.to)


def trained_model(
    saved: SavedRun,
    backbone: Backbone,
    predict: Predict,
    data: str | None,
    choice: ProcessChoice | None,
) -> TrainedModel:
    """Model of a saved run, for ``load_model``; raises ValueError."""
    args = saved.arguments
    args.pulse_masks = None  # for training alone
    if data is not None:
        args.pulse_inpaint_masks = RANDOM
        args.pulse_data, args.pulse_validation_data = data, None
    if backbone.takes_prediction and getattr(args, "pulse_self_conditioning", None) is None:
        raise ValueError(
            f"{saved.folder}: {backbone.name} takes twice as many channels as it predicts, but "
            "was not trained with --pulse-self-conditioning: the meaning of the other channels is "
            "unknown"
        )
    changes = compare_models(saved.record, backbone.record).changed
    process = chosen_process(choice or ProcessChoice(), saved.process)
    at_size = process.for_tokens(backbone.image_tokens)
    is_own = choice is None or choice.flow_shift is None
    shift = process.shift if is_own and isinstance(process.shift, DynamicShift) else None
    return TrainedModel(
        backbone, at_size, predict, args, saved.folder, changes, dynamic_shift=shift
    )


@dataclass(frozen=True)
class Sampler:
    """Settings of sampling, as ``sample`` takes them; ``noise`` is each sample's or diffusers'."""

    num_steps: int
    guidance: float | tuple[float, float]
    """One scale, or those of the first and the last frame; the others lie between them."""
    seed: int
    eta: float = 0.0
    noise: SamplingNoise = SamplingNoise.PER_SAMPLE
    flow_grid: FlowGrid | None = None
    """None is the grid of an imported model's pipeline."""
    low_noise: tuple[float, float] | None = None
    """Timestep of a boundary, and the scale below it."""


def sample_images(
    model: TrainedModel,
    request: Request,
    sampler: Sampler,
    batch_size: int = DEFAULT_BATCH,
    progress: bool = True,
) -> Tensor:
    """Draw the samples of ``request``: ``[n, *shape]``, pixels in [-1, 1] or latents.

    With diffusers' noise, all samples count as one batch of a pipeline, whatever ``batch_size`` is.
    Raises ValueError for guidance other than 1 if nothing of the request can be dropped (no text,
    no null class), and as ``sample`` does.
    """
    parts = Parts.of(request.count, batch_size)
    images = [
        sample_parts(model, request, parts, range(i, i + 1), sampler, progress)
        for i in parts.numbers
    ]
    return torch.cat(images)[: request.count]


@dataclass(frozen=True)
class Parts:
    """Division of samples into ``num`` parts of ``size``, each one batch of forward passes.

    The last part may extend beyond the samples, so that bits of a sample depend neither on its part
    nor on the process that draws it.
    """

    num: int
    size: int

    @classmethod
    def of(cls, count: int, batch_size: int) -> Parts:
        """As few parts of at most ``batch_size`` samples as possible, of equal size."""
        num = math.ceil(count / batch_size)
        return cls(num, math.ceil(count / num))

    @property
    def numbers(self) -> range:
        """Numbers of the parts."""
        return range(self.num)


def sample_parts(
    model: TrainedModel,
    request: Request,
    parts: Parts,
    numbers: range,
    sampler: Sampler,
    progress: bool = False,
) -> Tensor:
    """Draw the parts ``numbers`` of ``request`` together, as ``sample_images`` does."""
    first, end = numbers.start * parts.size, numbers.stop * parts.size
    part, shape = request.part(first, end), model.backbone.sample_spec.shape
    noises: Iterator[Tensor] | None = None
    if sampler.noise == SamplingNoise.DIFFUSERS:
        rows = range(request.count)
        whole = diffusers_noises(sampler.seed, request.count, rows, shape, request.drawn_before)
        noises = (noise[request.rows(first, end)] for noise in whole)

    def predict(noisy: Tensor, timesteps: Tensor, conditioning: Fields) -> Tensor:
        size = parts.size * (len(noisy) // part.count)  # guidance doubles a pass, as in diffusers
        return model.predict(noisy, timesteps, conditioning, size)

    return sample(
        predict,
        model.process_of(sampler.num_steps),
        shape,
        part.count,
        part.fields,
        num_steps=sampler.num_steps,
        guidance_scale=_scales(model, sampler),
        seed=sampler.seed,
        null=part.null,
        progress=progress,
        clip=1.0 if model.makes_pixels else None,
        first_index=first,
        self_conditioned=model.is_self_conditioned,
        eta=sampler.eta,
        noises=noises,
        flow_grid=model.flow_grid(sampler.flow_grid),
        rules=model.rules,
        known_frames=model.known_frames,
    )


def _scales(model: TrainedModel, sampler: Sampler) -> GuidanceScale:
    """Guidance scales as ``sample`` takes them; raises ValueError."""
    guidance = sampler.guidance
    if sampler.low_noise is not None and not isinstance(guidance, tuple):
        high, (boundary, low) = guidance, sampler.low_noise
        return lambda timestep: high if timestep >= boundary else low
    if not isinstance(guidance, tuple):
        return guidance
    if not {*APART} <= model.backbone.batch_fields.keys():
        raise ValueError(f"guidance {guidance}: only SVD's grows over the frames; give one number")
    num_frames = model.backbone.sample_spec.shape[0]
    return torch.linspace(*guidance, num_frames).view(-1, 1, 1, 1)
