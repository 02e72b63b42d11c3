"""MP4 files by PyAV, an optional package."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_pulse.errors import UserError

if TYPE_CHECKING:
    import numpy as np


def require_pyav() -> Any:
    """PyAV; raises UserError where it is not installed."""
    try:
        import av
    except ImportError as error:
        raise UserError(
            "videos are read and written by PyAV, which is not installed: pip install "
            "megatron-pulse[video]"
        ) from error
    return av


def write_mp4(frames: Sequence[np.ndarray], path: Path, fps: float) -> None:
    """Write frames ``[h, w, 3]`` uint8 as H.264; odd sides lose a pixel."""
    av = require_pyav()
    height, width = (side // 2 * 2 for side in frames[0].shape[:2])
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for pixels in frames:
            frame = av.VideoFrame.from_ndarray(pixels[:height, :width].copy(), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
