"""Between pixels and latents, with a diffusers AutoencoderKL from a local folder."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor


class AutoencoderError(ValueError):
    """A folder that is no usable AutoencoderKL."""


class Autoencoder:
    """Encodes to the mean of the posterior, shifted and scaled as diffusers' pipelines do.

    latents = (mean - shift_factor) * scaling_factor, so that they have about unit variance.
    Nothing is downloaded: ``folder`` holds ``config.json`` and the weights. Raises
    AutoencoderError if it does not.
    """

    def __init__(self, folder: str | Path) -> None:
        from diffusers import AutoencoderKL

        try:
            model = AutoencoderKL.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # diffusers raises many kinds
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise AutoencoderError(
                f"{folder} cannot be read as a diffusers AutoencoderKL: {reason}"
            ) from error
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = model.to(self.device).eval()
        self.scaling_factor = float(model.config.scaling_factor)
        self.shift_factor = float(model.config.get("shift_factor") or 0.0)
        self.latent_channels = int(model.config.latent_channels)
        self.in_channels = int(model.config.in_channels)
        self.factor = 2 ** (len(model.config.block_out_channels) - 1)

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Pixels ``[b, c, h, w]`` in [-1, 1] to fp32 latents ``[b, c', h', w']``."""
        mean = self.model.encode(images.to(self.device)).latent_dist.mode()
        return ((mean - self.shift_factor) * self.scaling_factor).float().to(images.device)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Latents to pixels in [-1, 1]."""
        scaled = latents.to(self.device) / self.scaling_factor + self.shift_factor
        return self.model.decode(scaled).sample.float().clamp(-1, 1).to(latents.device)
