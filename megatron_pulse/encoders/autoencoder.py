"""Encoding and decoding of latents with a diffusers AutoencoderKL from a local folder."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron_pulse.diffusion.noise import Stream, draw
from megatron_pulse.encoders.encoder_piece import run_pieces
from megatron_pulse.encoders.finite import CHECK, all_finite, not_finite
from megatron_pulse.encoders.image_pieces import MOMENTS, PIXELS, image_pieces
from megatron_pulse.encoders.loading import files_amiss, load, require_layers, silently, stored
from megatron_pulse.encoders.tokens import digest_of
from megatron_pulse.errors import UserError, format_faults

_REMARK = "it may overflow in fp16 (its config.json does not set force_upcast to false)"


class AutoencoderError(UserError):
    """Error for a folder without a usable AutoencoderKL."""


class Autoencoder:
    """Autoencoder between pixels and normalised latents, as in diffusers' pipelines.

    Encoding gives the posterior's mean or a sample. latents = (value - shift) * scale, with about
    unit variance. The scale is the configuration's ``scaling_factor``, divided per channel by
    ``latents_std`` if present. The shift is ``latents_mean`` per channel, or ``shift_factor``.

    ``pieces`` are the encoder's layers. Images are encoded one at a time, since the bits may depend
    on the batch size. ``dtype`` defaults to fp32. fp16 becomes fp32 too unless the configuration's
    ``force_upcast`` is false, as in pipelines of SDXL; ``remark`` then says so.

    Nothing is downloaded: ``folder`` holds ``config.json`` and the weights. Without ``weighs`` the
    weights are not loaded, and the object can neither encode nor decode. Raises AutoencoderError
    for missing files and for contradictory settings.
    """

    def __init__(
        self, folder: str | Path, dtype: torch.dtype = torch.float32, weighs: bool = True
    ) -> None:
        import diffusers
        from diffusers import AutoencoderKL

        if faults := files_amiss(Path(folder)):
            raise AutoencoderError(
                format_faults(f"autoencoder {folder}", faults, "Download the folder again.")
            )
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            config: Any = AutoencoderKL.load_config(str(folder), local_files_only=True)
            named = config.get("_class_name", AutoencoderKL.__name__)
            if named != AutoencoderKL.__name__:
                raise UserError(f"its config.json describes {named}")
            with torch.device("meta"), silently(diffusers.utils.logging):
                model: Any = AutoencoderKL.from_config(config)
            tensors = stored(Path(folder), "diffusers", weighs)
            require_layers(tensors, model)
            self.dtype = _dtype(dtype, model.config)
            self.remark = f"{folder} runs in fp32: {_REMARK}" if self.dtype != dtype else ""
            # diffusers' ``to`` would warn of weights kept in fp32; this class has none.
            nn.Module.to(model, self.dtype)
            if weighs and tensors is not None:
                load(model, tensors, self.dtype)
                model = model.to(self.device)
        except Exception as error:  # diffusers raises many types
            reason = str(error) or type(error).__name__
            if not isinstance(error, UserError):
                reason = reason.splitlines()[0]
            raise AutoencoderError(
                f"{folder} cannot be read as a diffusers AutoencoderKL: {reason}"
            ) from error
        self.folder = Path(folder)
        self.model = model.eval().requires_grad_(False)
        self.pieces = image_pieces(self.model)
        self.latent_channels = int(model.config.latent_channels)
        self.scale, self.shift = _normalization(folder, model.config)
        self.in_channels = int(model.config.in_channels)
        self.factor = 2 ** (len(model.config.block_out_channels) - 1)

    @torch.no_grad()
    def encode(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        """Encode pixels ``[b, c, h, w]`` in [-1, 1] to fp32 latents ``[b, c', h', w']``.

        With ``noise`` (shaped as the latents, see ``posterior_noise``) the result is a sample of
        the posterior, otherwise its mean.
        """
        mean, deviation = self.posterior(images)
        return mean if noise is None else sampled(mean, deviation, noise.to(mean.device))

    def posterior(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(mean, standard deviation) of the images' normalised latents."""
        moments = torch.cat([self._moments(image) for image in images.split(1)])
        if not all_finite({MOMENTS: moments}):
            fault = not_finite(f"autoencoder {self.folder}", self.dtype)
            raise AutoencoderError(f"{fault}. {CHECK}")
        mean, deviation = self.normalized(moments)
        return mean.to(images.device), deviation.to(images.device)

    def normalized(self, moments: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise ``moments [b, 2c', h', w']``, the output of the last piece.

        Returns (mean, standard deviation) of latents, fp32 ``[b, c', h', w']``.
        """
        mean, log_variance = moments.float().chunk(2, dim=1)
        deviation = torch.exp(0.5 * log_variance.clamp(-30, 20))
        scale = self.scale.to(mean)
        return (mean - self.shift.to(mean)) * scale, deviation * scale

    def made_by(self, typed: bool = True) -> str:
        """Provenance of the latents: class, digest of the weights, scale and shift; dtype if
        ``typed``.
        """
        said = f"{type(self.model).__name__} {digest_of(self.folder)}, {self.normalization()}"
        return f"{said} ({str(self.dtype).removeprefix('torch.')})" if typed else said

    def normalization(self) -> str:
        """Scale and shift as text, per channel where they differ."""
        scale, shift = (
            [round(x, 6) for x in each.flatten().tolist()] for each in (self.scale, self.shift)
        )
        return f"scale {scale}, shift {shift}"

    def _moments(self, image: Tensor) -> Tensor:
        given = {PIXELS: image.to(self.device, self.dtype)}
        return run_pieces(self.pieces, given)[MOMENTS]

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents to pixels in [-1, 1]."""
        latents = latents.to(self.device)
        scaled = latents / self.scale.to(latents) + self.shift.to(latents)
        pixels = self.model.decode(scaled.to(self.dtype)).sample.float()
        if not all_finite({PIXELS: pixels}):  # clamped, infinite ones would pass for white
            raise AutoencoderError(self._decodes_wrongly(latents))
        return cast(Tensor, pixels.clamp(-1, 1)).to(latents.device)

    def _decodes_wrongly(self, latents: Tensor) -> str:
        """The fault of pixels that are not finite, and its likely cause."""
        fault = not_finite(f"the decoder of autoencoder {self.folder}", self.dtype)
        if self.dtype == torch.float16:
            return (
                f"{fault}, although its config.json sets force_upcast to false. Decode in fp32 "
                "or bf16."
            )
        largest = latents.abs().max().item()
        return (
            f"{fault}, of latents up to {largest:.3g}: its weights are damaged, or the latents "
            "are from another autoencoder. Give the autoencoder of the training."
        )


def sampled(mean: Tensor, deviation: Tensor, noise: Tensor) -> Tensor:
    """Samples of a posterior, from given noise."""
    return mean + deviation * noise


def posterior_noise(seed: int, sample: int, position: int, shape: tuple[int, ...]) -> Tensor:
    """Noise of ``shape`` from the seed, the sample and its position in the run.

    The position differs between epochs, and so does the noise.
    """
    noise = draw(seed, sample, position, shape, Stream.POSTERIOR).noise
    assert noise is not None
    return noise


def _dtype(asked: torch.dtype, config: Mapping[str, Any]) -> torch.dtype:
    """Dtype of the autoencoder; fp16 becomes fp32 if config.json warns of overflow."""
    upcast = asked == torch.float16 and config["force_upcast"]
    return torch.float32 if upcast else asked


def _normalization(folder: str | Path, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """(scale, shift) of latents, ``[c, 1, 1]`` or ``[1, 1, 1]``; raises AutoencoderError."""
    channels, faults = int(config["latent_channels"]), []
    by_channel = {}
    for name in ("latents_mean", "latents_std"):
        if (values := config.get(name)) is not None:
            if not isinstance(values, list | tuple) or len(values) != channels:
                faults.append(f"{name} must have a number for each of {channels} channels")
            by_channel[name] = values
    if len(by_channel) == 1:
        faults.append(f"{next(iter(by_channel))} is given alone: give both or neither")
    if by_channel and config.get("shift_factor"):
        faults.append("latents_mean and shift_factor exclude each other")
    scale = shift = torch.zeros(1)
    with suppress(TypeError, ValueError):  # a value that is no number leaves the scale 0
        shift = torch.tensor([float(config.get("shift_factor") or 0.0)])
        factor = torch.tensor([float(config["scaling_factor"])])
        if by_channel and not faults:
            shift = torch.tensor(by_channel["latents_mean"], dtype=torch.float32)
            factor = factor / torch.tensor(by_channel["latents_std"], dtype=torch.float32)
        scale = factor
    if not faults and not (scale.isfinite().all() and shift.isfinite().all() and (scale > 0).all()):
        faults.append(
            "scaling_factor, shift_factor, latents_mean and latents_std must be finite numbers, "
            "scales above 0"
        )
    if faults:
        raise AutoencoderError(format_faults(f"{folder}/config.json", faults))
    return scale.view(-1, 1, 1), shift.view(-1, 1, 1)
