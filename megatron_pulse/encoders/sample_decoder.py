"""Decoding of samples into pictures, and their files: a sheet, or a file for each picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_pulse.encoders.autoencoder import Autoencoder

MIN_SIDE = 56
"""Smallest side in pixels to which pictures on a sheet are enlarged."""
FPS = 16.0
"""Default frames a second of an animation."""
MOST_FRAMES = 16
"""Frames of a video on a sheet; a longer one is sampled evenly from the first to the last."""


@dataclass(frozen=True)
class SampleDecoder:
    """Conversion of samples of ``shape`` to pictures, with or without an autoencoder.

    The first ``num_padding`` frames of latents are left out.
    """

    shape: tuple[int, ...]
    autoencoder: Autoencoder | None
    num_padding: int = 0

    @property
    def factor(self) -> int:
        """Pixels per position of a sample along a side."""
        return 1 if self.autoencoder is None else self.autoencoder.factor

    @property
    def _channels(self) -> tuple[int, ...]:
        return (1, 3) if self.autoencoder is None else (self.autoencoder.latent_channels,)

    @property
    def _channel_axis(self) -> int | None:
        """Channel axis of a sample.

        In a video, channels come before the frames, or behind them (CogVideoX). Only an autoencoder
        identifies latents ``(f, c, h, w)``, since a count of 3 may be of frames.
        """
        axes = {3: (0,), 4: (0,) if self.autoencoder is None else (0, 1)}.get(len(self.shape), ())
        return next((axis for axis in axes if self.shape[axis] in self._channels), None)

    @property
    def frame_axis(self) -> int:
        """Frame axis of a batch of videos."""
        if self.autoencoder is not None and self.autoencoder.frames_first:
            return 1
        return 2 if self._channel_axis == 0 else 1

    def faults(
        self, prefix: str = "--", way_out: str = "write them with -o FILE.safetensors"
    ) -> list[str]:
        """Faults of samples that are not pictures; ``prefix`` is that of the flags to name."""
        if self._channel_axis is not None:
            return []
        shape = "x".join(map(str, self.shape))
        if len(self.shape) not in (3, 4):
            return [f"samples are {shape}, which is no picture and no video: {way_out}"]
        if self.autoencoder is not None:
            channels = f"{self._channels[0]} channels"
            return [
                f"{prefix}vae {self.autoencoder.folder} decodes {channels}, and samples are {shape}"
            ]
        return [
            f"samples are latents of {shape}: decode them with {prefix}vae, or with the "
            f"autoencoder of {prefix}encoders, or {way_out}"
        ]

    def __call__(self, samples: Tensor) -> Tensor:
        """Pixels in [-1, 1]: ``[n, c, h, w]``, or for videos ``[n, f, c, h, w]``."""
        if samples.dim() == 4:
            return self._decoded(samples)
        if self.autoencoder is not None and self.autoencoder.is_video:
            import torch

            axis, count = self.frame_axis, self.num_padding
            samples = samples.narrow(axis, count, samples.shape[axis] - count)
            videos = torch.cat([self.autoencoder.decode(part) for part in samples.split(1)])
            return videos.transpose(1, 2)
        frames = samples.movedim(self.frame_axis, 1)
        return self._decoded(frames.flatten(0, 1)).unflatten(0, frames.shape[:2])

    def _decoded(self, latents: Tensor) -> Tensor:
        if self.autoencoder is None:
            return latents
        import torch

        return torch.cat([self.autoencoder.decode(part) for part in latents.split(8)])


def write_sheet(
    pictures: Tensor, path: Path, columns: int, captions: Sequence[str]
) -> dict[str, Any]:
    """Write a sheet with ``columns`` pictures in each row, or with a video's frames in each row.

    Returns the entries of the report.
    """
    from megatron_pulse.diffusion.grid import save_grid

    said: dict[str, Any] = {"sheet": str(path)}
    if pictures.dim() == 5:
        count = pictures.shape[1]
        columns = min(count, MOST_FRAMES)
        shown = [round(i * (count - 1) / max(columns - 1, 1)) for i in range(columns)]
        captions = [text for caption in captions for text in (caption, *[""] * (columns - 1))]
        pictures, said["frames"] = pictures[:, shown].flatten(0, 1), shown
    scale = math.ceil(MIN_SIDE / pictures.shape[-1])
    save_grid(pictures, path, columns, captions, scale)
    return said


def write_animation(
    videos: Tensor, path: Path, columns: int, captions: Sequence[str], fps: float = FPS
) -> dict[str, Any]:
    """Write an animated sheet of videos ``[n, f, c, h, w]`` with ``columns`` in each row.

    Returns the entries of the report.
    """
    from megatron_pulse.diffusion.grid import save_animation

    scale = math.ceil(MIN_SIDE / videos.shape[-1])
    save_animation(videos, path, columns, captions, scale, fps)
    return {"sheet": str(path), "fps": fps}


def write_folder(pictures: Tensor, folder: Path) -> dict[str, Any]:
    """Write a file of its own size for each picture, or for each frame of each video.

    Returns the report's entry: the files, in the order of the request.
    """
    from megatron_pulse.diffusion.grid import save_frames, save_pictures

    if pictures.dim() == 5:
        videos = save_frames(pictures, folder)
        return {"files": [[str(path) for path in frames] for frames in videos]}
    return {"files": [str(path) for path in save_pictures(pictures, folder)]}
