"""Flags of pictures: their shapes, and the augmentation of samples."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_pulse.data.images.shapes import AUTO, MOST_BUCKETS, STEP, read_shapes
from megatron_pulse.dataclass_flags import ABOVE_ZERO, BELOW_ONE, FROM_ONE, FROM_ZERO, flag
from megatron_pulse.errors import UserError

if TYPE_CHECKING:
    from megatron_pulse.data.augmentation import Augmentation

BUCKETS = "buckets"
"""Option of backbones that lists their shapes, HEIGHTxWIDTH in the sizes of samples."""

RANDOM = "random"
"""Masks of inpainting that are drawn, in place of a folder of masks."""


def _buckets(choice: ShapeChoice) -> str | None:
    text = choice.buckets
    if text is None:
        return None
    if text == AUTO:
        return None if choice.resolution else "auto: give the resolution, whose area they have"
    try:
        read_shapes(text)
    except UserError as error:
        return str(error)
    return None


def _resolution(choice: ShapeChoice) -> str | None:
    if choice.resolution is not None and choice.buckets not in (None, AUTO):
        return "is for one square, or for buckets auto: leave it out beside a list"
    return None


def _of_auto(choice: ShapeChoice) -> str | None:
    given = choice.bucket_step is not None or choice.max_buckets != MOST_BUCKETS
    return "is for buckets that are chosen: give auto" if given and choice.buckets != AUTO else None


def _step(choice: ShapeChoice) -> str | None:
    step, resolution = choice.bucket_step, choice.resolution
    if step is not None and resolution is not None and step > resolution:
        return f"{step} is above the resolution, {resolution}"
    return _of_auto(choice) if step is not None else None


@dataclass(frozen=True)
class ShapeChoice:
    """Shapes of pictures, in pixels."""

    resolution: int | None = flag(
        "side of square pictures in pixels",
        metavar="PX",
        within=FROM_ONE,
        check=_resolution,
    )
    buckets: str | None = flag(
        "shapes of pictures, width x height in pixels: auto (by the data), or a list. Sets the "
        "model's option buckets, in latent sizes",
        metavar="auto|WxH,...",
        check=_buckets,
    )
    bucket_step: int | None = flag(
        "buckets auto have multiples of it as sides (64)",
        metavar="PX",
        within=FROM_ONE,
        check=_step,
    )
    max_buckets: int = flag(
        "buckets auto are at most so many (default 9)",
        MOST_BUCKETS,
        metavar="N",
        within=FROM_ONE,
        check=_of_auto,
    )

    @property
    def step(self) -> int:
        """Multiple of the sides of chosen buckets."""
        if self.bucket_step is not None:
            return self.bucket_step
        small = self.resolution is not None and self.resolution < 4 * STEP
        return max((self.resolution or 0) // 4, 1) if small else STEP


def _frame_noise(text: str) -> tuple[float, float]:
    """``"0.05,0.5"`` as median and deviation; raises ArgumentTypeError."""
    try:
        median, deviation = map(float, text.split(","))
    except ValueError:
        median, deviation = math.nan, 0.0
    if not (0 <= median < math.inf and 0 <= deviation < math.inf):
        raise argparse.ArgumentTypeError(f"{text!r}: write median and deviation as 0.05,0.5")
    return median, deviation


@dataclass(frozen=True)
class ClipChoice:
    """Frames of clips."""

    fps: float | None = flag(
        "frames a second of clips, by the films' time stamps (default: each film's own frames)",
        metavar="R",
        within=ABOVE_ZERO,
    )
    frame_stride: int = flag(
        "every so many frames are one of a clip (default 1)", 1, metavar="N", within=FROM_ONE
    )
    motion_bucket: float = flag(
        "motion in clips, which SVD reads (default 127)", 127.0, metavar="M", within=FROM_ZERO
    )
    frame_noise: tuple[float, float] | None = flag(
        "noise on SVD's first frames: median strength, deviation of its logarithm (0.05,0.5)",
        metavar="S,STD",
        read=_frame_noise,
    )


def _keep_tags(choice: AugmentationChoice) -> str | None:
    return "is for shuffled tags" if choice.keep_tags and not choice.shuffle_tags else None


@dataclass(frozen=True)
class AugmentationChoice:
    """Changes of training samples, functions of (seed, sample, position)."""

    flip: float = flag(
        "probability of mirroring a picture (default 0)",
        0.0,
        metavar="P",
        within=BELOW_ONE,
    )
    crop: Literal["center", "random"] = flag("place of the crop (default center)", "center")
    clip_start: Literal["middle", "random"] = flag(
        "place of clips in their films in training (default random); validation: middle", "random"
    )
    shuffle_tags: bool = flag("draw the order of captions' tags", False)
    keep_tags: int = flag(
        "first tags that keep their place (default 0)",
        0,
        metavar="N",
        within=FROM_ZERO,
        check=_keep_tags,
    )
    caption_prefix: tuple[str, ...] = flag(
        "text before each caption (or one a dataset)",
        (),
        metavar="TEXT",
    )

    @property
    def augmentation(self) -> Augmentation:
        """Changes drawn at every visit."""
        from megatron_pulse.data.augmentation import Augmentation

        random_crop = self.crop == "random"
        return Augmentation(self.flip, random_crop, self.shuffle_tags, self.keep_tags)


AUGMENTATION: Sequence[str] = (
    *("flip", "crop", "clip_start", "shuffle_tags", "keep_tags", "caption_prefix"),
)
"""Fields of AugmentationChoice."""
