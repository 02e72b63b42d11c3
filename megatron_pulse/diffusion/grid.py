"""A grid of images as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from megatron_pulse.files import replacing
from megatron_pulse.letters import runs

_CAPTION_HEIGHT = 12
_TEXT_SIZE = 10
_PADDING = 2


def save_grid(
    images: Tensor,
    path: str | Path,
    columns: int,
    labels: Sequence[object] | Tensor | None = None,
    scale: int = 1,
) -> Path:
    """Write ``images [n, c, h, w]`` in [-1, 1] (c 1 or 3) as a PNG grid, row by row.

    ``labels`` are written under the images; ``scale`` enlarges each pixel. Returns ``path``.
    """
    count, channels, height, width = images.shape
    if channels not in (1, 3):
        raise ValueError(f"save_grid draws 1 or 3 channels, got {channels}; decode latents first")
    if labels is not None and len(labels) != count:
        raise ValueError(f"save_grid got {count} images and {len(labels)} labels")
    pixels = ((images.detach().cpu().float().clamp(-1, 1) + 1) * 127.5).round().byte().numpy()
    caption = _CAPTION_HEIGHT if labels is not None else 0
    cell_width, cell_height = width * scale + _PADDING, height * scale + caption + _PADDING
    rows = -(-count // columns)
    grid = Image.new(
        "RGB", (columns * cell_width + _PADDING, rows * cell_height + _PADDING), "white"
    )
    pen = ImageDraw.Draw(grid)
    for i, pixel in enumerate(pixels):
        x, y = i % columns * cell_width + _PADDING, i // columns * cell_height + _PADDING
        tile = Image.fromarray(np.repeat(pixel, 4 - channels, axis=0)[:3].transpose(1, 2, 0))
        grid.paste(tile.resize((width * scale, height * scale), Image.Resampling.NEAREST), (x, y))
        if labels is not None:
            label = labels[i].item() if isinstance(labels, Tensor) else labels[i]
            _write(pen, x, y + height * scale, str(label))
    with replacing(path) as beside:
        grid.save(beside, format="PNG")
    return Path(path)


def _write(pen: ImageDraw.ImageDraw, x: float, y: float, label: str) -> None:
    """A line of text from its upper left corner, each letter in a font that has it."""
    for part, path in runs(label):
        font = ImageFont.truetype(str(path), _TEXT_SIZE)
        pen.text((x, y), part, fill="black", font=font)
        x += font.getlength(part)
