"""Flags that several commands take, each defined once."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_pulse.cli.backbone_flags import add_code_flag
from megatron_pulse.cli.flag_checks import add_flag
from megatron_pulse.cli.output import DRAWINGS
from megatron_pulse.data.images.shapes import AUTO
from megatron_pulse.data.picture_choice import ClipChoice, ShapeChoice
from megatron_pulse.dataclass_flags import (
    PIXELS,
    TO_4096,
    TO_MILLION,
    add_flags,
    flag_faults,
    flag_name,
    read_flags,
)
from megatron_pulse.planner.schedule.ilp.solvers import Solver, read_solver

if TYPE_CHECKING:
    from megatron_pulse.data.images.folder import ImageSize
    from megatron_pulse.data.opened_images import OpenedImages

DTYPES = ("float32", "bfloat16", "float16")


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the positional PLAN."""
    add_flag(parser, "plan PLAN", "what 'pulse tune' wrote", reads=True)


def add_drawing(parser: argparse.ArgumentParser) -> None:
    """Add ``-o`` for a drawing of a plan."""
    text = ".svg, .html or .json, see above"
    add_flag(parser, "-o, --output FILE", text, writes=DRAWINGS)


def add_profile(parser: Any) -> None:
    """Add ``--profile``."""
    add_flag(parser, "--profile JSON", "what 'pulse profile' wrote", reads=True)


def add_encoder_costs(parser: Any, when: str = "") -> None:
    """Add ``--encoders`` of a plan; ``when`` precedes its help."""
    add_flag(
        parser,
        "--encoders JSON",
        f"{when}costs of frozen encoders that run in bubbles for the next batch (form: "
        "megatron_pulse/planner/bubble_fill/README.md)",
        reads=True,
    )


def add_num_devices(parser: argparse.ArgumentParser) -> None:
    """Add ``-p``."""
    add_flag(
        parser, "-p, --num-devices P", "pipeline devices", within=TO_4096, type=int, required=True
    )


def add_micro_batch_size(parser: argparse.ArgumentParser, otherwise: str = "") -> None:
    """Add ``--micro-batch-size`` of one microbatch; ``otherwise`` extends the default."""
    add_flag(
        parser,
        "--micro-batch-size B",
        f"samples of a microbatch (default: the smallest in the profile{otherwise})",
        within=TO_MILLION,
        type=int,
    )


def add_solver(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Add ``--solver``, whose help is ``meaning``."""

    choices = ("auto", *map(str, Solver))
    add_flag(parser, "--solver", meaning, type=read_solver, choices=choices, default="auto")


def add_image_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--image-size`` and ``--channels`` of a dataset."""
    add_flag(parser, "--image-size N", "resize images to NxN", within=PIXELS, type=int)
    add_flag(parser, "--channels", "of a folder (3)", type=int, choices=[1, 3], default=3)
    add_flag(parser, "--frames F,...", "frames of clips of videos:PATH; of several, most first")
    add_flags(ClipChoice, parser)


def add_shape_flags(parser: argparse.ArgumentParser) -> None:
    """Add --resolution, --buckets and the flags beside them."""
    add_flags(ShapeChoice, parser)


def image_size_of(args: argparse.Namespace, images: OpenedImages) -> ImageSize | None:
    """Sizes of pictures that the flags ask for; raises UserError.

    ``images`` are those that the command has opened.
    """
    from megatron_pulse.data.picture_shapes import picture_shapes

    choice = read_flags(ShapeChoice, args)
    if choice.resolution is None and choice.buckets is None:
        return clip_sizes(args.image_size, args.frames)
    caption = getattr(args, "default_caption", "")  # `pulse data info` has no such flag
    sizes = picture_shapes(args.spec, choice, default_caption=caption, images=images)
    return clip_sizes(sizes, args.frames)


def clip_sizes(size: ImageSize | None, frames: str | None) -> ImageSize | None:
    """Every size with each number of ``frames``, if there are some."""
    counts = numbers(frames)
    if counts is None or size is None:
        return size
    sides = [(size, size)] if isinstance(size, int) else size
    return [(*side[:2], count) for count in reversed(counts) for side in sides]


def shape_faults(args: argparse.Namespace) -> list[str]:
    """Faults of the flags of ``ShapeChoice`` beside --image-size."""
    choice = read_flags(ShapeChoice, args)
    faults = [*flag_faults(choice), *number_list_faults(args, "frames")]
    films = any(name.startswith("videos:") for name in _specs(args))
    clips = read_flags(ClipChoice, args)
    faults += [*flag_faults(clips)]
    if (args.frames is not None or clips != ClipChoice()) and not films:
        faults.append("--frames, --fps, --frame-stride, --motion-bucket are for videos:PATH")
    if films and choice.buckets == AUTO:
        faults.append("--buckets auto is for pictures: give clips a list of shapes, and --frames")
    asked = choice.resolution is not None or choice.buckets is not None
    if asked and args.image_size is not None:
        faults.append("--image-size excludes --resolution and --buckets: give one of them")
    return faults


def _specs(args: argparse.Namespace) -> list[str]:
    from megatron_pulse.data.build import names_of

    return names_of(str(getattr(args, "spec", None) or args.source))


def add_checkpoint_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose a checkpoint and its weights."""
    add_flag(parser, "--load DIR", "folder given as --save in training", type=Path, required=True)
    add_flag(
        parser,
        "--iteration N|best",
        "a checkpoint other than the latest; best: lowest validation loss (--pulse-keep-best)",
        type=_step,
    )
    add_flag(parser, "--raw", "weights as trained, not their EMA")
    add_flag(parser, "--chain NAME", "backbone of a cascade")
    add_flag(
        parser,
        "--frozen-weights DIR",
        "of an adapter's run: the model that it was trained on, if that has moved",
        type=Path,
    )
    add_code_flag(parser, "the checkpoint")


def _step(text: str) -> int | str:
    """Step of a checkpoint: a number, or ``best``."""
    if text == "best" or text.isdecimal():
        return text if text == "best" else int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither a step nor 'best'")


def numbers(text: str | None) -> tuple[int, ...] | None:
    """Distinct numbers above 0, ascending; raises ValueError for other text."""
    if text is None:
        return None
    numbers = sorted({int(word) for word in text.split(",")})
    if numbers[0] < 1:
        raise ValueError(text)
    return tuple(numbers)


def number_list_faults(args: argparse.Namespace, *names: str) -> list[str]:
    """Faults of flags of these names that are no lists of numbers."""
    faults = []
    for name in names:
        try:
            numbers(text := getattr(args, name))
        except ValueError:
            faults.append(f"{flag_name(name)} {text}: write whole numbers above 0 as 1,2,4")
    return faults
