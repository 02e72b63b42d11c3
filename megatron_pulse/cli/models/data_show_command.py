"""``pulse data show``: contact sheets of the pictures of a dataset, one for each bucket."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from megatron_pulse.cli.flag_checks import (
    add_flag,
    add_parser,
    as_user_error,
    check_file,
    command_faults,
    require,
)
from megatron_pulse.cli.models.encoder_flags import add_default_caption, caption_faults
from megatron_pulse.cli.shared_flags import (
    add_image_flags,
    add_shape_flags,
    image_size_of,
    shape_faults,
)
from megatron_pulse.data.picture_choice import ClipChoice
from megatron_pulse.dataclass_flags import FROM_ONE, TO_MILLION, read_flags
from megatron_pulse.encoders.sample_decoder import write_sheet
from megatron_pulse.errors import Faults

_DESCRIPTION = """\
Writes pictures as training sees them, scaled and cropped, with their captions or classes: a sheet
of evenly spaced samples. With several shapes there is a sheet for each, sheet-512x768.png.

{specs}
examples:
  pulse data show folder:photos --image-size 256 -o sheet.png
  pulse data show captions:photos --resolution 512 --buckets auto -o sheet.png
  pulse data show videos:films --resolution 256 --frames 17 --fps 8 -o sheet.png
"""
_LONGEST_CAPTION = 40


def add_show(commands: argparse._SubParsersAction[argparse.ArgumentParser], specs: str) -> None:
    """Add ``show``."""
    description = _DESCRIPTION.format(specs=specs)
    parser = add_parser(commands, "data show", "draw pictures of a dataset", description, run)
    add = partial(add_flag, parser)
    add("spec SPEC", "a dataset of pictures, as above")
    add("-o, --output FILE", "a sheet, .png", type=Path, required=True)
    add_image_flags(parser)
    add_shape_flags(parser)
    add_default_caption(parser)
    add("--count N", "pictures of a sheet (default 32)", within=TO_MILLION, default=32)
    add("--columns N", "pictures of a row (default 8)", within=FROM_ONE, default=8)


def run(args: argparse.Namespace) -> None:
    """Draw the sheets."""
    faults = command_faults(args) + shape_faults(args) + caption_faults(args, args.spec)
    faults += check_file(args.output, "--output", ".png")
    if args.spec.startswith("latents:"):
        faults.append(f"{args.spec}: latents are no pictures; show the data they were written from")
    require(faults)
    import torch

    from megatron_pulse.data.build import open_parts
    from megatron_pulse.data.opened_images import OpenedImages

    images = OpenedImages(read_flags(ClipChoice, args))
    with as_user_error(OSError, Faults):
        sizes = image_size_of(args, images)
        parts = open_parts(
            args.spec, sizes, args.channels, default_caption=args.default_caption, images=images
        )
        of_shape: dict[tuple[int, int, int], list[tuple[torch.Tensor, str]]] = {}
        for _, train, _ in parts:
            shapes = [train.shape_index(i) for i in range(len(train))]
            for shape in sorted(set(shapes)):
                own = [i for i, each in enumerate(shapes) if each == shape]
                shown = own[:: max(len(own) // args.count, 1)][: args.count]
                names = train.class_names
                drawn = [
                    (
                        train.image(i),
                        train.caption(i)[:_LONGEST_CAPTION]
                        or (names[train.label(i)] if names else ""),
                    )
                    for i in shown
                ]
                key = *train.pixels_of(shape), train.frames_of(shape)
                of_shape.setdefault(key, []).extend(drawn)
    for (height, width, frames), found in of_shape.items():
        size = f"{width}x{height}" + f"x{frames}" * (frames > 1)
        path = args.output
        if len(of_shape) > 1:
            path = path.with_name(f"{path.stem}-{size}{path.suffix}")
        captions = [caption for _, caption in found]
        pictures = torch.stack([picture for picture, _ in found])
        if pictures.dim() == 5:
            pictures = pictures.squeeze(2) if frames == 1 else pictures.transpose(1, 2)
        write_sheet(pictures, path, args.columns, captions)
        print(f"{len(found)} pictures of {size}: {path}")
