"""Encoders in the training loop: which components a run encodes with, when, and on which devices.

The data give pixels and token ids (``data.fields.unencoded``). A component's results become the
fields that the backbone reads, on the devices that read them::

  vae              pixels     -> moments -> noisy, target      first and last stage
  text_encoder...  token ids  -> states  -> context, pooled    stages that read them

Of SVD the autoencoder also encodes the first frame with its noise, and the vision encoder the
frame without::

  vae              pixels     -> moments -> image_latent        first stage
  image_encoder    pixels     -> state   -> image_embedding     stages that read it
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from megatron_pulse.backbone.appended_fields import FRAME_NOISE, IMAGE_EMBEDDING, IMAGE_LATENT
from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.data.build import DataName, names_of
from megatron_pulse.data.dataset import LATENT
from megatron_pulse.data.fields import WantedFields, unencoded
from megatron_pulse.data.latents.layout import META, Meta
from megatron_pulse.data.latents.stores import has_index, store_folders
from megatron_pulse.data.microbatches import noised_here
from megatron_pulse.dataclass_flags import DTYPES
from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.diffusion.scheduler_import import PIPELINE_INDEX
from megatron_pulse.encoders.autoencoder import Autoencoder
from megatron_pulse.encoders.components import autoencoder_faults, weight_faults
from megatron_pulse.encoders.encoder_piece import States, by_rows
from megatron_pulse.encoders.finite import any_broken, not_finite
from megatron_pulse.encoders.first_frame import first_frame_fields, for_every_frame
from megatron_pulse.encoders.image_encoder import EMBEDDING, IMAGE_ENCODER, ImageEncoder
from megatron_pulse.encoders.image_pieces import MOMENTS, PIXELS
from megatron_pulse.encoders.text_encoders import TextEncoders
from megatron_pulse.encoders.text_recipe import (
    CONNECTORS,
    VAE,
    TextRecipe,
    dropped_name,
    folder_name,
)
from megatron_pulse.encoders.tokens import digest_of, ids_name, mask_name
from megatron_pulse.errors import Faults, collecting, unknown_name
from megatron_pulse.integration.flags.pulse_options import PulseOptions
from megatron_pulse.planner.layout.routes import Routes, batch_fields_of
from megatron_pulse.planner.schedule.operations import BubbleTask
from megatron_pulse.runtime.encoding.encoding import Encoded, FrozenComponent
from megatron_pulse.runtime.tensor_settings import Batch
from model_specs import text_recipe

TEXT = "text"
"""Name for all text encoders in ``--pulse-encode``."""

_PICTURES = (1, 3)
"""Numbers of channels of pictures; samples with any other are latents."""


@dataclass(frozen=True)
class LoopEncoders:
    """Encoders that a run applies itself.

    ``recipe`` describes the text fields, and ``shapes`` are their shapes. ``recipe`` is None if
    text is stored, or none is read. ``autoencodes`` says whether images become latents.
    ``embeds`` says whether SVD's first frames are also embedded. ``policies`` are the flags'
    schedules of each component: auto, fill or before-step. Methods raise
    UserError for a folder that cannot encode the backbone's fields.
    """

    folder: Path
    recipe: TextRecipe | None
    shapes: Mapping[str, tuple[int, ...]]
    autoencodes: bool
    policies: Mapping[str, str]
    dtype: torch.dtype | None
    embeds: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Folder names of the components."""
        places = () if self.recipe is None else self.recipe.kinds
        texts = (folder_name("text_encoder", place) for place in places)
        pictures = {VAE: self.autoencodes, IMAGE_ENCODER: self.embeds}
        return (*texts, *(name for name, is_used in pictures.items() if is_used))

    def texts(self, places: Collection[int] | None = ()) -> TextEncoders | None:
        """Text encoders, with the weights of those at ``places`` only (None: of all)."""
        if self.recipe is None:
            return None
        return TextEncoders(self.folder, self.recipe, self.shapes, self.dtype, places)

    def autoencoder(self, weighs: bool = False) -> Autoencoder | None:
        """Autoencoder, with its weights if ``weighs``; None if images are not encoded."""
        if not self.autoencodes:
            return None
        return Autoencoder(self.folder / VAE, self.dtype or torch.float32, weighs)

    def frame_fields(
        self, shapes: Mapping[str, tuple[int, ...]]
    ) -> Callable[[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]:
        """Function of a clip's pixels and its first frame's noise, which gives SVD's fields."""
        autoencoder = self.autoencoder(weighs=True)
        assert autoencoder is not None
        image_encoder = ImageEncoder(self.folder, self.dtype)
        return lambda clip, noise: first_frame_fields(
            shapes, clip, autoencoder, image_encoder, noise
        )

    @property
    def encoded_by(self) -> dict[str, str]:
        """Digest of the files of each encoder and tokenizer, by folder name; reads all files."""
        places = () if self.recipe is None else self.recipe.kinds
        texts = [folder_name(of, p) for of in ("text_encoder", "tokenizer") for p in places]
        texts += [CONNECTORS] if self.recipe is not None and self.recipe.connects else []
        found = {name: digest_of(self.folder / name) for name in texts}
        if (autoencoder := self.autoencoder()) is not None:
            found[VAE] = autoencoder.made_by(typed=False)
        if self.embeds:
            found[IMAGE_ENCODER] = digest_of(self.folder / IMAGE_ENCODER)
        return found

    def unencoded(self, wanted: WantedFields) -> WantedFields:
        """Fields that the data must give for a backbone that reads ``wanted``.

        Stored latents must be of the folder's autoencoder, if it has one.
        """
        texts, autoencoder = self.texts(), self.autoencoder()
        if autoencoder is None and (self.folder / VAE).is_dir():
            latent = Autoencoder(self.folder / VAE, weighs=False).made_by(typed=False)
            wanted = replace(wanted, made_by={**wanted.made_by, LATENT: latent})
        return unencoded(
            wanted,
            None if texts is None else texts.tokenizers,
            self.shapes,
            None if autoencoder is None else _pixel_shape(wanted.shape, autoencoder),
        )

    def homes(
        self, bubble_tasks: Sequence[BubbleTask], num_devices: int
    ) -> dict[str, tuple[int, ...]]:
        """Devices that hold each component: those of its bubble task, or all."""
        filled = {task.name: task.devices for task in bubble_tasks}
        return {name: filled.get(name) or tuple(range(num_devices)) for name in self.names}

    def filling_faults(
        self, bubble_tasks: Sequence[BubbleTask], routes: Routes, backbone: Backbone
    ) -> list[str]:
        """Mismatches between the plan's bubble tasks and the encoders of this run."""
        filled = {task.name: task for task in bubble_tasks}
        faults = []
        for name, policy in self.policies.items():
            if policy == "fill" and name not in filled:
                faults.append(
                    f"--pulse-encoder-schedule {name}=fill: the plan does not run it in pipeline "
                    "bubbles. Give a plan of 'pulse tune --encoders COSTS.json', or use "
                    "before-step"
                )
            if policy == "before-step" and name in filled:
                faults.append(
                    f"--pulse-encoder-schedule {name}=before-step: the plan runs it in pipeline "
                    "bubbles. Leave the flag out, or tune without it"
                )
        for name, task in filled.items():
            if name not in self.names:
                used = ", ".join(self.names) or "none"
                faults.append(
                    f"the plan runs {name} in pipeline bubbles, but this run does not use it (it "
                    f"uses {used}): its results are in the data, or no layer reads them. Tune "
                    "with an encoder table without it"
                )
                continue
            planned = max((end for _, end, *_ in task.slices), default=0)
            there = self._num_layers(name)
            if planned != there:
                faults.append(
                    f"the plan was made for other encoders than {self.folder}: its {name} has "
                    f"{planned} layers, this one has {there}. Tune with a table of these encoders "
                    f"('pulse profile --encoders {self.folder}')"
                )
            for device in sorted({*self.consumers(name, routes, backbone)} - {*task.consumers}):
                faults.append(f"the plan does not send the results of {name} to device {device}")
        return faults

    def _num_layers(self, name: str) -> int:
        """Number of layers of a component, found without its weights."""
        if name == IMAGE_ENCODER:
            return 1
        if name == VAE and (autoencoder := self.autoencoder()) is not None:
            return len(autoencoder.pieces)
        encoders = {} if (texts := self.texts()) is None else texts.encoders
        found = (e for place, e in encoders.items() if folder_name("text_encoder", place) == name)
        return len(next(found).pieces)

    def consumers(self, name: str, routes: Routes, backbone: Backbone) -> tuple[int, ...]:
        """Devices that read a component's results."""
        home = routes.partition.placement.device_of_stage
        if name == VAE:
            return tuple(sorted({home[0], home[-1]}))
        of_it = {IMAGE_EMBEDDING}
        if name != IMAGE_ENCODER:
            assert self.recipe is not None
            of_it = {
                field
                for field, rows in self.recipe.fields.items()
                if any(folder_name("text_encoder", p.place) == name for row in rows for p in row)
            }
        stages = range(len(home))
        return tuple(
            sorted({home[s] for s in stages if of_it & batch_fields_of(backbone, routes, s)})
        )

    def describe(self, bubble_tasks: Sequence[BubbleTask], num_devices: int) -> str:
        """Text that tells when and where each encoder runs."""
        filled = {task.name for task in bubble_tasks}
        lines = [f"encoders of {self.folder}:"]
        for name, homes in self.homes(bubble_tasks, num_devices).items():
            when = (
                "in pipeline bubbles of the previous step" if name in filled else "before the step"
            )
            where = ", ".join(map(str, homes))
            lines.append(f"  {name}: {when}, on device{'s' * (len(homes) > 1)} {where}")
        if (autoencoder := self.autoencoder()) is not None and autoencoder.remark:
            lines.append(f"  {autoencoder.remark}")
        others = {path.name for path in self.folder.glob("text_encoder*") if path.is_dir()}
        if self.recipe is not None and (unread := sorted(others - set(self.names))):
            lines.append(
                f"  {', '.join(unread)}: not used (the backbone does not read its results)"
            )
        return "\n".join(lines)


def loop_encoders(options: PulseOptions, backbone: Backbone) -> LoopEncoders | None:
    """Encoders that a run of these flags applies itself; None without ``--pulse-encoders``.

    Raises Faults for contradictory flags and for a folder that cannot encode the backbone's fields,
    and UserError.
    """
    if options.encoders is None or options.data is None:
        return None
    folder = Path(options.encoders)
    recipe = text_recipe(options.backbone, backbone)
    stored = _stored(options.data)
    there = [] if recipe is None else [folder_name("text_encoder", p) for p in recipe.kinds]
    embeds = stored is None and IMAGE_EMBEDDING in backbone.batch_fields
    policies, faults = _policies(
        options.encoder_schedule,
        [
            *there,
            *([VAE] if (folder / VAE).is_dir() else []),
            *([IMAGE_ENCODER] if embeds else []),
        ],
    )
    texts = recipe is not None and not (stored is not None and recipe.fields.keys() <= stored)
    autoencodes = stored is None and (folder / VAE).is_dir()
    if texts and recipe is not None and recipe.sees:
        faults.append(
            f"--pulse-encoders {folder}: the text encoder of {backbone.name} reads pictures beside "
            "captions, ahead of training alone: 'pulse data write-latents'"
        )
    for name in (*there, VAE):
        makes = autoencodes if name == VAE else texts
        if makes and policies.get(name) == "store":
            what = "latents" if name == VAE else "text states"
            faults.append(
                f"--pulse-encoder-schedule {name}=store: {options.data} has no {what}. Write them "
                f"first: 'pulse data write-latents --from {options.data} --encoders {folder} "
                f"--backbone {options.backbone} --image-size PIXELS -o latents'"
            )
        if not makes and policies.get(name) in ("fill", "before-step"):
            faults.append(
                f"--pulse-encoder-schedule {name}={policies[name]}: {options.data} has its "
                "results. Leave the flag out"
            )
    channels = backbone.sample_spec.shape[1 if embeds else 0]
    with collecting(faults):
        named = autoencoder_faults(folder)
        if stored is None:
            faults += [f"--pulse-encoders {folder}: {fault}" for fault in named]
    if stored is None and not autoencodes and channels not in _PICTURES and folder.is_dir():
        whole = (
            ""
            if (folder / PIPELINE_INDEX).is_file()
            else f", nor {PIPELINE_INDEX}. Give a diffusers pipeline folder"
        )
        faults.append(
            f"--pulse-encoders {folder}: {backbone.name} takes latents of {channels} channels and "
            f"{options.data} has pictures, but the folder has no {VAE}/ to encode them{whole}"
        )
    if not texts and not autoencodes and not faults:
        plan = " and use a plan tuned without --encoders" if options.plan else ""
        faults.append(
            f"--pulse-encoders {folder}: {options.data} has all inputs of {backbone.name}. Leave "
            f"the flag out{plan}"
        )
    used = [*(there if texts else ()), *([VAE] if autoencodes else [])]
    used += [IMAGE_ENCODER] if embeds else []
    joining = [CONNECTORS] if texts and recipe is not None and recipe.connects else []
    faults += weight_faults(folder, used + joining)
    if embeds and not (folder / IMAGE_ENCODER).is_dir():
        faults.append(
            f"--pulse-encoders {folder}: {backbone.name} reads an embedding of the first frame, "
            f"but the folder has no {IMAGE_ENCODER}/. Give SVD's pipeline folder"
        )
    if autoencodes and not faults:
        autoencoder = Autoencoder(folder / VAE, weighs=False)
        made = autoencoder.latent_channels
        is_svd = autoencoder.has_temporal_decoder and embeds
        if is_svd:
            for name in (VAE, IMAGE_ENCODER):
                if policies.get(name) == "fill":
                    faults.append(
                        f"--pulse-encoder-schedule {name}=fill: encoders of clips run before the "
                        "step alone. Give before-step"
                    )
                policies[name] = "before-step"
        elif autoencoder.is_video or len(backbone.sample_spec.shape) > 3:
            faults.append(
                f"--pulse-encoders {folder}: {VAE}/ encodes videos ahead of training alone: 'pulse "
                f"data write-latents --from {options.data} --vae {folder / VAE} --frames N'"
            )
        elif made != channels:
            faults.append(
                f"--pulse-encoders {folder}: {VAE}/ makes latents of {made} channels, but "
                f"{backbone.name} takes {channels}"
            )
    if faults:
        raise Faults(faults)
    shapes = (
        {name: backbone.batch_fields[name].shape for name in recipe.fields}
        if recipe is not None and texts
        else {}
    )
    return LoopEncoders(
        folder,
        recipe if texts else None,
        shapes,
        autoencodes,
        {name: policies.get(name, "auto") for name in used},
        getattr(torch, DTYPES[options.encoders_dtype]) if options.encoders_dtype else None,
        embeds,
    )


def _stored(data: str) -> frozenset[str] | None:
    """Fields stored in every latents folder of ``data``; None if the data are images."""
    names = names_of(data)
    if not all(name.startswith("latents:") for name in names):
        return None
    places = [Path(DataName.of(name).path) for name in names]
    folders = [
        f for place in places for f in (store_folders(place) if has_index(place) else [place])
    ]
    fields = [Meta.load(f).layout.fields.keys() for f in folders if (f / META).is_file()]
    return frozenset.intersection(*map(frozenset, fields)) if fields else frozenset()


def _policies(given: Sequence[str], names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Policy of each component, and faults; specific flags precede general ones."""
    found: dict[str, str] = {}
    said: dict[str, str] = {}
    faults = []
    for text in sorted(given, key=lambda text: "=" in text):
        name, _, policy = text.rpartition("=")
        if (before := said.setdefault(name, text)) != text:
            faults.append(
                f"--pulse-encoder-schedule {before} and --pulse-encoder-schedule {text} "
                "contradict each other: give one"
            )
        kinds = {"": names, TEXT: [n for n in names if n not in (VAE, IMAGE_ENCODER)]}
        if name not in (*kinds, *names):
            faults.append(
                f"--pulse-encoder-schedule {text}: {unknown_name('encoder', name, (TEXT, *names))}"
            )
        found |= dict.fromkeys(kinds.get(name, [name]), policy)
    return found, faults


class DeviceEncoders:
    """Encoders of one pipeline device, and the conversion of their results into batch fields."""

    def __init__(
        self,
        loop: LoopEncoders,
        homes: Mapping[str, tuple[int, ...]],
        number: int,
        process: DiffusionProcess,
    ) -> None:
        self._process = process
        self._broken: dict[str, torch.Tensor] = {}
        here = {name for name, devices in homes.items() if number in devices}
        places = () if loop.recipe is None else loop.recipe.kinds
        mine = [p for p in places if folder_name("text_encoder", p) in here]
        self._texts, self._vae = loop.texts(mine), loop.autoencoder(VAE in here)
        self.components: list[FrozenComponent] = []
        if self._texts is not None:
            assert loop.recipe is not None
            for place, encoder in self._texts.encoders.items():
                name = folder_name("text_encoder", place)
                states = tuple(sorted(loop.recipe.states_of(place)))
                given = partial(_tokens, place, encoder.device)
                pieces = encoder.pieces if name in here else None
                self.components.append(FrozenComponent(name, given, states, homes[name], pieces))
        if self._vae is not None:
            given = partial(_pixels, self._vae.device, self._vae.dtype)
            pieces = self._vae.pieces if VAE in here else None
            if loop.embeds:
                given = partial(_frames, self._vae.device, self._vae.dtype)
                pieces = None if pieces is None else tuple(map(by_rows, pieces))
            self.components.append(FrozenComponent(VAE, given, (MOMENTS,), homes[VAE], pieces))
        self._image_encoder: ImageEncoder | None = None
        if loop.embeds:
            pieces = None
            if IMAGE_ENCODER in here:
                self._image_encoder = ImageEncoder(loop.folder, loop.dtype)
                pieces = self._image_encoder.pieces
            results, where = (EMBEDDING,), homes[IMAGE_ENCODER]
            of_frame = FrozenComponent(IMAGE_ENCODER, _first_frame, results, where, pieces)
            self.components.append(of_frame)

    def not_finite(self) -> list[str]:
        """Faults of encoders that have given non-finite numbers; synchronises with a GPU."""
        dtypes = {VAE: self._vae.dtype} if self._vae is not None else {}
        if self._image_encoder is not None:
            dtypes[IMAGE_ENCODER] = self._image_encoder.dtype
        if self._texts is not None:
            dtypes |= {
                folder_name("text_encoder", place): encoder.dtype
                for place, encoder in self._texts.encoders.items()
            }
        return [not_finite(name, dtypes[name]) for name, broken in self._broken.items() if broken]

    def finished(self, batch: Batch, encoded: Encoded) -> dict[str, torch.Tensor]:
        """``batch`` with all fields that this device reads."""
        made = dict(batch)
        for name, states in encoded.items():
            if not states:
                continue
            broken = any_broken(states)
            self._broken[name] = broken | self._broken.get(name, broken)
        if self._texts is not None:
            found = {
                place: self._texts.dropped(
                    encoded[name], batch.get(dropped_name(name), batch["dropped"])
                )
                for place in self._texts.encoders
                if (name := folder_name("text_encoder", place)) in encoded
            }
            made |= self._texts.joined(found)
        if IMAGE_ENCODER in encoded:
            embedding = encoded[IMAGE_ENCODER][EMBEDDING]
            made[IMAGE_EMBEDDING] = _unless_dropped(IMAGE_EMBEDDING, embedding, batch)
        if self._vae is not None and VAE in encoded and "noise" in batch:
            mean, deviation = self._vae.normalized(encoded[VAE][MOMENTS])
            if FRAME_NOISE in batch:
                by_clip = len(batch["index"]), -1
                mean, deviation = mean.unflatten(0, by_clip), deviation.unflatten(0, by_clip)
                first = for_every_frame(mean[:, -1:], mean.shape[1] - 1, self._vae)
                made[IMAGE_LATENT] = _unless_dropped(IMAGE_LATENT, first, batch)
                mean, deviation = mean[:, :-1], deviation[:, :-1]
            made |= noised_here(batch, mean, deviation, self._process)
        return made


def _tokens(place: int, device: torch.device, batch: Batch, row: int) -> States:
    here = slice(row, row + 1)
    return {
        "ids": batch[ids_name(place)][here].to(device, non_blocking=True),
        "mask": batch[mask_name(place)][here].to(device, non_blocking=True),
    }


def _pixels(device: torch.device, dtype: torch.dtype, batch: Batch, row: int) -> States:
    return {PIXELS: batch[PIXELS][row : row + 1].to(device, dtype, non_blocking=True)}


def _frames(device: torch.device, dtype: torch.dtype, batch: Batch, row: int) -> States:
    """Frames of a clip ``[f + 1, c, h, w]``; the last is the first again, with its noise."""
    frames = batch[PIXELS][row].transpose(0, 1)
    noised = frames[:1] + batch[FRAME_NOISE][row]
    return {PIXELS: torch.cat([frames, noised]).to(device, dtype, non_blocking=True)}


def _first_frame(batch: Batch, row: int) -> States:
    return {PIXELS: batch[PIXELS][row : row + 1, :, 0]}


def _unless_dropped(name: str, values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """``values``, with zeros for samples that lose the field."""
    dropped = batch[dropped_name(name)].to(values.device)
    return values.masked_fill(dropped.view(-1, *[1] * (values.dim() - 1)), 0)


def _pixel_shape(shape: tuple[int, ...], autoencoder: Autoencoder) -> tuple[int, ...]:
    """Shape of images whose latents have this ``shape``."""
    *frames, height, width = (n for i, n in enumerate(shape) if i != int(autoencoder.frames_first))
    factor = autoencoder.factor
    return (autoencoder.in_channels, *frames, height * factor, width * factor)
