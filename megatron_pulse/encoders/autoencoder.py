"""Encoding and decoding of latents with an autoencoder of diffusers from a local folder."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_pulse.diffusion.noise import Stream, draw
from megatron_pulse.diffusion.published import StoredTensors
from megatron_pulse.encoders.encoder_piece import EncoderPiece, States, run_pieces
from megatron_pulse.encoders.finite import CHECK, all_finite, not_finite
from megatron_pulse.encoders.image_pieces import MOMENTS, PIXELS, image_pieces
from megatron_pulse.encoders.loading import files_amiss, load, require_layers, silently, stored
from megatron_pulse.encoders.tokens import digest_of
from megatron_pulse.errors import UserError, format_faults

_REMARK = "it may overflow in fp16 (its config.json does not set force_upcast to false)"


_PICTURES = "AutoencoderKL"
_SQUARES = "AutoencoderKLFlux2"
"""Class whose latents have squares of 2 x 2 positions as channels, normalised by a batch norm."""
_ONE_FRAME = "AutoencoderKLQwenImage"
"""Class of videos that encodes pictures, as videos of one frame."""
_EXACT = "AutoencoderDC"
"""Class that encodes to latents, not to a posterior (Sana)."""
VIDEO_CLASSES = (
    "AutoencoderKLWan",
    "AutoencoderKLHunyuanVideo",
    "AutoencoderKLCogVideoX",
    "AutoencoderKLLTXVideo",
    "AutoencoderKLMochi",
    "AutoencoderKLTemporalDecoder",
)
"""Classes that decode videos, several frames together; SVD's encodes frame by frame."""
_KNOWN = (_PICTURES, _SQUARES, _ONE_FRAME, _EXACT, *VIDEO_CLASSES)
_TEMPORAL_DECODER = "AutoencoderKLTemporalDecoder"
_FRAMES_FIRST = ("AutoencoderKLCogVideoX", _TEMPORAL_DECODER)
_NORMALIZATION = ("latents_mean", "latents_std", "shift_factor")
_MEAN, _VARIANCE = "bn.running_mean", "bn.running_var"


class AutoencoderError(UserError):
    """Error for a folder without a usable autoencoder."""


class Autoencoder:
    """Autoencoder between pixels and normalised latents, as in diffusers' pipelines.

    Encoding gives the posterior's mean or a sample. latents = (value - shift) * scale, with about
    unit variance. The scale is the configuration's ``scaling_factor``, divided per channel by
    ``latents_std`` if present. The shift is ``latents_mean`` per channel, or ``shift_factor``.
    Flux.2's are those of its batch norm, of squares of 2 x 2 positions, which become channels.

    An autoencoder of videos (``VIDEO_CLASSES``) takes pixels ``[b, c, F, h, w]``, with F - 1 a
    multiple of its ``frame_factor``, and pictures as videos of one frame. Its latents are ``[b, c',
    f, h', w']``, those of CogVideoX and SVD ``[b, f, c', h', w']`` as their backbones take them.
    An autoencoder of pictures takes videos frame by frame.

    If ``tiled``, large pictures are encoded and decoded in diffusers' tiles (``enable_tiling``).

    ``pieces`` are the encoder's layers, of pictures alone. Images are encoded one at a time, since
    the bits may depend on the batch size. ``dtype`` defaults to fp32. fp16 becomes fp32 too unless
    the configuration's ``force_upcast`` is false, as in pipelines of SDXL; ``remark`` then says so.

    Nothing is downloaded: ``folder`` holds ``config.json`` and the weights. Without ``weighs`` the
    weights are not loaded, and the object can neither encode nor decode. Raises AutoencoderError
    for missing files and for contradictory settings.
    """

    def __init__(
        self,
        folder: str | Path,
        dtype: torch.dtype = torch.float32,
        weighs: bool = True,
        *,
        tiled: bool = False,
    ) -> None:
        import diffusers

        if faults := files_amiss(Path(folder)):
            raise AutoencoderError(
                format_faults(f"autoencoder {folder}", faults, "Download the folder again.")
            )
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            config: Any = diffusers.AutoencoderKL.load_config(str(folder), local_files_only=True)
            named = config.get("_class_name", _PICTURES)
            if named not in _KNOWN:
                raise UserError(f"its config.json describes {named}; known are {', '.join(_KNOWN)}")
            if config.get("timestep_conditioning"):
                raise UserError("its decoder is conditioned on a timestep, which is unsupported")
            if tiled and named == _TEMPORAL_DECODER:
                raise UserError(f"{named} has no tiles; leave out --vae-tiling")
            with torch.device("meta"), silently(diffusers.utils.logging):
                model: Any = getattr(diffusers, named).from_config(config)
            tensors = stored(Path(folder), "diffusers", weighs)
            require_layers(tensors, model)
            self.dtype = _dtype(dtype, model.config)
            self.remark = f"{folder} runs in fp32: {_REMARK}" if self.dtype != dtype else ""
            # diffusers' ``to`` would warn of weights kept in fp32; this class has none.
            nn.Module.to(model, self.dtype)
            if weighs and tensors is not None:
                load(model, tensors, self.dtype)
                model = model.to(self.device)
            normalization = _stored_normalization(named, model.config, tensors)
        except Exception as error:  # diffusers raises many types
            reason = str(error) or type(error).__name__
            if not isinstance(error, UserError):
                reason = reason.splitlines()[0]
            raise AutoencoderError(
                f"{folder} cannot be read as a diffusers autoencoder: {reason}"
            ) from error
        self.folder = Path(folder)
        self.model = model.eval().requires_grad_(False)
        self.tiled = tiled
        if tiled:
            self.model.enable_tiling()
        self.is_video = named in VIDEO_CLASSES
        self.frames_first = named in _FRAMES_FIRST
        """True if latents are ``[b, f, c', h', w']``."""
        self._is_frame = named == _ONE_FRAME
        self.is_exact = named == _EXACT
        """True if there is no posterior: its deviation is 0."""
        self._side = 2 if named == _SQUARES else 1
        self.has_temporal_decoder = named == _TEMPORAL_DECODER
        """True of SVD's: its encoder is that of pictures."""
        encodes_clips = self.is_video and not self.has_temporal_decoder
        self.pieces = () if encodes_clips else self._pieces()
        channels = int(config.get("z_dim") or model.config.latent_channels)
        self.latent_channels = channels * self._side**2
        self.scale, self.shift = _normalization(folder, self.latent_channels, normalization)
        self.in_channels = int(config.get("input_channels") or model.config.get("in_channels", 3))
        self.frame_factor = 1
        """Frames of pixels for a frame of latents, after the first."""
        if encodes_clips:
            patch = config.get("patch_size") or 1 if named == "AutoencoderKLWan" else 1
            self.in_channels = int(model.config.out_channels) // patch**2
            self.frame_factor = _frame_factor(model)
        self.factor = _factor(model) * self._side

    def _pieces(self) -> tuple[EncoderPiece, ...]:
        if not self._is_frame and not self.is_exact:
            return image_pieces(self.model)

        def encode(states: States) -> States:
            return {MOMENTS: self._encoded(states[PIXELS])}

        modules = [self.model.encoder, *([self.model.quant_conv] if self._is_frame else [])]
        return (EncoderPiece("encoder", encode, tuple(modules)),)

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
        if self.is_video and images.dim() == 4:
            images = images.unsqueeze(2)
        moments = torch.cat([self._moments(image) for image in images.split(1)])
        if not all_finite({MOMENTS: moments}):
            fault = not_finite(f"autoencoder {self.folder}", self.dtype)
            raise AutoencoderError(f"{fault}. {CHECK}")
        found = [each.to(images.device) for each in self.normalized(moments)]
        mean, deviation = (x.transpose(1, 2) if self.frames_first else x for x in found)
        return mean, deviation

    def latent_shape(self, pixels: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the latents of a picture ``(c, h, w)`` or a video ``(c, F, h, w)``."""
        _, *frames, height, width = pixels
        sides = height // self.factor, width // self.factor
        if self.is_video:
            frames = [((frames or [1])[0] - 1) // self.frame_factor + 1]
        if self.frames_first:
            return (*frames, self.latent_channels, *sides)
        return (self.latent_channels, *frames, *sides)

    def normalized(self, moments: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise ``moments``, the output of the last piece.

        Returns (mean, standard deviation) of latents, fp32 ``[b, c', ...]``.
        """
        if self.is_exact:
            scale, shift = self._normalization_of(moments)
            mean = (moments.float() - shift) * scale
            return mean, torch.zeros_like(mean)
        mean, log_variance = (self._in_channels(x) for x in moments.float().chunk(2, dim=1))
        deviation = torch.exp(0.5 * log_variance.clamp(-30, 20))
        scale, shift = self._normalization_of(mean)
        return (mean - shift) * scale, deviation * scale

    def made_by(self, typed: bool = True) -> str:
        """Provenance of the latents: class, digest of the weights, scale and shift; dtype if
        ``typed``.
        """
        said = f"{type(self.model).__name__} {digest_of(self.folder)}, {self.normalization()}"
        how = str(self.dtype).removeprefix("torch.") + (", tiled" if self.tiled else "")
        return f"{said} ({how})" if typed else said

    def normalization(self) -> str:
        """Scale and shift as text, per channel where they differ."""
        scale, shift = (
            [round(x, 6) for x in each.flatten().tolist()] for each in (self.scale, self.shift)
        )
        return f"scale {scale}, shift {shift}"

    def _normalization_of(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """(scale, shift) for ``latents [b, c', ...]``."""
        sides = [1] * (latents.dim() - 2)
        return self.scale.to(latents).view(-1, *sides), self.shift.to(latents).view(-1, *sides)

    def _in_channels(self, latents: Tensor) -> Tensor:
        """``latents`` with the positions of a square as channels."""
        return F.pixel_unshuffle(latents, self._side) if self._side > 1 else latents

    def _moments(self, image: Tensor) -> Tensor:
        """Moments of one picture or video."""
        pixels = image.to(self.device, self.dtype)
        if not self.pieces:
            return self._encoded(pixels)
        if pixels.dim() == 5:  # frame by frame
            frames = [self._moments(frame) for frame in pixels[0].transpose(0, 1).split(1)]
            return torch.cat(frames).transpose(0, 1)[None]
        if self.tiled:
            return self._encoded(pixels)
        return run_pieces(self.pieces, {PIXELS: pixels})[MOMENTS]

    def _encoded(self, pixels: Tensor) -> Tensor:
        """Moments by the class's own call."""
        moments: Tensor
        if self.is_exact:
            moments = self.model.encode(pixels).latent
        elif self._is_frame:
            moments = self.model.encode(pixels.unsqueeze(2)).latent_dist.parameters.squeeze(2)
        else:
            moments = self.model.encode(pixels).latent_dist.parameters
        return moments

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents to pixels in [-1, 1]: ``[b, c, h, w]``, of videos ``[b, c, F, h, w]``."""
        latents = latents.to(self.device)
        values = self.unscaled(latents).to(self.dtype)
        pixels = self._pixels(values.transpose(1, 2) if self.frames_first else values).float()
        if not all_finite({PIXELS: pixels}):  # clamped, infinite ones would pass for white
            raise AutoencoderError(self._decodes_wrongly(latents))
        return cast(Tensor, pixels.clamp(-1, 1)).to(latents.device)

    def unscaled(self, latents: Tensor) -> Tensor:
        """Values of the autoencoder itself, before scale and shift."""
        inner = latents.transpose(1, 2) if self.frames_first else latents
        scale, shift = self._normalization_of(inner)
        values = inner / scale + shift
        return values.transpose(1, 2) if self.frames_first else values

    def first_frame(self, latents: Tensor) -> Tensor:
        """Latents of a first frame as an image-to-video model reads them beside its sample.

        CogVideoX 1.5 was trained with values that the scale divides instead of multiplying.
        """
        if not self.model.config.get("invert_scale_latents"):
            return latents
        return self.unscaled(latents) / self.scale.flatten()[0].to(latents)

    def _pixels(self, values: Tensor) -> Tensor:
        """Pixels of ``unscaled`` values ``[b, c', ...]``."""
        if self._side > 1:
            values = F.pixel_shuffle(values, self._side)
        if self._is_frame:
            return cast(Tensor, self.model.decode(values.unsqueeze(2)).sample.squeeze(2))
        if not self.has_temporal_decoder:
            return cast(Tensor, self.model.decode(values).sample)
        frames = values.transpose(1, 2)
        decoded = self.model.decode(frames.flatten(0, 1), num_frames=frames.shape[1]).sample
        return cast(Tensor, decoded.unflatten(0, frames.shape[:2]).transpose(1, 2))

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
    upcast = asked == torch.float16 and config.get("force_upcast", False)
    return torch.float32 if upcast else asked


def _stored_normalization(
    named: str, config: Mapping[str, Any], tensors: StoredTensors | None
) -> dict[str, Any]:
    """Settings of the normalisation; LTX and Flux.2 keep statistics with the weights."""
    found = {name: config.get(name) for name in _NORMALIZATION}
    found["scaling_factor"] = config.get("scaling_factor", 1.0)
    for name in ("latents_mean", "latents_std"):
        if named == "AutoencoderKLLTXVideo" and tensors is not None and name in tensors:
            found[name] = tensors[name].float().tolist()
    if named == _SQUARES and tensors is not None and _VARIANCE in tensors:
        variance = tensors[_VARIANCE].float() + config["batch_norm_eps"]
        found["latents_mean"] = tensors[_MEAN].float().tolist()
        found["latents_std"] = variance.sqrt().tolist()
    return found


def _factor(model: Any) -> int:
    """Pixels of a latent along a side."""
    if (ratio := vars(model).get("spatial_compression_ratio")) is not None:
        return int(ratio)
    return int(2 ** (len(model.config.block_out_channels) - 1))


def _frame_factor(model: Any) -> int:
    """Frames of a frame of latents, after the first."""
    config = model.config
    ratios = (
        vars(model).get("temporal_compression_ratio"),
        config.get("scale_factor_temporal"),
        config.get("temporal_compression_ratio"),
    )
    return int(next(ratio for ratio in ratios if ratio is not None))


def _normalization(
    folder: str | Path, channels: int, config: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """(scale, shift) of latents, ``[c, 1, 1]`` or ``[1, 1, 1]``; raises AutoencoderError."""
    faults = []
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
