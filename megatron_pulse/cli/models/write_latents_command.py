"""``pulse data write-latents``: encode a dataset once, ahead of training."""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path

from megatron_pulse.cli.backbone_flags import (
    add_backbone_flags,
    add_option_flag,
    backbone_faults,
)
from megatron_pulse.cli.flag_checks import (
    add_flag,
    add_parser,
    check_folder,
    command_faults,
    require,
    vae_faults,
)
from megatron_pulse.cli.launcher_env import RankOfJob
from megatron_pulse.cli.models.encoder_flags import (
    add_default_caption,
    add_encoder_flags,
    add_vae_tiling,
    autoencoder_folder,
    caption_faults,
    encoder_faults,
)
from megatron_pulse.cli.shared_flags import add_image_flags, add_shape_flags, shape_faults
from megatron_pulse.data.picture_choice import ShapeChoice
from megatron_pulse.dataclass_flags import DTYPES, TO_MILLION, read_flags
from megatron_pulse.errors import UserError, collecting

_DESCRIPTION = """\
Without --vae the latents are the pixels. With it they are mean and deviation of the posterior of a
diffusers AutoencoderKL, shifted and scaled by its configuration; training draws a new sample at
every reading, as diffusers' trainers do. --posterior sample or mean keeps half the bytes.

--buckets writes pictures of several shapes, each into a store below DIR; so does --frames of
several numbers, for clips of videos:PATH. Autoencoders of videos (of Wan, HunyuanVideo, CogVideoX,
LTX, Mochi, SVD) encode the middle of each film. Of a --backbone that continues pictures, fields of
the first frame are written too; SVD's --encoders also embed it. --flip writes latents of mirrored
pictures beside the others.

Files are written in whole shards. The same command again resumes, and encodes shards anew whose
pictures were edited. Ranks of torchrun or srun share the shards; the folder is equal byte for byte.
Values that the type on disk cannot hold are refused. Sizes and crops of pictures are kept for
models that read them. Train on the result with --pulse-data latents:DIR.

Captions become text states. --encoders DIR --backbone NAME takes text encoders and autoencoder of a
diffusers pipeline folder, and writes the states that the backbone reads, also for a dropped
caption. --store-text tokens writes token ids, for training that encodes them. --text-states LxD
makes states of random word vectors, as training on captions:PATH does. Nothing is downloaded.

{specs}
examples:
  pulse data write-latents --from mnist --image-size 16 -o runs/mnist16
  pulse data write-latents --from folder:photos --image-size 256 --vae sd-vae -o runs/latents
  pulse data write-latents --from folder:photos --resolution 512 --buckets auto --vae sd-vae \\
      -o runs/latents
  pulse data write-latents --from videos:films --buckets 832x480,480x832 --frames 1,81 --fps 16 \\
      --vae wan/vae -o runs/clips
  pulse data write-latents --from videos:films --buckets 1024x576 --frames 14 --fps 7 -o runs/svd \\
      --encoders svd --module diffusers:svd/unet --option height=72 --option width=128
  pulse data write-latents --from captions:runs/emoji/images --image-size 32 --text-states 12x64 \\
      -o runs/emoji-latents
  pulse data write-latents --from captions:photos --image-size 512 --encoders sd-v1.5 \\
      --backbone sd-v1.5 -o runs/photos
  pulse run --nproc-per-node 8 --module megatron_pulse.cli data write-latents --from ...
  srun pulse data write-latents --from ...
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
    add = partial(add_flag, parser)
    add("--from SPEC", "dataset to encode", dest="source", required=True)
    add("-o, --output DIR", "the folder to write", type=Path, required=True)
    add_image_flags(parser)
    add_shape_flags(parser)
    add("--flip", "latents of mirrored pictures too, for --pulse-flip")
    add("--dtype", "type on disk (default fp16)", choices=list(DTYPES), default="fp16")
    add("--vae DIR|hf:ID", "a diffusers AutoencoderKL folder", type=Path)
    add_vae_tiling(parser, "encode")
    add_encoder_flags(parser)
    add_backbone_flags(parser.add_mutually_exclusive_group(), "backbone that will read the results")
    add_option_flag(parser, "override one of the backbone's options")
    add(
        "--posterior",
        "what of --vae to keep: mean and deviation (distribution, default), a sample, or the mean",
        choices=["distribution", "sample", "mean"],
    )
    add(
        "--inpaint-masks random|DIR",
        "masks of an inpainting --backbone's pictures, fixed for each: random, or a folder of grey "
        "pictures of the same names (default random)",
    )
    add(
        "--store-text",
        "store states of --encoders (default), or token ids, some thousandth of the bytes",
        choices=["states", "tokens"],
    )
    add("--text-states LxD", "length and width of captions' states")
    add_default_caption(parser)
    add("--batch-size N", "images per encoding (16)", within=TO_MILLION, default=16)
    add("--shard-size N", "samples per file (1024)", within=TO_MILLION, default=1024)
    add("--verify", "read every image before encoding")


def run(args: argparse.Namespace) -> None:
    """Encode the samples that are not yet in the folder."""
    place, faults = RankOfJob.of(os.environ), _check(args)
    if faults and place.rank:
        raise SystemExit(2)  # rank 0 prints why
    require(faults)
    from megatron_pulse.cli.models.encode_dataset import write_latents

    text_states = _text_states(args.text_states) if args.text_states else None
    write_latents(args, place, text_states, read_flags(ShapeChoice, args))


def _check(args: argparse.Namespace) -> list[str]:
    faults = check_folder(args.output, "--output")
    faults += command_faults(args)
    if args.source.startswith("latents:"):
        faults.append(f"--from {args.source}: these are latents already")
    captions = args.source.startswith(("captions:", "pairs:"))
    if captions and args.text_states is None and args.encoders is None:
        faults.append(
            f"--from {args.source} has captions: give --encoders and --backbone, or --text-states"
        )
    faults += encoder_faults(args) + caption_faults(args, args.source)
    if args.encoders is not None and args.vae is None:
        from megatron_pulse.encoders.components import autoencoder_faults

        with collecting(faults):
            faults += [
                f"--encoders {args.encoders}: {fault}, or give another as --vae"
                for fault in autoencoder_faults(args.encoders)
            ]
    if autoencoder_folder(args) is None:
        given = {"--posterior": args.posterior is not None, "--vae-tiling": args.vae_tiling}
        if alone := " and ".join(flag for flag, is_given in given.items() if is_given):
            needs = "needs" if sum(given.values()) == 1 else "need"
            faults.append(f"{alone} {needs} an autoencoder: give --vae, or --encoders with one")
    if args.store_text is not None and args.encoders is None:
        faults.append("--store-text is for --encoders")
    if args.encoders is None and args.vae is None:
        if args.backbone is not None or args.option:
            faults.append("--backbone, --module and --option are for --encoders or --vae")
    elif args.backbone is not None:
        faults += backbone_faults(args)
    elif args.encoders is not None:
        faults.append("--encoders: name the --backbone or --module that will read the states")
    elif args.option:
        faults.append("--option is for a --backbone")
    if args.encoders is not None:
        from megatron_pulse.data.opened_images import IMAGES

        if args.source.partition(":")[0] not in IMAGES:
            faults.append("--encoders is for images with captions; for other data give only --vae")
        if args.text_states is not None:
            faults.append("--text-states and --encoders: give one")
    faults += shape_faults(args)
    if captions and args.image_size is None and args.resolution is None and args.buckets is None:
        faults.append(f"--from {args.source}: give --image-size, or --resolution")
    if any(name.rpartition("*")[2].isdecimal() for name in [args.source] if "*" in name):
        faults.append(f"--from {args.source}: repeats are for training, --pulse-data latents:DIR*N")
    if args.text_states is not None:
        from megatron_pulse.data.opened_images import IMAGES

        if args.source.partition(":")[0] not in IMAGES:
            faults.append(f"--text-states is for captions, which {args.source} cannot have")
        with collecting(faults):
            _text_states(args.text_states)
    faults += vae_faults(args.vae)
    kept = ("meta.json", "buckets.json")
    if args.output.is_dir() and not any((args.output / name).exists() for name in kept):
        if any(not path.name.startswith((".", "null-")) for path in args.output.iterdir()):
            faults.append(f"--output {args.output} holds other files; name a new folder")
    return faults


def _text_states(text: str) -> tuple[int, int]:
    """``"12x64"`` as (length, width); raises UserError for anything else."""
    sizes = text.split("x")
    if len(sizes) != 2 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise UserError(f"--text-states {text!r}: write length and width as 12x64")
    return int(sizes[0]), int(sizes[1])
