"""Encodes a dataset into a folder of latents, as one of several ranks or alone."""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron_pulse.backbone.appended_fields import IMAGE_EMBEDDING, REFERENCE_IMAGE, TIME_IDS
from megatron_pulse.backbone.layer_selection import size_options
from megatron_pulse.backbone.shape_buckets import at_shape
from megatron_pulse.cli.backbone_flags import options_of
from megatron_pulse.cli.flag_checks import as_user_error, require, warn
from megatron_pulse.cli.launcher_env import RankOfJob
from megatron_pulse.cli.models.encoder_flags import (
    autoencoder_folder,
    open_encoders,
    open_tokenizers,
)
from megatron_pulse.cli.shared_flags import clip_sizes, numbers
from megatron_pulse.data.buckets import Buckets, buckets_of
from megatron_pulse.data.build import DataName, InpaintMasks, open_by_shape, open_dataset
from megatron_pulse.data.captions import Encoded, EncodedWithPictures, cut_short
from megatron_pulse.data.dataset import LATENT, FieldSpec, Variation
from megatron_pulse.data.field_files import FIELDS, FieldFiles
from megatron_pulse.data.fields import (
    FRAMING,
    FRAMING_SPEC,
    WantedFields,
    fields_of_samples,
    framing_field,
)
from megatron_pulse.data.images.appended_pictures import (
    APPENDED_PICTURES,
    ENCODED,
    appended_latents,
)
from megatron_pulse.data.images.conditioning import CONDITIONING, others_of
from megatron_pulse.data.images.inpainting import (
    inpainting_specs,
    reads_masks,
)
from megatron_pulse.data.images.shapes import AUTO, shown
from megatron_pulse.data.latents.layout import FILES, MIRRORED, LatentLayout, LatentType
from megatron_pulse.data.latents.stores import Store, has_index, stores_below, write_index
from megatron_pulse.data.latents.writer import LatentWriter
from megatron_pulse.data.opened_images import OpenedImages
from megatron_pulse.data.picture_choice import BUCKETS, RANDOM, ClipChoice, ShapeChoice
from megatron_pulse.data.picture_shapes import picture_shapes
from megatron_pulse.data.split_groups import name_hash
from megatron_pulse.data.videos.first_frames import drawn_frame_noise
from megatron_pulse.dataclass_flags import DTYPES, read_flags
from megatron_pulse.encoders.autoencoder import Autoencoder, posterior_noise, sampled
from megatron_pulse.encoders.first_frame import (
    FIRST_FRAME,
    first_frame_fields,
    seen_frame,
    starts_from_frame,
)
from megatron_pulse.encoders.image_encoder import ImageEncoder
from megatron_pulse.encoders.text_encoders import TextEncoders
from megatron_pulse.errors import UserError
from megatron_pulse.profile.measurement.machine import compute_as_a_rank
from megatron_pulse.progress import ProgressLine
from model_specs import load_backbone, with_texts_of

if TYPE_CHECKING:
    from megatron_pulse.backbone.chain import Backbone
    from megatron_pulse.data.captions import Encodes
    from megatron_pulse.data.dataset import DiffusionDataset
    from megatron_pulse.data.images.folder import ImageSize

type _Texts = tuple[Encodes, Mapping[str, FieldSpec], Mapping[str, str]]
type _OpenImageEncoder = Callable[[Path, torch.dtype | None, str], ImageEncoder]
_POSTERIORS = {
    "distribution": "mean and deviation of each posterior",
    "sample": "a sample of each posterior",
    "mean": "the mean of each posterior",
}
_ASIDE_S = 5.0
"""How often what other ranks have written is looked for."""
_NAMED = 3
_LOG_S = 60.0
"""How often a log is told how far it is."""


def write_latents(
    args: argparse.Namespace,
    place: RankOfJob,
    text_states: tuple[int, int] | None,
    choice: ShapeChoice,
) -> None:
    """Encode what is not yet in the folder, of this rank's share."""
    if torch.cuda.is_available():
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    else:
        compute_as_a_rank()  # the bits of text states are those of a step that encodes
    autoencoder = _open_autoencoder(args)
    if choice.buckets is not None or len(numbers(args.frames) or ()) > 1:
        _write_stores(args, place, text_states, choice, autoencoder)
        return
    if choice.resolution is not None:
        args.image_size = choice.resolution
    backbone = _backbone(args, {})
    size = clip_sizes(args.image_size, args.frames)
    with as_user_error(OSError):
        dataset, _ = open_dataset(
            args.source,
            size,
            args.channels,
            wanted=_wanted(args, text_states, backbone, None if size is None else _sides(size)),
            validation_fraction=0.0,
            verify=args.verify,
            default_caption=args.default_caption,
            inpaint=_masks(args, [backbone]),
            images=OpenedImages(read_flags(ClipChoice, args)),
        )
    texts = partial(_open_texts, args, backbone)
    of = args, place, text_states, autoencoder, dataset, backbone, texts, ImageEncoder
    _checked_store(*of, args.output)()


def _write_stores(
    args: argparse.Namespace,
    place: RankOfJob,
    text_states: tuple[int, int] | None,
    choice: ShapeChoice,
    autoencoder: Autoencoder | None,
) -> None:
    """Encode pictures of several shapes, each shape into a store below the folder."""
    factor = 1 if autoencoder is None else autoencoder.factor
    images, caption = OpenedImages(read_flags(ClipChoice, args)), args.default_caption
    with as_user_error(OSError):
        if choice.buckets is None and choice.resolution is None:
            choice = replace(choice, resolution=args.image_size)
        pixels = _shapes_there(args.output, choice) or picture_shapes(
            args.source, choice, factor, caption, images
        )
        of_clips = clip_sizes(pixels, args.frames)
        assert of_clips is not None and not isinstance(of_clips, int)
        sizes = [*of_clips]
        backbone = _bucketed_backbone(args, sizes, autoencoder)
        chains = [None if backbone is None else at_shape(backbone, k) for k in range(len(sizes))]
        wanted = [
            _wanted(args, text_states, chain, size) or WantedFields(_pixels(args.channels, size))
            for chain, size in zip(chains, sizes, strict=True)
        ]
        masks = _masks(args, chains)
        order, parts = open_by_shape(args.source, wanted, args.verify, caption, images, masks)
        number_of = {shape: number for number, shape in enumerate(sorted(parts))}
        stores = [
            Store(folder=_store_name(sizes[k]), pixels=(sizes[k][0], sizes[k][1]))
            for k in number_of
        ]
    if not place.rank:
        for bucket in buckets_of(Buckets(list(parts.values())), Buckets(list(parts.values()))):
            print(bucket.describe(of=len(order)))
    texts, image_encoder = cache(partial(_open_texts, args, chains[0])), cache(ImageEncoder)
    begun = []
    for number, (shape, dataset) in enumerate(sorted(parts.items())):
        of = args, place, text_states, autoencoder, dataset, chains[shape], texts, image_encoder
        begun.append(_checked_store(*of, args.output / stores[number]["folder"]))
    with as_user_error(OSError):
        write_index(args.output, stores, np.array([number_of[k] for k in order.tolist()]))
    for write in begun:
        write()
    if not place.rank:
        print(f"train on all shapes with --pulse-data latents:{args.output}")


def _shapes_there(output: Path, choice: ShapeChoice) -> list[tuple[int, int]]:
    """Shapes of stores that were begun with buckets auto; pictures may have changed since."""
    if choice.buckets != AUTO or not has_index(output):
        return []
    return [store["pixels"] for store in stores_below(output)]


def _backbone(args: argparse.Namespace, shapes: Mapping[str, str]) -> Backbone | None:
    """Backbone that reads the results, of these ``shapes``; None without."""
    if args.backbone is None:
        return None
    with as_user_error(ValueError):
        options = with_texts_of(args.backbone, options_of(args), args.encoders)
        return load_backbone(args.backbone, {**options, **shapes})


def _bucketed_backbone(
    args: argparse.Namespace, sizes: Sequence[tuple[int, ...]], autoencoder: Autoencoder | None
) -> Backbone | None:
    """Backbone with a bucket of each size; for one size, otherwise as its options make it."""
    try:
        return _backbone(args, {BUCKETS: _in_latents(args.channels, sizes, autoencoder)})
    except UserError:
        if len(sizes) > 1:
            raise
        return _backbone(args, {})


def _checked_store(
    args: argparse.Namespace,
    place: RankOfJob,
    text_states: tuple[int, int] | None,
    autoencoder: Autoencoder | None,
    dataset: DiffusionDataset,
    backbone: Backbone | None,
    open_texts: Callable[[], _Texts | None],
    open_image_encoder: _OpenImageEncoder,
    output: Path,
) -> Callable[[], None]:
    """Function that encodes what is not yet in the store ``output`` of samples of one shape.

    Nothing is written before it is called.
    """
    seen = None if backbone is None else seen_frame(backbone.batch_fields)
    faults = []
    if args.frame_noise is not None and seen != IMAGE_EMBEDDING:
        faults.append(
            "--frame-noise is for a --backbone that reads the first frame's embedding (SVD)"
        )
    moves = backbone is not None and TIME_IDS in backbone.batch_fields
    if args.motion_bucket != ClipChoice().motion_bucket and not moves:
        faults.append("--motion-bucket is for a --backbone that reads motion (SVD)")
    require(faults)
    if args.encoders is not None and not dataset.has_captions and seen is None:
        require([f"--encoders: {args.source} has no captions; give only --vae"])
    if dataset.has_captions and args.encoders is None and text_states is None and not place.rank:
        print(f"captions of {args.source} are left out: --encoders writes their states")
    _require_encodable(args, dataset, autoencoder)
    shape = dataset.image_shape
    if autoencoder is not None:
        shape = autoencoder.latent_shape(shape)
    made_by = {} if autoencoder is None else {LATENT: autoencoder.made_by()}  # reads all weights
    revision = _revision(dataset, texts=args.encoders is not None or text_states is not None)
    if backbone is not None:
        dataset, texts = _encoded(args, dataset, shape, backbone, open_texts)
        made_by |= texts
        dataset = _with_field_files(args, dataset, backbone, texts)
    if not place.rank:
        remark = "" if autoencoder is None else autoencoder.remark
        warn(remark, *dataset.cautions, *cut_short(dataset))
    fields = {**dataset.fields, **({FRAMING: FRAMING_SPEC} if dataset.frames else {})}
    if autoencoder is not None and backbone is not None:
        for name in fields.keys() & {*APPENDED_PICTURES}:
            fields[name] = FieldSpec(backbone.batch_fields[name].shape)
            made_by |= {name: made_by[LATENT]} if name in ENCODED else {}
    if backbone is not None and starts_from_frame(backbone.batch_fields):
        if autoencoder is None or not autoencoder.is_video:
            require([f"--backbone {args.backbone} continues frames: give a --vae of videos"])
        for name in sorted(FIRST_FRAME & {*backbone.batch_fields}):
            fields[name] = FieldSpec(backbone.batch_fields[name].shape)
            made_by[name] = made_by[LATENT]
    image_encoder = None
    if seen is not None and backbone is not None:
        shape_seen = backbone.batch_fields[seen].shape
        image_encoder = _open_image_encoder(args, open_image_encoder, seen, shape_seen)
        made_by[seen] = image_encoder.made_by()
    layout = LatentLayout(
        shape=shape,
        num_classes=dataset.num_classes,
        dtype=LatentType(DTYPES[args.dtype]),
        fields=fields,
        pixel_size=dataset.pixel_size,
        shard_size=args.shard_size,
        source=_source(args, dataset, autoencoder) + revision,
        made_by=made_by,
        deviates=autoencoder is not None
        and not autoencoder.is_exact
        and _posterior(args) == "distribution",
        pictures=dataset.has_files,
        groups=dataset.has_groups,
        classes=tuple(dataset.class_names),
        pairs=dataset.has_pairs,
        mirrored=args.flip,
    )
    if args.flip and CONDITIONING in fields:
        require(["--flip: control pictures are stored once; mirror their files instead"])
    if args.flip and {*APPENDED_PICTURES, *FIRST_FRAME} & {*fields}:
        require(
            [
                "--flip: masked pictures, references and first frames are stored once; mirror "
                "their files"
            ]
        )
    return partial(_write_store, args, place, autoencoder, image_encoder, dataset, layout, output)


def _write_store(
    args: argparse.Namespace,
    place: RankOfJob,
    autoencoder: Autoencoder | None,
    image_encoder: ImageEncoder | None,
    dataset: DiffusionDataset,
    layout: LatentLayout,
    output: Path,
) -> None:
    """Encode what is not yet in the store ``output``."""
    shape = layout.shape
    with as_user_error(OSError):
        nulls, count = dataset.null_conditioning(), len(dataset)
        writer = LatentWriter(output, layout, nulls, count, dataset.text_parts)
        _encode_edited_anew(writer, dataset, place)
        _encode_damaged_anew(writer, place)
        there = writer.count()
        if writer.complete:
            print(f"{output} is already complete: {there} samples")
            return
        if there and not place.rank:
            print(f"resuming after {there} of {len(dataset)} samples")
        _write(writer, dataset, autoencoder, image_encoder, args, place)
    if not writer.complete:
        print(
            f"rank {place.rank} has written its share; {writer.count()} of {len(dataset)} samples "
            f"are in {output}, the rest is with other ranks: if one stops, give the command "
            "again"
        )
        return
    print(
        f"{len(dataset)} samples of {'x'.join(map(str, shape))} ({args.dtype}): "
        f"train on them with --pulse-data latents:{output}"
    )


def _encoded(
    args: argparse.Namespace,
    dataset: DiffusionDataset,
    shape: tuple[int, ...],
    backbone: Backbone,
    open_texts: Callable[[], _Texts | None],
) -> tuple[DiffusionDataset, dict[str, str]]:
    """The dataset with its captions as the backbone reads them, and what made each field."""
    takes = backbone.sample_spec.shape
    if takes != shape:
        read, made = ("x".join(map(str, each)) for each in (takes, shape))
        if takes[0] != shape[0] and autoencoder_folder(args) is None:
            require(
                [
                    f"--backbone {args.backbone} takes latents of {takes[0]} channels, pictures "
                    f"have {shape[0]}, and {args.encoders} has no autoencoder: give one as --vae"
                ]
            )
        sizes = " ".join(f"--option {name}=N" for name in size_options(backbone.record))
        own = f", or the backbone's size ({sizes})" if sizes else ", the backbone's size is fixed"
        require(
            [
                f"--backbone {args.backbone} takes {read}, and these images make {made}: change "
                f"--image-size{own}"
            ]
        )
    if (texts := open_texts()) is None:
        return dataset, {}
    encoders, fields, made_by = texts
    if isinstance(encoders, TextEncoders) and encoders.recipe.sees:
        return EncodedWithPictures(dataset, encoders, fields), dict(made_by)
    return Encoded(dataset, encoders, fields), dict(made_by)


def _with_field_files(
    args: argparse.Namespace,
    dataset: DiffusionDataset,
    backbone: Backbone,
    texts: Collection[str],
) -> DiffusionDataset:
    """The dataset with the tensors of the folder beside its own, if there is one."""
    root = Path(DataName.of(args.source).path).absolute()  # "." is nameless
    if not root.is_dir() or not others_of(root, FIELDS).is_dir():
        return dataset
    made = {*texts, *dataset.fields, *FIRST_FRAME}
    return FieldFiles(dataset, root, fields_of_samples(backbone), made)


def _open_image_encoder(
    args: argparse.Namespace,
    open_image_encoder: _OpenImageEncoder,
    field: str,
    shape: tuple[int, ...],
) -> ImageEncoder:
    """Vision encoder of the pipeline folder, for a ``field`` of this shape."""
    if args.encoders is None:
        require([f"--backbone {args.backbone} reads {field} of the first frame: give --encoders"])
    dtype = getattr(torch, DTYPES[args.encoders_dtype]) if args.encoders_dtype else None
    encoder = open_image_encoder(args.encoders, dtype, field)
    if encoder.shape != shape:
        made, read = ("x".join(map(str, each)) for each in (encoder.shape, shape))
        require([f"{args.encoders}/image_encoder makes {field} {made}, the backbone reads {read}"])
    return encoder


def _open_texts(args: argparse.Namespace, backbone: Backbone | None) -> _Texts | None:
    """Text encoders or tokenizers of the backbone, its fields, and what made each."""
    if backbone is None or args.encoders is None:
        return None
    if args.store_text == "tokens":
        tokenizers = open_tokenizers(args, args.backbone, backbone)
        if tokenizers is None:
            return None
        if tokenizers.recipe.sees:
            require(["--store-text tokens: the text encoder also reads pictures: store states"])
        tokens = {name: FieldSpec(shape, "int64") for name, shape in tokenizers.shapes.items()}
        return tokenizers, tokens, tokenizers.made_by()
    opened = open_encoders(args, args.backbone, backbone)
    return None if opened is None else (*opened, opened[0].made_by())


def _encode_edited_anew(writer: LatentWriter, dataset: DiffusionDataset, place: RankOfJob) -> None:
    """Let shards be written anew whose pictures were edited since."""
    total = writer.count() // place.num_ranks
    with ProgressLine("comparing pictures", total, "files") as line:

        def picture(index: int) -> int:
            line.advance()
            return dataset.identity(index)

        changed = writer.changed(picture, place.rank, place.num_ranks)
    if not changed:
        return
    samples = [index for others in changed.values() for index in others]
    named = ", ".join(dataset.describe(index) for index in samples[:_NAMED])
    told = f"{len(samples)} of the pictures were edited since they were encoded ({named}"
    told += ", ...)" if len(samples) > _NAMED else ")"
    numbers = ", ".join(map(str, sorted(changed)))
    _forget(writer, changed, told, f"shards encoded anew: {numbers}", place)


def _encode_damaged_anew(writer: LatentWriter, place: RankOfJob) -> None:
    """Let damaged shards of a complete folder be written anew."""
    if not writer.complete or not (damaged := writer.damaged(place.rank, place.num_ranks)):
        return
    told = f"{writer.root}: shards {', '.join(map(str, damaged))} are damaged"
    _forget(writer, damaged, told, "encoded anew", place)


def _forget(
    writer: LatentWriter, numbers: Collection[int], why: str, done: str, place: RankOfJob
) -> None:
    """Let shards be written anew, by one rank alone."""
    if place.num_ranks > 1:
        raise UserError(f"{why}. Give the command on one rank once, which encodes them anew.")
    print(f"{why}; {done}")
    writer.forget(numbers)


def _write(
    writer: LatentWriter,
    dataset: DiffusionDataset,
    autoencoder: Autoencoder | None,
    image_encoder: ImageEncoder | None,
    args: argparse.Namespace,
    place: RankOfJob,
) -> None:
    progress = _Ranks(writer, len(dataset), place)
    fields = writer.layout.fields
    first = {name: spec.shape for name, spec in fields.items() if name in FIRST_FRAME}
    with writer, progress.line:
        for number in writer.share(place.rank, place.num_ranks):
            todo = writer.begin(number)
            for start in range(todo.start, todo.stop, args.batch_size):
                indices = range(start, min(start + args.batch_size, todo.stop))
                latents, deviations = _posteriors(dataset, indices, autoencoder)
                other_way = latents, deviations
                if args.flip:
                    other_way = _posteriors(dataset, indices, autoencoder, mirrored=True)
                for n, (i, latent, deviation) in enumerate(
                    zip(indices, latents, deviations, strict=True)
                ):
                    given = dataset.conditioning(i)
                    if autoencoder is not None:
                        given |= appended_latents(given, fields, autoencoder)
                    if autoencoder is not None and first:
                        clip, noise = _clip(dataset.image(i)), None
                        frame = tuple(clip[:, 0].shape)
                        if IMAGE_EMBEDDING in first:
                            noise, strength = drawn_frame_noise(args.frame_noise, i, frame)
                            ids = given[TIME_IDS]
                            given[TIME_IDS] = torch.cat([ids[:-1], ids.new_tensor([strength])])
                        given |= first_frame_fields(first, clip, autoencoder, image_encoder, noise)
                    if dataset.frames:
                        given[FRAMING] = framing_field(dataset.framing(i))
                    if autoencoder is not None and _posterior(args) == "sample":
                        noise = posterior_noise(0, i, 0, tuple(latent.shape))
                        latent = sampled(latent, deviation, noise)
                        if args.flip:
                            noise = posterior_noise(0, i, 1, tuple(latent.shape))
                            other_way[0][n] = sampled(other_way[0][n], other_way[1][n], noise)
                    kept = deviation if writer.layout.deviates else None
                    both = {"latent": other_way[0][n], "deviation": other_way[1][n]}
                    group = dataset.group(i)
                    writer.add(
                        latent,
                        dataset.label(i),
                        given,
                        kept,
                        dataset.identity(i),
                        name_hash(group) if group else 0,
                        {
                            name: value
                            for name, value in both.items()
                            if f"{MIRRORED}{name}" in writer.layout.columns()
                        },
                    )
                progress.line.advance(len(indices))
            if place.num_ranks > 1:
                progress.look_aside()


def _posteriors(
    dataset: DiffusionDataset,
    indices: range,
    autoencoder: Autoencoder | None,
    mirrored: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Means and deviations of pictures; both are the pixels without an autoencoder."""
    variation = Variation(flip=True) if mirrored else None
    images = torch.stack([dataset.image(i, variation) for i in indices])
    return (images, images) if autoencoder is None else autoencoder.posterior(images)


class _Ranks:
    """Progress of all ranks, as rank 0 shows it."""

    def __init__(self, writer: LatentWriter, total: int, place: RankOfJob) -> None:
        self._writer, self._looked = writer, time.monotonic()
        done, is_silent = writer.count(), bool(place.rank)
        self.line = ProgressLine("encoding", total, "images", done, silent=is_silent, log_s=_LOG_S)

    def look_aside(self) -> None:
        """Count what other ranks have done, now and then."""
        if time.monotonic() - self._looked >= _ASIDE_S:
            self._looked = time.monotonic()
            self.line.advance(self._writer.count() - self.line.done)


def _wanted(
    args: argparse.Namespace,
    text_states: tuple[int, int] | None,
    backbone: Backbone | None,
    size: tuple[int, ...] | None = None,
) -> WantedFields | None:
    """Captions as random states with their mask, and the other pictures that a control branch or
    an inpainting model sees; nothing else is asked of the data."""
    fields = {}
    if text_states is not None:
        length, width = text_states
        fields["context"] = FieldSpec((length, width))
        fields["context_mask"] = FieldSpec((length,), "int64")
    if backbone is not None and CONDITIONING in backbone.batch_fields and size is not None:
        fields[CONDITIONING] = FieldSpec(backbone.batch_fields[CONDITIONING].shape)
    if backbone is not None and reads_masks(backbone.batch_fields) and size is not None:
        fields |= inpainting_specs((args.channels, *size))
    if backbone is not None and REFERENCE_IMAGE in backbone.batch_fields and size is not None:
        fields[REFERENCE_IMAGE] = FieldSpec((args.channels, *size))
    if backbone is not None and TIME_IDS in backbone.batch_fields:
        fields[TIME_IDS] = FieldSpec(backbone.batch_fields[TIME_IDS].shape)
    if size is None or not fields and len(size) < 3:
        return None
    return WantedFields(_pixels(args.channels, size), fields)


def _clip(image: torch.Tensor) -> torch.Tensor:
    """Clip ``[c, F, h, w]``; a picture is one of one frame."""
    return image if image.dim() == 4 else image.unsqueeze(1)


def _sides(size: ImageSize) -> tuple[int, ...]:
    """(height, width) or (height, width, frames) of one size."""
    return (size, size) if isinstance(size, int) else tuple(size[0])


def _pixels(channels: int, size: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of pictures (c, h, w), or of clips (c, frames, h, w)."""
    return (channels, *size[2:], *size[:2])


def _in_latents(
    channels: int, sizes: Sequence[tuple[int, ...]], autoencoder: Autoencoder | None
) -> str:
    """Value of the backbone's option ``buckets`` for samples of these sizes."""
    shapes, channel_axis = [_pixels(channels, size) for size in sizes], 0
    if autoencoder is not None:
        shapes = [autoencoder.latent_shape(shape) for shape in shapes]
        channel_axis = int(autoencoder.frames_first and len(shapes[0]) > 3)
    sides = [[*shape[:channel_axis], *shape[channel_axis + 1 :]] for shape in shapes]
    return ",".join("x".join(map(str, each)) for each in sides)


def _store_name(size: tuple[int, ...]) -> str:
    """Folder of samples of a size: width x height, and the frames of clips."""
    return "x".join([shown((size[0], size[1])), *map(str, size[2:])])


def _masks(args: argparse.Namespace, chains: Sequence[Backbone | None]) -> InpaintMasks:
    """Masks of pictures, if the backbone inpaints."""
    place = args.inpaint_masks
    if place and not any(c is not None and reads_masks(c.batch_fields) for c in chains):
        require([f"--inpaint-masks {place}: give the --backbone that inpaints"])
    return InpaintMasks(place or RANDOM)


def _open_autoencoder(args: argparse.Namespace) -> Autoencoder | None:
    vae = autoencoder_folder(args)
    if vae is None:
        return None
    dtype = getattr(torch, DTYPES[args.encoders_dtype or "fp32"])
    return Autoencoder(vae, dtype, tiled=args.vae_tiling)


def _require_encodable(
    args: argparse.Namespace, dataset: DiffusionDataset, autoencoder: Autoencoder | None
) -> None:
    if autoencoder is None:
        return
    (channels, *frames, height, _), vae = dataset.image_shape, autoencoder.folder
    faults = []
    if frames and (frames[0] - 1) % autoencoder.frame_factor:
        step = autoencoder.frame_factor
        near = max(1, (frames[0] - 1) // step * step + 1)
        faults.append(
            f"--vae {vae} takes {step}k + 1 frames, not {frames[0]}: give --frames {near}, or "
            f"{near + step}"
        )
    if channels != autoencoder.in_channels:
        faults.append(f"--vae {vae} takes {autoencoder.in_channels} channels, not {channels}")
    if height % autoencoder.factor:
        faults.append(
            f"images of {height} pixels cannot be encoded: --image-size must be a multiple of "
            f"{autoencoder.factor}"
        )
    require(faults)


def _posterior(args: argparse.Namespace) -> str:
    return args.posterior or "distribution"


def _revision(dataset: DiffusionDataset, texts: bool) -> str:
    """Which files these are, where there are files, so that a resumed command meets the same;
    their captions too if ``texts`` are written."""
    whole = hashlib.sha256()
    told = [dataset.revision(i) for i in range(len(dataset))]
    if not any(told):
        return ""
    for i, revision in enumerate(told):
        whole.update(repr((revision, dataset.caption(i) if texts else "")).encode())
    return f"{FILES}{whole.hexdigest()[:16]}"


def _source(
    args: argparse.Namespace, dataset: DiffusionDataset, autoencoder: Autoencoder | None
) -> str:
    """What a resumed command must have in common with the one that began the folder."""
    kind, _, path = args.source.partition(":")
    name = f"{kind}:{Path(path).resolve()}" if path else kind
    size = "x".join(map(str, dataset.image_shape))
    text = f"{len(dataset)} images {size} of {name}"
    if args.text_states is not None:
        text += ", captions as word vectors"
    if reads_masks(dataset.fields):
        text += f", masks {args.inpaint_masks or RANDOM}"
    clips = replace(read_flags(ClipChoice, args), frame_noise=None)
    if clips != ClipChoice():
        rate = "" if clips.fps is None else f" at {clips.fps:g} frames a second"
        moved = "" if clips.motion_bucket == ClipChoice().motion_bucket else ", motion bucket "
        moved += f"{clips.motion_bucket:g}" * bool(moved)
        text += f", frame stride {clips.frame_stride}{rate}{moved}"
    if args.frame_noise is not None:
        text += f", frame noise {args.frame_noise}"
    return text if autoencoder is None else f"{text}, {_POSTERIORS[_posterior(args)]}"
