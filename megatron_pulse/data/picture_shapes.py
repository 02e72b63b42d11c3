"""Shapes of the pictures of a dataset, as flags ask for them."""

from __future__ import annotations

from megatron_pulse.data.build import picture_sizes
from megatron_pulse.data.images.shapes import (
    AUTO,
    Size,
    chosen_shapes,
    read_shapes,
    shown,
    used_shapes,
)
from megatron_pulse.data.opened_images import OpenedImages
from megatron_pulse.data.picture_choice import ShapeChoice
from megatron_pulse.errors import UserError


def picture_shapes(
    data: str,
    choice: ShapeChoice,
    factor: int = 1,
    default_caption: str = "",
    images: OpenedImages | None = None,
) -> list[Size]:
    """(height, width) in pixels of the shapes that ``choice`` gives the pictures of ``data``.

    Sides are multiples of ``factor``. Shapes without a picture are left out. ``images`` are those
    that this start has opened, with the ``default_caption``. Raises UserError.
    """
    side, text = choice.resolution, choice.buckets
    if text == AUTO:
        assert side is not None
        step = -(-choice.step // factor) * factor
        sizes = picture_sizes(data, default_caption, images)
        return chosen_shapes(sizes, side, step, choice.max_buckets)
    shapes = [(side, side)] if text is None and side is not None else read_shapes(text or "")
    if odd := [shown(shape) for shape in shapes if any(side % factor for side in shape)]:
        raise UserError(
            f"pictures of {', '.join(odd)} cannot be encoded: sides must be multiples of {factor}"
        )
    if text is None:
        return shapes
    used = used_shapes(shapes, picture_sizes(data, default_caption, images))
    return [shape for shape in shapes if shape in used] or shapes[:1]
