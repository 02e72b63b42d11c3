"""``pulse data write-latents``: encode a dataset once, ahead of training."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_pulse.cli.backbone_flags import (
    add_backbone_flags,
    add_option_flag,
    backbone_faults,
    options_of,
)
from megatron_pulse.cli.errors import (
    add_parser,
    check_folder,
    mending,
    no_autoencoder,
    out_of,
    require,
)
from megatron_pulse.cli.models.encoding import (
    add_encoder_flags,
    autoencoder_folder,
    encoder_faults,
    open_encoders,
    open_tokenizers,
)
from megatron_pulse.faults import UserError, collecting
from megatron_pulse.flag_fields import PIXELS, TO_MILLION

if TYPE_CHECKING:
    from megatron_pulse.data.dataset import DiffusionDataset
    from megatron_pulse.data.fields import Wanted
    from megatron_pulse.data.latents.folder import LatentWriter
    from megatron_pulse.encoders.autoencoder import Autoencoder

_POSTERIORS = {
    "distribution": "mean and deviation of each posterior",
    "sample": "a sample of each posterior",
    "mean": "the mean of each posterior",
}
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}

_DESCRIPTION = """\
Without --vae the pixels themselves are the latents; with it they are those of a diffusers
AutoencoderKL, shifted and scaled as its configuration says: mean and deviation of its posterior,
of which training draws another sample at every reading, as diffusers' own trainers do (--posterior
sample or mean keep half the bytes). Files are written in whole shards: an interrupted command goes
on where it stopped when it is given again. What the type on disk cannot hold is refused; sizes and
crops of image files are kept for models that are told them. Train on the result with --pulse-data
latents:DIR.

Captions become text states in one of two ways. --encoders DIR --backbone NAME takes the text
encoders and the autoencoder of a diffusers pipeline folder; what the backbone reads decides which
encoders and which of their states are written, and what stands for a dropped caption; with
--store-text tokens only token ids are, for training that encodes them itself. meta.json says what
made each field. --text-states LxD makes them of random word vectors, as training on
captions:PATH does. Nothing is downloaded.

{specs}
examples:
  pulse data write-latents --from mnist --image-size 16 -o runs/mnist16
  pulse data write-latents --from folder:photos --image-size 256 --vae sd-vae -o runs/latents
  pulse data write-latents --from captions:runs/emoji/images --image-size 32 --text-states 12x64 \\
      -o runs/emoji-latents
  pulse data write-latents --from captions:photos --image-size 512 --encoders sd-v1.5 \\
      --backbone sd-v1.5 -o runs/photos
"""


def add_write_latents(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], specs: str
) -> None:
    """Add ``write-latents``."""
    parser = add_parser(
        commands,
        "data write-latents",
        "write a dataset as memory-mapped latents",
        _DESCRIPTION.format(specs=specs),
        run,
    )
    add = parser.add_argument
    add("--from", dest="source", required=True, metavar="SPEC", help="the dataset to encode")
    add("-o", "--output", type=Path, required=True, metavar="DIR", help="the folder to write")
    add("--image-size", type=int, metavar="N", help="resize images to NxN before encoding")
    add("--channels", type=int, choices=[1, 3], default=3, help="of a folder's images (3)")
    add("--dtype", choices=list(_DTYPES), default="fp16", help="type on disk (default fp16)")
    add("--vae", type=Path, metavar="PATH", help="a local diffusers AutoencoderKL folder")
    add_encoder_flags(parser)
    add_backbone_flags(
        parser.add_mutually_exclusive_group(), "of --encoders: the backbone that will read them"
    )
    add_option_flag(parser, "override one of the backbone's options")
    add(
        "--posterior",
        choices=list(_POSTERIORS),
        help="of --vae: keep its mean and deviation (distribution, default), a sample, or the mean",
    )
    add(
        "--store-text",
        choices=["states", "tokens"],
        help="of --encoders: their states (default), or token ids, some thousandth of the bytes",
    )
    add("--text-states", metavar="LxD", help="of captions: length and width of their states")
    add("--batch-size", type=int, default=16, metavar="N", help="images per encoding (16)")
    add("--shard-size", type=int, default=1024, metavar="N", help="samples per file (1024)")
    add("--verify", action="store_true", help="read every image once before beginning")


def run(args: argparse.Namespace) -> None:
    """Encode what is not yet in the folder."""
    require(_check(args))
    from megatron_pulse.data.build import open_dataset
    from megatron_pulse.data.fields import FRAMING, FRAMING_SPEC
    from megatron_pulse.data.latents.folder import LatentLayout, LatentType, LatentWriter

    with mending(OSError):
        dataset, _ = open_dataset(
            args.source,
            args.image_size,
            args.channels,
            wanted=_wanted(args),
            validation_fraction=0.0,
            verify=args.verify,
        )
    if args.encoders is not None and not dataset.has_captions:
        require([f"--encoders: {args.source} has no captions; give only --vae"])
    if dataset.has_captions and args.encoders is None and args.text_states is None:
        print(f"the captions of {args.source} are left out: --encoders would write their states")
    autoencoder = _open_autoencoder(autoencoder_folder(args), dataset)
    shape = dataset.image_shape
    if autoencoder is not None:
        side = tuple(size // autoencoder.factor for size in shape[1:])
        shape = (autoencoder.latent_channels, *side)
    made_by = {} if autoencoder is None else {"latent": autoencoder.made_by()}
    if args.encoders is not None:
        dataset, texts = _encoded(args, dataset, shape)
        made_by |= texts
    fields = {**dataset.fields, **({FRAMING: FRAMING_SPEC} if dataset.frames else {})}
    layout = LatentLayout(
        shape=shape,
        num_classes=dataset.num_classes,
        dtype=LatentType(_DTYPES[args.dtype]),
        fields=fields,
        pixel_size=dataset.pixel_size,
        shard_size=args.shard_size,
        source=_source(args, dataset, autoencoder),
        made_by=made_by,
        deviates=autoencoder is not None and _posterior(args) == "distribution",
    )
    with mending(OSError):
        writer = LatentWriter(args.output, layout, dataset.null_conditioning())
        if writer.complete:
            print(f"{args.output} is already complete: {writer.num_written} samples")
            return
        if writer.num_written:
            print(f"resuming after {writer.num_written} of {len(dataset)} samples")
        _write(writer, dataset, autoencoder, _posterior(args), args.batch_size)
    print(
        f"{len(dataset)} samples of {'x'.join(map(str, shape))} ({args.dtype}): "
        f"train on them with --pulse-data latents:{args.output}"
    )


def _encoded(
    args: argparse.Namespace, dataset: DiffusionDataset, shape: tuple[int, ...]
) -> tuple[DiffusionDataset, dict[str, str]]:
    """The dataset with its captions as the backbone reads them, and what made each field."""
    from megatron_pulse.data.dataset import FieldSpec
    from megatron_pulse.data.text.encoded import Encoded
    from model_specs import load_backbone

    with mending(ValueError):
        backbone = load_backbone(args.backbone, options_of(args))
    takes = backbone.input_spec.shape
    if takes != shape:
        read, made = ("x".join(map(str, each)) for each in (takes, shape))
        require(
            [
                f"--backbone {args.backbone} takes {read}, and these images make {made}: change "
                "--image-size, or the backbone's size (--option sample_size=N)"
            ]
        )
    if args.store_text == "tokens":
        tokenizers = open_tokenizers(args, args.backbone, backbone)
        if tokenizers is None:
            return dataset, {}
        tokens = {name: FieldSpec(shape, "int64") for name, shape in tokenizers.shapes.items()}
        return Encoded(dataset, tokenizers, tokens), tokenizers.made_by()
    opened = open_encoders(args, args.backbone, backbone)
    if opened is None:
        return dataset, {}
    encoders, fields = opened
    return Encoded(dataset, encoders, fields), encoders.made_by()


def _write(
    writer: LatentWriter,
    dataset: DiffusionDataset,
    autoencoder: Autoencoder | None,
    posterior: str,
    batch_size: int,
) -> None:
    import torch
    from tqdm import tqdm

    from megatron_pulse.data.fields import FRAMING, framing_field
    from megatron_pulse.encoders.autoencoder import posterior_noise, sampled

    done = writer.num_written
    quiet = not sys.stderr.isatty()
    bar = tqdm(
        total=len(dataset), initial=done, unit="image", desc="encoding", disable=quiet or None
    )
    with writer, bar:
        for first in range(done, len(dataset), batch_size):
            indices = range(first, min(first + batch_size, len(dataset)))
            images = torch.stack([dataset.image(i) for i in indices])
            latents, deviations = images, images
            if autoencoder is not None:
                latents, deviations = autoencoder.posterior(images)
            for i, latent, deviation in zip(indices, latents, deviations, strict=True):
                given = dataset.conditioning(i)
                if dataset.frames:
                    given[FRAMING] = framing_field(dataset.framing(i))
                if autoencoder is not None and posterior == "sample":
                    noise = posterior_noise(0, i, 0, tuple(latent.shape))
                    latent = sampled(latent, deviation, noise)
                kept = deviation if writer.layout.deviates else None
                writer.add(latent, dataset.label(i), given, kept)
            bar.update(len(indices))


def _check(args: argparse.Namespace) -> list[str]:
    faults = check_folder(args.output, "--output")
    faults += out_of(PIXELS, args, "image_size")
    faults += out_of(TO_MILLION, args, "batch_size", "shard_size")
    if args.source.startswith("latents:"):
        faults.append(f"--from {args.source}: these are latents already")
    captions = args.source.startswith("captions:")
    if captions and args.text_states is None and args.encoders is None:
        faults.append(
            f"--from {args.source}: give --encoders and --backbone, or --text-states, or the "
            "captions would be lost"
        )
    faults += encoder_faults(args)
    if args.posterior is not None and autoencoder_folder(args) is None:
        faults.append("--posterior is of an autoencoder: give --vae, or --encoders with one")
    if args.store_text is not None and args.encoders is None:
        faults.append("--store-text is for --encoders")
    if args.store_text == "tokens" and args.encoders_dtype is not None:
        faults.append("--encoders-dtype: --store-text tokens runs no text encoder")
    if args.encoders is None:
        if args.backbone is not None or args.option:
            faults.append("--backbone, --module and --option are for --encoders")
    elif args.backbone is None:
        faults.append("--encoders: name what will read the states: --backbone or --module")
    else:
        faults += backbone_faults(args)
        if not args.source.startswith(("captions:", "folder:")):
            faults.append("--encoders is for images with captions; of other data give only --vae")
        if args.text_states is not None:
            faults.append("--text-states makes states without --encoders: leave one of them out")
    if captions and args.image_size is None:
        faults.append(f"--from {args.source}: give --image-size")
    if args.text_states is not None:
        if not captions:
            faults.append("--text-states is for captions:PATH, the only data that has texts")
        with collecting(faults):
            _text_states(args.text_states)
    faults += no_autoencoder(args.vae)
    if args.output.is_dir() and not (args.output / "meta.json").exists():
        if any(args.output.iterdir()):
            faults.append(f"--output {args.output} holds other files; name a new folder")
    return faults


def _text_states(text: str) -> tuple[int, int]:
    """``"12x64"`` as (length, width); raises UserError for anything else."""
    sizes = text.split("x")
    if len(sizes) != 2 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise UserError(f"--text-states {text!r}: write length and width as 12x64")
    return int(sizes[0]), int(sizes[1])


def _wanted(args: argparse.Namespace) -> Wanted | None:
    """Captions are encoded as states and their mask; nothing is asked of other data."""
    if args.text_states is None:
        return None
    from megatron_pulse.data.dataset import FieldSpec
    from megatron_pulse.data.fields import Wanted

    length, width = _text_states(args.text_states)
    return Wanted(
        (args.channels, args.image_size, args.image_size),
        {"context": FieldSpec((length, width)), "context_mask": FieldSpec((length,), "int64")},
    )


def _open_autoencoder(vae: Path | None, dataset: DiffusionDataset) -> Autoencoder | None:
    if vae is None:
        return None
    from megatron_pulse.encoders.autoencoder import Autoencoder

    autoencoder = Autoencoder(vae)
    channels, height, _ = dataset.image_shape
    faults = []
    if channels != autoencoder.in_channels:
        faults.append(f"--vae {vae} takes {autoencoder.in_channels} channels, not {channels}")
    if height % autoencoder.factor:
        faults.append(
            f"images of {height} pixels cannot be encoded: --image-size must be a multiple of "
            f"{autoencoder.factor}"
        )
    require(faults)
    return autoencoder


def _posterior(args: argparse.Namespace) -> str:
    return args.posterior or "distribution"


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
    return text if autoencoder is None else f"{text}, {_POSTERIORS[_posterior(args)]}"
