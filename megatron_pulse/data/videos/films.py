"""Frames of a film by time stamps, decoded by PyAV (an optional package).

A film's time stamps are read from its packets, without decoding. Frames are then decoded from the
key frame before the first that is wanted. Only containers of films are opened: FFmpeg's playlists
would read other files.

A frame whose bytes were changed is found where its codec has checksums or FFmpeg cannot follow it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from PIL import Image

from megatron_pulse.data.images.opening import MAX_PIXELS
from megatron_pulse.data.stored_file import version_of
from megatron_pulse.files import cache_folder, replacing
from megatron_pulse.mp4 import require_pyav

SUFFIXES = (
    *(".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi"),
    *(".mpg", ".mpeg", ".ts", ".m2ts", ".gif"),
)
"""Suffixes of files that are taken for films."""
_OPENED = {
    "format_whitelist": "mov,matroska,webm,avi,mpeg,mpegts,gif",
    "protocol_whitelist": "file",
}
_GIF_END = b";"
_QUARTER = 90
_MOST_FRAMES = 10_000_000


@dataclass(frozen=True)
class Film:
    """Size of the upright frames, and the time stamp of each frame, ascending.

    ``pts`` int64 counts ``seconds_per_pts``.
    """

    height: int
    width: int
    pts: np.ndarray
    seconds_per_pts: float

    @property
    def seconds(self) -> np.ndarray:
        """Time of each frame after the first, float64."""
        found: np.ndarray = (self.pts - self.pts[0]) * self.seconds_per_pts
        return found


def film_of(path: Path) -> Film:
    """Size and time stamps of a film, remembered on disk; raises ValueError and OSError.

    Of packets that the container marks as damaged or hidden, there is no frame; nor of those that
    refer to frames before the film, where it was cut within an open group of pictures.
    """
    name = xxhash.xxh3_128_hexdigest(f"{path.resolve()} {version_of(path)}".encode())
    place = cache_folder() / "films" / f"{name}.npz"
    with suppress(OSError, ValueError, KeyError, EOFError):
        with np.load(place, allow_pickle=False) as kept:
            height, width = kept["size"].tolist()
            return Film(height, width, kept["pts"], float(kept["seconds_per_pts"]))
    film = _read(path)
    with suppress(OSError), replacing(place) as beside, open(beside, "wb") as file:
        size = np.array([film.height, film.width])
        np.savez(file, size=size, pts=film.pts, seconds_per_pts=film.seconds_per_pts)
    return film


def frames_of(path: Path, pts: Sequence[int] | None = None) -> list[Image.Image]:
    """Upright RGB frames with the time stamps ``pts``, in this order; None: of the whole film.

    Pixels are those of ``VideoFrame.to_ndarray(format="rgb24")``; those that are not square are
    scaled to be. Raises ValueError for damaged films, and OSError.
    """
    wanted = None if pts is None else set(pts)
    found: dict[int, Image.Image] = {}
    # Where a container's index is wrong, no frame is found behind the place sought.
    for seeks in (True, False) if wanted else (False,):
        with _opened(path) as (container, stream):
            reorders = container.format.name == "avi" and stream.codec_context.has_b_frames
            if seeks and wanted and not reorders:
                with suppress(OSError, ValueError):
                    container.seek(min(wanted), stream=stream, backward=True)
            stamps = _stamps_of(path) if reorders else ()
            found = dict(_decoded(container, stream, wanted, stamps))
        if wanted is None or wanted <= found.keys():
            break
    if wanted is None:
        return list(found.values())
    if missing := len(wanted - found.keys()):
        raise ValueError(f"{missing} of {len(wanted)} frames cannot be decoded: it is damaged")
    return [found[each] for each in pts or ()]


def _read(path: Path) -> Film:
    pts = np.array(_stamps_of(path), np.int64)
    if not len(pts):
        raise ValueError("it has no frames")
    with _opened(path) as (container, stream):
        time_base = float(stream.time_base)
        if container.format.name == "gif" and _last_byte(path) != _GIF_END:
            raise ValueError("it is cut off")
    pts = pts[~np.isin(pts, _undecodable_head(path, pts))]
    if not len(pts):
        raise ValueError("none of its frames can be decoded")
    (first,) = frames_of(path, [int(pts[0])])
    width, height = first.size
    return Film(height, width, pts, time_base)


def _last_byte(path: Path) -> bytes:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)


def _undecodable_head(path: Path, pts: np.ndarray) -> list[int]:
    """Time stamps before the first key frame of which no frame comes."""
    with _opened(path) as (container, stream):
        if container.format.name == "avi":
            return []
        packets = (packet for packet in container.demux(stream) if packet.size)
        key = next((each.pts for each in packets if each.is_keyframe), None)
    if key is None or not (head := set(pts[pts < key].tolist())):
        return []
    with _opened(path) as (container, stream):
        for frame in container.decode(stream):
            stamp = frame.dts if frame.pts is None else frame.pts
            if not frame.is_corrupt:
                head.discard(stamp)
            if stamp is not None and stamp >= key:
                break
    return sorted(head)


def _stamps_of(path: Path) -> list[int]:
    """Time stamps of all frames, ascending."""
    with _opened(path) as (container, stream):
        return sorted({*_time_stamps(container.demux(stream))})


def _time_stamps(packets: Iterator[Any]) -> Iterator[int]:
    """Time stamps of packets; AVI gives only the order of decoding."""
    for number, packet in enumerate(packets):
        if number > _MOST_FRAMES:
            raise ValueError(f"it has more than {_MOST_FRAMES:,} frames. Cut it")
        stamp = packet.dts if packet.pts is None else packet.pts
        if packet.size and stamp is not None and not packet.is_corrupt and not packet.is_discard:
            yield stamp


def _decoded(
    container: Any, stream: Any, wanted: set[int] | None, stamps: Sequence[int]
) -> Iterator[tuple[int, Image.Image]]:
    """(time stamp, upright picture) of the ``wanted`` frames.

    ``stamps``, if there are any, are those of the frames as they come from the first on. (AVI tells
    when a frame is decoded, not when it is shown.)
    """
    last = max(wanted) if wanted else math.inf
    for number, frame in enumerate(container.decode(stream)):
        stamp = frame.dts if frame.pts is None else frame.pts
        if number < len(stamps):
            stamp = stamps[number]
        elif stamp is None:
            stamp = number
        if wanted is None or stamp in wanted:
            if frame.is_corrupt:
                raise ValueError(f"its frame at time stamp {stamp} is damaged")
            yield stamp, _upright(frame, stream)
        if stamp >= last:
            return


def _upright(frame: Any, stream: Any) -> Image.Image:
    if frame.width * frame.height > MAX_PIXELS:
        raise ValueError(f"it has {frame.width}x{frame.height} pixels; at most {MAX_PIXELS:,}")
    pixels = frame.to_ndarray(format="rgb24")
    aspect = stream.sample_aspect_ratio
    image = Image.fromarray(pixels)
    if aspect and aspect != 1:
        wide = max(1, round(frame.width * float(aspect)))
        image = image.resize((wide, frame.height), Image.Resampling.BICUBIC)
    turns = round(frame.rotation / _QUARTER) % 4
    turned = (None, Image.Transpose.ROTATE_90, Image.Transpose.ROTATE_180,
              Image.Transpose.ROTATE_270)[turns]  # fmt: skip
    return image if turned is None else image.transpose(turned)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Any]]:
    """(container, video stream) of a film; FFmpeg's errors become ValueErrors."""
    av = require_pyav()
    with open(path, "rb") as content:  # a missing file is no damaged one
        if not content.read(1):
            raise ValueError("it is empty")
    try:
        with av.open(str(path), options=dict(_OPENED)) as container:
            if not container.streams.video:
                raise ValueError("it has no video stream")
            stream = container.streams.video[0]
            if stream.codec_context is None:
                raise ValueError("its codec is unknown")
            yield container, stream
    except (av.FFmpegError, EOFError, IndexError, TypeError, OverflowError) as error:
        text = str(getattr(error, "strerror", None) or error) or type(error).__name__
        raise ValueError(f"it cannot be read as a film: {text}") from error
