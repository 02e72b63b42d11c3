"""Files of samples: a sheet of all samples, also animated, or one file for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from megatron_pulse.files import replacing, replacing_folder
from megatron_pulse.fonts import runs
from megatron_pulse.mp4 import write_mp4

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
    grid = _grid(images, columns, labels, scale)
    with replacing(path) as beside:
        grid.save(beside, format="PNG")
    return Path(path)


def save_animation(
    videos: Tensor,
    path: Path,
    columns: int,
    labels: Sequence[object] | None = None,
    scale: int = 1,
    fps: float = 16.0,
) -> Path:
    """Write ``videos [n, f, c, h, w]`` side by side, as an animated GIF or an MP4 (by PyAV).

    Frames are sheets as of ``save_grid``. Raises UserError for an MP4 without PyAV.
    """
    frames = [_grid(each, columns, labels, scale) for each in videos.unbind(1)]
    with replacing(path) as beside:
        if path.suffix.lower() == ".gif":
            lasting = max(1, round(1000 / fps))
            more = {"append_images": frames[1:], "duration": lasting, "loop": 0}
            frames[0].save(beside, format="GIF", save_all=True, **more)
        else:
            write_mp4([np.asarray(frame) for frame in frames], beside, fps)
    return path


def _grid(
    images: Tensor, columns: int, labels: Sequence[object] | Tensor | None, scale: int
) -> Image.Image:
    count, channels, height, width = images.shape
    if channels not in (1, 3):
        raise ValueError(f"save_grid draws 1 or 3 channels, got {channels}; decode latents first")
    if labels is not None and len(labels) != count:
        raise ValueError(f"save_grid got {count} images and {len(labels)} labels")
    caption = _CAPTION_HEIGHT if labels is not None else 0
    cell_width, cell_height = width * scale + _PADDING, height * scale + caption + _PADDING
    rows = -(-count // columns)
    grid = Image.new(
        "RGB", (columns * cell_width + _PADDING, rows * cell_height + _PADDING), "white"
    )
    pen = ImageDraw.Draw(grid)
    for i, tile in enumerate(_pictures(images)):
        x, y = i % columns * cell_width + _PADDING, i // columns * cell_height + _PADDING
        grid.paste(tile.resize((width * scale, height * scale), Image.Resampling.NEAREST), (x, y))
        if labels is not None:
            label = labels[i].item() if isinstance(labels, Tensor) else labels[i]
            _write(pen, x, y + height * scale, str(label), width * scale)
    return grid


def save_pictures(images: Tensor, folder: Path) -> list[Path]:
    """Write ``images [n, c, h, w]`` in [-1, 1] (c 1 or 3) as ``0000.png`` and so on, in order.

    ``folder`` must be new or empty. It appears only when complete. Returns the files.
    """
    return _save_all(folder, {f"{i:04d}.png": p for i, p in enumerate(_pictures(images))})


def save_frames(videos: Tensor, folder: Path) -> list[list[Path]]:
    """Write ``videos [n, f, c, h, w]`` as ``save_pictures`` does, one folder per video.

    Frames are ``0000/0000.png`` and so on. Returns the files of each video.
    """
    count = videos.shape[1]
    named = {
        f"{i // count:04d}/{i % count:04d}.png": p
        for i, p in enumerate(_pictures(videos.flatten(0, 1)))
    }
    files = _save_all(folder, named)
    return [files[first : first + count] for first in range(0, len(files), count)]


def _save_all(folder: Path, named: Mapping[str, Image.Image]) -> list[Path]:
    with replacing_folder(folder) as beside:
        for name, picture in named.items():
            (beside / name).parent.mkdir(exist_ok=True)
            picture.save(beside / name, format="PNG")
    return [folder / name for name in named]


def _pictures(images: Tensor) -> Iterator[Image.Image]:
    pixels = ((images.detach().cpu().float().clamp(-1, 1) + 1) * 127.5).round().byte().numpy()
    for pixel in pixels:
        colours = np.repeat(pixel, 4 - len(pixel), axis=0)[:3]
        yield Image.fromarray(colours.transpose(1, 2, 0))


def _write(pen: ImageDraw.ImageDraw, x: float, y: float, label: str, width: int) -> None:
    """Draw a line of text from its upper left corner, each letter in a font that has it.

    Letters beyond ``width`` are left out.
    """
    end = x + width
    for part, path in runs(label):
        font = ImageFont.truetype(str(path), _TEXT_SIZE)
        fits = next((n for n in range(len(part), 0, -1) if x + font.getlength(part[:n]) <= end), 0)
        pen.text((x, y), part[:fits], fill="black", font=font)
        if fits < len(part):
            return
        x += font.getlength(part)
