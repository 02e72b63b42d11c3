"""Films for tests: drawn here, encoded by PyAV."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

CODECS = {
    ".mp4": ("libx264", "yuv420p"), ".mkv": ("ffv1", "yuv420p"), ".webm": ("libvpx-vp9", "yuv420p"),
    ".avi": ("mpeg4", "yuv420p"), ".mov": ("mjpeg", "yuvj420p"), ".mpg": ("mpeg1video", "yuv420p"),
    ".ts": ("libx264", "yuv420p"), ".gif": ("gif", "rgb8"),
}  # fmt: skip


def write_film(
    path: Path,
    count: int = 20,
    size: tuple[int, int] = (48, 32),
    rate: int = 25,
    milliseconds: Sequence[int] = (),
    codec: str | None = None,
    **settings: Any,
) -> Path:
    """A film of ``count`` frames whose picture tells their number, with a key frame every five.

    ``milliseconds`` are times of the frames, ``codec`` is another than that of the suffix.
    """
    import av

    usual, pixels = CODECS[path.suffix]
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec or usual, rate=rate)
        stream.width, stream.height = size
        stream.pix_fmt, stream.codec_context.gop_size = pixels, 5
        for name, value in settings.items():
            setattr(stream.codec_context, name, value)
        if milliseconds:
            stream.codec_context.time_base = Fraction(1, 1000)
        for i in range(count):
            picture = np.zeros((size[1], size[0], 3), np.uint8)
            picture[..., 0], picture[i % size[1]] = i * 12 % 256, 255
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            if milliseconds:
                frame.pts, frame.time_base = milliseconds[i], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def write_sound(path: Path) -> Path:
    """A container with sound alone."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(
            np.zeros((1, 1024), np.float32), format="fltp", layout="mono"
        )
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def turn(path: Path) -> Path:
    """Let an MP4 be shown turned by 90 degrees clockwise, as telephones write it."""
    content = bytearray(path.read_bytes())
    place = content.index(b"tkhd") + 4
    matrix = place + 40  # of version 0: flags, times, number, duration, layer, volume
    one = 0x10000
    content[matrix : matrix + 36] = struct.pack(">9i", 0, one, 0, -one, 0, 0, 0, 0, 0x40000000)
    path.write_bytes(content)
    return path


def frames_by_pyav(path: Path) -> list[np.ndarray]:
    """All frames as PyAV decodes them."""
    import av

    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
